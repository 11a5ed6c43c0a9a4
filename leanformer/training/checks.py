"""Static validation of a config, before data are opened or devices are used."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from leanformer import config, models, tasks
from leanformer.config import rules
from leanformer.runtime import mesh
from leanformer.training import loggers, step
from leanformer.training import state as states


def check(c: Any) -> None:
    """Validate every key of a config: types, allowed values, rules, and shapes by tracing an abstract model.

    Raises ConfigError if a key is invalid; the message names the key, its value and the fix.
    """
    config.check_keys(c)
    arguments = c.model.to_dict()
    models.check(**arguments)
    config.check(c)
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
