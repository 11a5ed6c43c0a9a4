"""Static validation of a config, before data are opened or devices are used."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from leanformer import config, models, tasks
from leanformer.config import key_docs, rules
from leanformer.errors import ConfigError
from leanformer.layers import backends, stack
from leanformer.pretrained import layouts
from leanformer.runtime import mesh
from leanformer.tasks import losses
from leanformer.training import loggers, optimizers, schedules, step
from leanformer.training import state as states


ALLOWED_VALUES = {  # allowed values by key
    "dtype": ("bfloat16", "float32"),  # dtypes in which models are tested
    "loss": tuple(losses.LOSSES),
    "model.remat": tuple(stack.REMAT),
    "model.backend": ("auto", *backends.BACKENDS),
    "optim.name": tuple(optimizers.OPTIMIZERS),
    "optim.schedule": tuple(schedules.SCHEDULES),
    "init_from.layout": layouts.LAYOUTS,
}


def check(c: Any) -> None:
    """Validate every key of a config: types, allowed values, rules, and shapes by tracing an abstract model.

    Raises ConfigError if a key is invalid; the message names the key, its value and the fix.
    """
    config.check_keys(c)
    arguments = c.model.to_dict()
    _check_types(c)
    models.check(**arguments)
    _check_values(c)
    config.check(c)
    _check_more(c)
    loggers.check(c.loggers)
    backend = "naive" if arguments.pop("backend") == "naive" else "xla"  # the other backends require a device
    arguments |= {"backend": backend, "dtype": np.dtype(jax.dtypes.bfloat16)}
    graphdef, _, weights = states.split(lambda rngs: models.build(rngs=rngs, **arguments))
    mesh.check_split(states.declared_axes(graphdef, weights), c.mesh.tensor)
    task = tasks.build(c)
    batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in task.data.input_specs().items()}
    if rules.measures_conditioning(c):
        jax.eval_shape(step.make_probe_step(graphdef, task.objective, c.probe.measures), weights, batch)
    else:
        jax.eval_shape(
            lambda weights, batch: nnx.merge(graphdef, *weights)(*task.objective.inputs(batch)), weights, batch
        )


def _check_types(c: Any) -> None:
    """Raise ConfigError if a value has another type than in the base config; `models.check` checks those of `model`."""
    defaults = config.KINDS[c.task].defaults if c.task in config.KINDS else config.base
    types = dict(_iterate_types(defaults()))
    for key, value in key_docs.iterate_keys(c):
        if key not in types or (key.startswith("model.") and key != "model.name"):
            continue
        kind, default = types[key]
        pairs, description = [(value, kind)], kind.__name__
        if isinstance(value, tuple) and kind is tuple:
            item_types = {type(item) for item in default} or {str}  # a tuple that is empty by default holds strings
            pairs = [(item, item_type) for item in value for item_type in item_types]
            description = f"tuple of {' or '.join(sorted(item_type.__name__ for item_type in item_types))}"
        for item, expected in pairs:
            whole = expected is float and type(item) is int  # an integer is accepted as a float
            unset = item is None is default
            if type(item) is not expected and not whole and not unset:
                shown = f"{description} or None" if default is None else description
                raise ConfigError(f"{key}={value!r}: expected {shown}, as in {key}={default!r}.")


def _iterate_types(tree: ConfigDict, prefix: str = "") -> Iterator[tuple[str, tuple[type, Any]]]:
    """Yield the type and the default of each key, including unset ones."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from _iterate_types(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (tree.get_type(name), value)


def _check_more(c: Any) -> None:
    """Raise ConfigError if an additional evaluation (eval.more) lacks its split or its interval."""
    for name, more in c.eval.more.items():
        value = more.to_dict() if isinstance(more, ConfigDict) else more
        complete = isinstance(value, dict) and value.keys() == {"split", "every"}
        if not (complete and isinstance(value["split"], str) and type(value["every"]) is int and value["every"] >= 0):
            raise ConfigError(
                f"eval.more.{name}={value}: expected the name of a split and an interval in steps (0: only at the "
                'end), as in {"split": "test", "every": 1000}.'
            )


def _check_values(c: Any) -> None:
    """Raise ConfigError if a key of ALLOWED_VALUES does not have one of its allowed values."""
    values = dict(key_docs.iterate_keys(c))
    for key in ALLOWED_VALUES.keys() & values.keys():
        value, allowed = values[key], ALLOWED_VALUES[key]
        if value not in allowed:
            raise ConfigError(f'{key}="{value}": unknown value. Choose one of {", ".join(allowed)}.')
