"""Random model weights drawn by NumPy, so that tests compile no initialiser and no random program."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def fill_weights(model, seed=0):
    """Return `model` with random weights, all of which affect its outputs, for inputs of about unit scale.

    Args:
        model: a function without arguments that builds a module (`lambda: models.build(..., rngs=nnx.Rngs(0))`, which
            is traced, not run); a module, abstract or not; or a tree of shapes, such as `run.state.weights`.
        seed: random seed. A weight's values depend on the seed, its name and its shape, not on other weights.

    Returns:
        A module for the first two, a tree of arrays for the third. If a shape has a sharding, its array is placed so.
    """
    if isinstance(model, nnx.Module) or callable(model):
        module = model if isinstance(model, nnx.Module) else nnx.eval_shape(model)
        graphdef, weights = nnx.split(module)
        return nnx.merge(graphdef, fill_weights(nnx.to_pure_dict(weights), seed))
    return jax.tree.map_with_path(lambda path, leaf: _draw_weight(_path_names(path), leaf, seed), model)


def _path_names(path):
    """Return the names on a path of a tree, without positions in tuples such as (params, statistics)."""
    keys = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return [str(key) for key in keys if key is not None]


def _draw_weight(names, leaf, seed):
    rng = np.random.default_rng([seed, zlib.crc32(".".join(names).encode())])
    name, shape = names[-1], leaf.shape
    if name == "var" or "scale" in name or name.startswith(("gamma", "temperature")):
        values = rng.uniform(0.8, 1.25, shape)  # near one, but not one
    elif "bias" in name or name == "mean":
        values = 0.1 * rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) / math.sqrt(_fan_in(names, shape))
    values = jnp.asarray(values, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    return values if sharding is None else jax.device_put(values, sharding)


def _fan_in(names, shape):
    """Return the number of inputs that a weight sums over; scaling by it keeps outputs about as large as inputs."""
    name, parent = names[-1], (["", *names])[-2]
    if name == "skip":  # taps x heads
        return shape[-2]
    if name != "kernel":  # embeddings, positions, class tokens: vectors of length one
        return shape[-1] if shape else 1
    if parent in ("query", "key", "value"):  # D N H
        return shape[-3]
    if parent == "out" or shape[-3:-1] == (3, 3):  # N H D; depthwise
        return math.prod(shape[-3:-1])
    return math.prod(shape[-4:-1]) if "conv" in parent else shape[-2]
