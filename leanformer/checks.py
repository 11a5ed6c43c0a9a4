"""What can be known of a config before data are opened or a device is touched: `check` refuses what cannot work."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from leanformer import config, inputs, key_docs, models, step
from leanformer import state as states
from leanformer.data import sequences
from leanformer.errors import ConfigError


def check(c: Any) -> None:
    """Checks every key: kinds and sizes of the model's, the rules of all, then shapes, by a model without any numbers.

    Raises:
        ConfigError: what was asked, what was found, what to do.
    """
    arguments = c.model.to_dict()
    models.check(**arguments)
    _check_kinds(c)
    config.check(c)
    backend = "naive" if arguments.pop("backend") == "naive" else "xla"  # the others ask for a device
    build = functools.partial(models.build, **arguments, backend=backend, dtype=np.dtype(jax.dtypes.bfloat16))
    graphdef, make_weights = states.split(lambda rngs: build(rngs=rngs))
    weights = jax.eval_shape(lambda: make_weights(jax.random.key(0)))
    kind = inputs.of(c)
    if isinstance(kind, inputs.Sequences) and (wrong := sequences.unknown(c.data.name)):
        raise ConfigError(wrong)
    batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in kind.leaves().items()}
    if c.probe.every:
        jax.eval_shape(step.make_probe_step(graphdef, step.Task(c.loss, kind), c.probe.measures), weights, batch)
    else:
        jax.eval_shape(lambda weights, batch: nnx.merge(graphdef, *weights)(*kind.plain(batch)), weights, batch)


def _check_kinds(c: Any) -> None:
    """Raises ConfigError on a value of another kind than the base config's; those of `model` are the family's."""
    like = dict(key_docs.flat(config.sequences() if "max_length" in c.model else config.base()))
    for key, value in key_docs.flat(c):
        wanted = like.get(key)
        if wanted is None or key.startswith("model."):
            continue
        pairs = [(value, wanted)]
        if isinstance(value, tuple) and isinstance(wanted, tuple) and wanted:
            pairs = [(item, wanted[0]) for item in value]
        for item, kind in pairs:
            whole = isinstance(kind, float) and type(item) is int  # as good as a float
            if type(item) is not type(kind) and not whole:
                raise ConfigError(f"{key}={value!r}: wanted {type(wanted).__name__}, as in {key}={wanted!r}.")
