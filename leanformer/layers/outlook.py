"""Outlook attention inside 3 x 3 windows, with weights computed linearly from the pixels (Yuan et al. 2021)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from leanformer.layers.attention import normal, times_weights
from leanformer.layers.context import PLAIN, Context
from leanformer.runtime import sharing


def _thirds(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """Return, per pair along an even axis, the preceding number (0 before the first), the first and the second."""
    x = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    first, second = jnp.moveaxis(x, axis + 1, 0)
    one_before = [(int(a == axis), 0) for a in range(second.ndim)]
    before = jax.lax.slice_in_dim(jnp.pad(second, one_before), 0, second.shape[axis], axis=axis)
    return before, first, second


def windows(x: Float[Array, "b rows columns n h"]) -> Float[Array, "b i j n 9 h"]:
    """Return the 3 x 3 windows around every other pixel, zero-padded; I x J is half the map, rounded up.

    Built from slices of odd and even rows and columns, so neither it nor its derivative gathers or scatters.
    """
    rows, columns = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0), (0, 0)))
    return jnp.stack([piece for row in _thirds(x, 1) for piece in _thirds(row, 2)], axis=4)


def overlap_add(y: Float[Array, "b i j n 9 h"], rows: int, columns: int) -> Float[Array, "b rows columns n h"]:
    """Sum windows at their positions in the map: the transpose of `windows`."""
    b, _, _, n, _, h = y.shape
    return jax.linear_transpose(windows, jax.ShapeDtypeStruct((b, rows, columns, n, h), y.dtype))(y)[0]


def _halved(x: Float[Array, "b rows columns d"]) -> Float[Array, "b i j d"]:
    """Return means over 2 x 2 pixels; an odd last row or column is averaged alone."""
    b, rows, columns, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0)), mode="edge")
    return x.reshape(b, -(-rows // 2), 2, -(-columns // 2), 2, d).mean((2, 4))


class OutlookAttention(nnx.Module):
    """Attention inside 3 x 3 windows, with weights computed linearly from means of 2 x 2 pixels (section 3.1).

    Each head of a window has a 9 x 9 matrix with a softmax per row; outputs of overlapping windows are summed. There
    are no queries and keys: H only scales the logits, by 1 / √H.

    Parameters: value (D, N, H') without bias, weights (D, N, 9, 9), out (N, H', D).

    Args:
        grid: rows and columns of the map; tokens are its pixels, row by row.
    """

    masks = ()

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        grid: tuple[int, int],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        value_dim = value_dim or head_dim
        self.grid, self.scale, common = grid, head_dim**-0.5, {"dtype": dtype, "rngs": rngs}
        linear = functools.partial(nnx.LinearGeneral, kernel_init=normal, dot_general=times_weights, **common)
        of_weights = {"kernel_metadata": sharing.heads(-3), "bias_metadata": sharing.heads(-3)}
        self.value = linear(width, (num_heads, value_dim), use_bias=False, kernel_metadata=sharing.heads(-2))
        self.weights = linear(width, (num_heads, 9, 9), **of_weights)
        self.out = linear((num_heads, value_dim), width, axis=(-2, -1), kernel_metadata=sharing.heads(-3))

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], None]:
        """Return the projected output, and for a tap v and out, B T N H, with windows summed; no q and k."""

        def as_map(tokens: Float[Array, "b t *rest"]) -> Float[Array, "b rows columns *rest"]:
            return tokens.reshape(tokens.shape[0], *self.grid, *tokens.shape[2:])

        v, logits = self.value(x), self.weights(_halved(as_map(x)))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = jax.nn.softmax(logits.astype(wide) * self.scale)
        # P and Q are pixels of a window: of its outputs, and of its values.
        y = jnp.einsum("bijnpq,bijnqh->bijnph", weights.astype(v.dtype), windows(as_map(v)))
        out = overlap_add(y.astype(wide), *self.grid).reshape(v.shape).astype(v.dtype)
        return self.out(out), {"v": v, "out": out}, None
