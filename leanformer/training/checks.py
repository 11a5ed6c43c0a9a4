"""What can be known of a config before data are opened or a device is touched: `check` refuses what cannot work."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from leanformer import config, models, tasks
from leanformer.config import key_docs
from leanformer.errors import ConfigError
from leanformer.layers import backends, stack
from leanformer.pretrained import layouts
from leanformer.runtime import mesh
from leanformer.tasks import losses
from leanformer.training import loggers, optimizers, schedules, step
from leanformer.training import state as states


WORDS = {  # keys, and who knows what they can name
    "dtype": ("bfloat16", "float32"),  # that models are tested in
    "loss": tuple(losses.LOSSES),
    "model.remat": tuple(stack.REMAT),
    "model.backend": ("auto", *backends.BACKENDS),
    "optim.name": tuple(optimizers.OPTIMIZERS),
    "optim.schedule": tuple(schedules.SCHEDULES),
    "init_from.layout": layouts.LAYOUTS,
}


def check(c: Any) -> None:
    """Checks every key: kinds and sizes of the model's, the rules of all, then shapes, by a model without any numbers.

    Raises:
        ConfigError: what was asked, what was found, what to do.
    """
    arguments = c.model.to_dict()
    _check_kinds(c)
    models.check(**arguments)
    _check_words(c)
    config.check(c)
    _check_more(c)
    loggers.check(c.loggers)
    backend = "naive" if arguments.pop("backend") == "naive" else "xla"  # the others ask for a device
    build = functools.partial(models.build, **arguments, backend=backend, dtype=np.dtype(jax.dtypes.bfloat16))
    graphdef, _, weights = states.split(lambda rngs: build(rngs=rngs))
    mesh.check_split(states.axes(graphdef, weights), c.mesh.tensor)
    task = tasks.of(c)
    batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in task.data.input_specs().items()}
    if c.probe.every:
        jax.eval_shape(step.make_probe_step(graphdef, task.objective, c.probe.measures), weights, batch)
    else:
        jax.eval_shape(
            lambda weights, batch: nnx.merge(graphdef, *weights)(*task.objective.inputs(batch)), weights, batch
        )


def _check_kinds(c: Any) -> None:
    """Raises ConfigError on a value of another kind than the base config's; those of `model` are the family's."""
    defaults = config.KINDS[c.task].defaults if c.task in config.KINDS else config.base
    kinds = dict(_kinds(defaults()))
    for key, value in key_docs.flat(c):
        if key not in kinds or (key.startswith("model.") and key != "model.name"):
            continue
        kind, default = kinds[key]
        pairs, words = [(value, kind)], kind.__name__
        if isinstance(value, tuple) and kind is tuple:
            of_items = {type(item) for item in default} or {str}  # one that is empty by default is of words
            pairs = [(item, of_item) for item in value for of_item in of_items]
            words = f"tuple of {' or '.join(sorted(of_item.__name__ for of_item in of_items))}"
        for item, wanted in pairs:
            whole = wanted is float and type(item) is int  # as good as a float
            unset = item is None is default
            if type(item) is not wanted and not whole and not unset:
                shown = f"{words} or None" if default is None else words
                raise ConfigError(f"{key}={value!r}: wanted {shown}, as in {key}={default!r}.")


def _kinds(tree: ConfigDict, prefix: str = "") -> Iterator[tuple[str, tuple[type, Any]]]:
    """The type of each key, also of those that are unset, and its default."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from _kinds(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (tree.get_type(name), value)


def _check_more(c: Any) -> None:
    """Raises ConfigError for another evaluation that does not say of what, and how often."""
    for name, more in c.eval.more.items():
        found = more.to_dict() if isinstance(more, ConfigDict) else more
        whole = isinstance(found, dict) and found.keys() == {"split", "every"}
        if not (whole and isinstance(found["split"], str) and type(found["every"]) is int and found["every"] >= 0):
            raise ConfigError(
                f"eval.more.{name}={found}: give the split's name and how often, in steps, 0 for at the end alone: "
                '{"split": "test", "every": 1000}.'
            )


def _check_words(c: Any) -> None:
    """Raises ConfigError where a key that names one of several things names none of them."""
    found = dict(key_docs.flat(c))
    for key in WORDS.keys() & found.keys():
        value, known = found[key], WORDS[key]
        if value not in known:
            raise ConfigError(f'{key}="{value}": choose one of {", ".join(known)}.')
