"""The MLP of a block: two linear layers and what is between them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.layers.attention import normal, times_weights
from leanformer.layers.dropping import dropout


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Φ(x), exact, inside in float32 at least. By erf: the erfc of `jax.nn.gelu` takes twice the time on a CPU."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * wide.dtype.type(0.5**0.5)))).astype(x.dtype)


class Mlp(nnx.Module):
    """Linear D → F, exact (erf) GELU, Linear F → D, both with bias."""

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            nnx.Linear, kernel_init=kernel_init, dot_general=times_weights, dtype=dtype, rngs=rngs
        )
        self.up = linear(width, mlp_dim)
        self.down = linear(mlp_dim, width)

    def __call__(
        self, x: Float[Array, "b t d"], *, rate: float = 0.0, key: Key[Array, "b"] | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t f"]]:
        """The output, and the hidden layer after its GELU, and its dropout, for a tap."""
        hidden = dropout(gelu(self.up(x)), rate, key)
        return self.down(hidden), hidden
