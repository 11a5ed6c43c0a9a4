"""Weights written down and not learned: what heads of a rank, or as many heads as items, can represent exactly.

Each is the parameters of an `encoder` model, whose errors on `data.points` say how exact it is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer.data import points as drawn
from leanformer.models.encoder import Model


def nearest(dim: int, temperature: float, skip: float = 1e-3) -> Model:
    """One head of full rank for "nearest" of any number of points: its product of queries and keys is minus the
    identity, so that the smallest inner product is the largest logit (Amsel et al. 2025, section 4).

    Args:
        dim: d.
        temperature: what inner products are multiplied by; the error falls as it grows.
        skip: share of the token itself, which the skip adds, in what is normalised.
    """
    model = _zeros(width=dim, depth=1, num_heads=1, head_dim=dim, mlp_dim=1)
    eye = np.eye(dim)[:, None]
    _set(model, "query", -eye * math.sqrt(dim) * temperature)
    _set(model, "key", eye)
    _set(model, "value", eye)
    _set(model, "out", eye.swapaxes(0, 1) / skip)
    for norm in (model.blocks.layers.norm1, model.blocks.layers.norm2):
        norm.scale[...] = norm.scale[...] + 1
    return model


def retrieval(sizes: drawn.Sizes, temperature: float) -> Model:
    """One head of rank 1 for each item of "retrieval": its key, and its value, is a point's share of the item's
    direction, its query a constant. The class token has but zeros, and loses wherever a share is above zero.

    Args:
        temperature: what shares are multiplied by.
    """
    dim, items = sizes.dim, sizes.items
    sizes_of_model = {"width": dim + 1, "depth": 1, "num_heads": items, "head_dim": 1, "inputs": dim, "outputs": 1}
    model = _zeros(**sizes_of_model, pool="token", norm="none", post_norm=False)
    directions = drawn.directions(sizes)  # D d
    model.read_in.kernel[...] = _like(model.read_in.kernel, np.eye(dim, dim + 1))
    model.blocks.layers.attention.query.bias[...] += temperature
    for name in ("key", "value"):
        _set(model, name, np.pad(directions.T, ((0, 1), (0, 0)))[..., None])
    _set(model, "out", np.tile(np.eye(dim + 1)[dim], (items, 1, 1)))
    model.read_out.kernel[...] = _like(model.read_out.kernel, np.eye(dim + 1)[:, [dim]])
    return model


def majority(dim: int, heads: int, temperature: float, seed: int = 0) -> Model:
    """Two layers of rank 1 for "nearest_query" of two points (after Amsel et al. 2025, section 6, where positions are
    appended to tokens): heads of random directions u vote for the point that has more of u on the query's side, and a
    head of the second layer takes the point that most have voted for.

    A token is [itself, output, whose vote it is, votes]: d, d, 1 and 1 coordinates, the third from positions.

    Args:
        heads: how many vote; the error falls as they grow.
        temperature: of all logits.
    """
    width, mark, votes = 2 * dim + 2, 2 * dim, 2 * dim + 1
    model = _zeros(
        width=width, depth=2, num_heads=heads, head_dim=1, value_dim=dim, inputs=dim, outputs=dim, max_length=3,
        norm="none", post_norm=False,
    )  # fmt: skip
    basis = np.eye(width)
    model.read_in.kernel[...] = _like(model.read_in.kernel, basis[:dim])
    model.pos_embed[...] = _like(model.pos_embed, np.outer([1, -1, 0], basis[mark]))
    u = drawn.sphere(np.random.default_rng(seed).standard_normal((heads, dim)))
    first = {name: np.zeros((width, heads, 1)) for name in ("query", "key")}
    second = {name: np.zeros((width, heads, 1)) for name in ("query", "key")}
    first["query"][:dim, :, 0] = -u.T * temperature  # the query's token is minus the query
    first["key"][:dim, :, 0] = u.T
    second["query"][votes, 0], second["key"][mark, 0] = temperature, 1
    value, out = np.zeros((2, width, heads, dim)), np.zeros((2, heads, dim, width))
    value[0, mark, :, 0], out[0, :, 0, votes] = 1, 1 / heads
    value[1, :dim, 0], out[1, 0, :, dim : 2 * dim] = np.eye(dim), np.eye(dim)
    for name in ("query", "key"):
        _set(model, name, np.stack([first[name], second[name]]))
    _set(model, "value", value)
    _set(model, "out", out)
    model.read_out.kernel[...] = _like(model.read_out.kernel, basis[:, dim : 2 * dim])
    return model


def angle_from_minus_identity(model: Model) -> np.ndarray:
    """Degrees between the product of queries and keys of each head of each layer, L N, as a vector of its d² numbers,
    and minus the identity."""
    attention = model.blocks.layers.attention
    query, key = (np.asarray(getattr(attention, name).kernel[...], np.float64) for name in ("query", "key"))
    product = np.einsum("ldnh,lenh->lnde", query, key)
    cosine = -np.trace(product, axis1=2, axis2=3) / np.linalg.norm(product, axis=(2, 3)) / math.sqrt(query.shape[1])
    return np.degrees(np.arccos(np.clip(cosine, -1, 1)))


def _zeros(**arguments: Any) -> Model:
    """A model of parameters that are all zero."""
    model = nnx.eval_shape(lambda: Model.from_section(arguments, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), nnx.state(model, nnx.Param)))
    return model


def _set(model: Model, name: str, kernel: np.ndarray) -> None:
    """The kernel of a projection of attention, of all layers or of each."""
    param = getattr(model.blocks.layers.attention, name).kernel
    param[...] = _like(param, np.broadcast_to(kernel, param.shape))


def _like(param: nnx.Param, value: np.ndarray) -> np.ndarray:
    """The value in the parameter's dtype. Raises ValueError for another shape."""
    if value.shape != param.shape:
        raise ValueError(f"{value.shape} is not the parameter's shape, {param.shape}.")
    return value.astype(param.dtype)
