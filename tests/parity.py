"""Helpers of the parity tests: stored cases, models with their weights, and distances."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from leanformer import models, pretrained
from leanformer.pretrained import layouts
from leanformer.training import state


FIXTURES = Path(__file__).parent / "fixtures"


def stored(file, case):
    """Return the metadata of fixtures/<file>.safetensors, and the arrays of one case by name."""
    with safe_open(str(FIXTURES / f"{file}.safetensors"), "numpy") as content:
        about = {name: json.loads(text) for name, text in content.metadata().items() if text[0] in "{["}
        names = [name for name in content.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        return about, {name.removeprefix(f"{case}/"): content.get_tensor(name) for name in names}


def definition(family, arguments, **other):
    """Return our model's graph definition, a function that makes its weights from a key, and their shapes."""
    return state.split(lambda rngs: models.build(family, **arguments, **other, rngs=rngs))


def layout(family, arguments, source="timm"):
    return layouts.layout(source, {"name": family, **arguments})


def load(family, arguments, tensors, source="timm", allowed=None, **other):
    """Return our model's graph definition and their weights in its names and shapes: parameters and statistics."""
    graphdef, _, shapes = definition(family, arguments, **other)
    chosen = layout(family, arguments, source)
    return graphdef, pretrained.load(tensors, chosen, shapes, allowed or pretrained.Allowed())


def in_float64(family, arguments, tensors, source="timm", **other):
    """Return the same as `load` in float64."""
    _, weights = load(family, arguments, tensors, source)
    graphdef, *_ = definition(family, arguments, dtype=jnp.float64, **other)
    return graphdef, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), weights)


def distance(values, expected):
    """Return the largest difference of arrays of one shape and precision as a share of the largest number."""
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
    return np.abs(values - expected).max() / np.abs(expected).max()


def check_back(weights, layout, tensors, *, alone=()):
    """Assert that exported weights equal `tensors`; `alone` are names that only one side has."""
    back = pretrained.export(weights, layout)
    assert back.keys() - set(alone) == tensors.keys() - set(alone)
    for name in tensors.keys() - set(alone):
        np.testing.assert_array_equal(back[name], tensors[name], err_msg=name)


def other_epsilon(model, kind, epsilon):
    """Set the epsilon of every norm of that kind."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, kind):
            module.epsilon = epsilon
