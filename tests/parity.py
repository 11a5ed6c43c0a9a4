"""What tests of parity share: what a file of theirs holds of a case, our model with their weights, and distances."""

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
    """What fixtures/<file>.safetensors says of all cases, and the arrays of one, by name."""
    with safe_open(str(FIXTURES / f"{file}.safetensors"), "numpy") as found:
        about = {name: json.loads(text) for name, text in found.metadata().items() if text[0] in "{["}
        names = [name for name in found.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        return about, {name.removeprefix(f"{case}/"): found.get_tensor(name) for name in names}


def definition(family, arguments, **other):
    """Our model, what makes its weights of a key, and their shapes."""
    return state.split(lambda rngs: models.build(family, **arguments, **other, rngs=rngs))


def layout(family, arguments, source="timm"):
    return layouts.layout(source, {"name": family, **arguments})


def load(family, arguments, tensors, source="timm", allowed=None, **other):
    """Our model, and in its names and shapes their weights: parameters and statistics."""
    graphdef, _, shapes = definition(family, arguments, **other)
    chosen = layout(family, arguments, source)
    return graphdef, pretrained.load(tensors, chosen, shapes, allowed or pretrained.Allowed())


def in_float64(family, arguments, tensors, source="timm", **other):
    """As `load`."""
    _, weights = load(family, arguments, tensors, source)
    graphdef, *_ = definition(family, arguments, dtype=jnp.float64, **other)
    return graphdef, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), weights)


def distance(found, expected):
    """Of arrays of one shape and precision, the largest difference as a share of the largest number."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return np.abs(found - expected).max() / np.abs(expected).max()


def check_back(weights, layout, tensors, *, alone=()):
    """Exported, weights are what they were; `alone` are names that either side has without the other."""
    back = pretrained.export(weights, layout)
    assert back.keys() - set(alone) == tensors.keys() - set(alone)
    for name in tensors.keys() - set(alone):
        np.testing.assert_array_equal(back[name], tensors[name], err_msg=name)


def other_epsilon(model, kind, epsilon):
    """Gives it to every norm of that kind."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, kind):
            module.epsilon = epsilon
