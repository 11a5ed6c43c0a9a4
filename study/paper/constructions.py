"""Weights constructed by hand: tasks that heads of full rank, or one head per item, can represent exactly.

Each construction sets the parameters of an `encoder` model; its errors on `data.points` show how exact it is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer.data import points as point_tasks
from leanformer.models.encoder import Model


def nearest(dim: int, temperature: float, skip: float = 1e-3) -> Model:
    """Return one head of full rank for "nearest" of any number of points: its product of query and key weights is minus
    the identity, so that the smallest inner product is the largest logit (Amsel et al. 2025, section 4).

    Args:
        dim: d.
        temperature: factor on the inner products; the error falls as it grows.
        skip: weight of the token itself, which the skip connection adds, relative to the output of attention.
    """
    model = _make_zero_model(width=dim, depth=1, num_heads=1, head_dim=dim, mlp_dim=1)
    eye = np.eye(dim)[:, None]
    _set_kernel(model, "query", -eye * math.sqrt(dim) * temperature)
    _set_kernel(model, "key", eye)
    _set_kernel(model, "value", eye)
    _set_kernel(model, "out", eye.swapaxes(0, 1) / skip)
    for norm in (model.blocks.layers.norm1, model.blocks.layers.norm2):
        norm.scale[...] = norm.scale[...] + 1
    return model


def retrieval(sizes: point_tasks.Sizes, temperature: float) -> Model:
    """Return one head of rank 1 per item of "retrieval": its key and value are the component of a point along the
    direction of the item, its query is constant. The class token is zero; any positive component outranks it.

    Args:
        temperature: factor on the components.
    """
    dim, items = sizes.dim, sizes.num_items
    model_sizes = {"width": dim + 1, "depth": 1, "num_heads": items, "head_dim": 1, "inputs": dim, "outputs": 1}
    model = _make_zero_model(**model_sizes, pool="token", norm="none", post_norm=False)
    directions = point_tasks.directions(sizes)  # D d
    model.read_in.kernel[...] = _cast(model.read_in.kernel, np.eye(dim, dim + 1))
    model.blocks.layers.attention.query.bias[...] += temperature
    for name in ("key", "value"):
        _set_kernel(model, name, np.pad(directions.T, ((0, 1), (0, 0)))[..., None])
    _set_kernel(model, "out", np.tile(np.eye(dim + 1)[dim], (items, 1, 1)))
    model.read_out.kernel[...] = _cast(model.read_out.kernel, np.eye(dim + 1)[:, [dim]])
    return model


def majority(dim: int, heads: int, temperature: float, seed: int = 0) -> Model:
    """Return two layers of rank 1 for "nearest_query" of two points.

    It follows Amsel et al. 2025, section 6, where positions are appended to tokens. Each head of the first layer has a
    random direction u and votes for the point that agrees more with the query along u. A head of the second layer
    selects the point with most votes.

    A token is [itself, output, marker of its vote, votes]: d, d, 1 and 1 coordinates, the third from positions.

    Args:
        heads: number of voting heads; the error falls as it grows.
        temperature: factor on all logits.
    """
    width, mark, votes = 2 * dim + 2, 2 * dim, 2 * dim + 1
    model = _make_zero_model(
        width=width, depth=2, num_heads=heads, head_dim=1, value_dim=dim, inputs=dim, outputs=dim, max_length=3,
        norm="none", post_norm=False,
    )  # fmt: skip
    basis = np.eye(width)
    model.read_in.kernel[...] = _cast(model.read_in.kernel, basis[:dim])
    model.pos_embed[...] = _cast(model.pos_embed, np.outer([1, -1, 0], basis[mark]))
    u = point_tasks.sphere(np.random.default_rng(seed).standard_normal((heads, dim)))
    first = {name: np.zeros((width, heads, 1)) for name in ("query", "key")}
    second = {name: np.zeros((width, heads, 1)) for name in ("query", "key")}
    first["query"][:dim, :, 0] = -u.T * temperature  # the query's token is minus the query
    first["key"][:dim, :, 0] = u.T
    second["query"][votes, 0], second["key"][mark, 0] = temperature, 1
    value, out = np.zeros((2, width, heads, dim)), np.zeros((2, heads, dim, width))
    value[0, mark, :, 0], out[0, :, 0, votes] = 1, 1 / heads
    value[1, :dim, 0], out[1, 0, :, dim : 2 * dim] = np.eye(dim), np.eye(dim)
    for name in ("query", "key"):
        _set_kernel(model, name, np.stack([first[name], second[name]]))
    _set_kernel(model, "value", value)
    _set_kernel(model, "out", out)
    model.read_out.kernel[...] = _cast(model.read_out.kernel, basis[:, dim : 2 * dim])
    return model


def angle_from_minus_identity(model: Model) -> np.ndarray:
    """Return the degrees (L N) between minus the identity and the product of query and key weights of each head in each
    layer, both as vectors of d² numbers."""
    attention = model.blocks.layers.attention
    query, key = (np.asarray(getattr(attention, name).kernel[...], np.float64) for name in ("query", "key"))
    product = np.einsum("ldnh,lenh->lnde", query, key)
    cosine = -np.trace(product, axis1=2, axis2=3) / np.linalg.norm(product, axis=(2, 3)) / math.sqrt(query.shape[1])
    return np.degrees(np.arccos(np.clip(cosine, -1, 1)))


def _make_zero_model(**arguments: Any) -> Model:
    """Return a model whose parameters are all zero."""
    model = nnx.eval_shape(lambda: Model.from_section(arguments, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), nnx.state(model, nnx.Param)))
    return model


def _set_kernel(model: Model, name: str, kernel: np.ndarray) -> None:
    """Set the kernel of an attention projection, of all layers at once or per layer."""
    param = getattr(model.blocks.layers.attention, name).kernel
    param[...] = _cast(param, np.broadcast_to(kernel, param.shape))


def _cast(param: nnx.Param, value: np.ndarray) -> np.ndarray:
    """Return the value in the parameter's dtype. Raise ValueError if the shapes differ."""
    if value.shape != param.shape:
        raise ValueError(f"{value.shape} is not the parameter's shape, {param.shape}.")
    return value.astype(param.dtype)
