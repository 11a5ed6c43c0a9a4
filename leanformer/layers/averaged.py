"""Mean of several independent modules of multi-head attention."""

from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from leanformer.config.declare import dataclass, types_of
from leanformer.errors import ConfigError
from leanformer.layers.context import PLAIN, Context
from leanformer.layers.multihead import MultiHeadAttention, check_shared
from leanformer.runtime.mesh import REPLICATED


@dataclass(frozen=True)
class Keys:
    """Option of attention="softmax" in the encoder."""

    # number of attention modules per layer, each with separate heads, whose outputs are averaged; 1 if unset
    modules: int | None = None


class AveragedAttention(MultiHeadAttention):
    """The mean of the outputs of independent modules of multi-head attention, as one module of all their heads.

    Parameters: those of `MultiHeadAttention` with N = modules × heads; with several modules, output biases are `bias`
    (modules, D).

    Args:
        width, head_dim, value_dim: as of `MultiHeadAttention`.
        num_heads: number of query heads of each module.
        num_kv_heads: number of key and value heads of each module; `num_heads` if None.
        out_bias: True for an output bias of each module.
        modules: number of modules, initialised like separate modules.
        arguments: further arguments of `MultiHeadAttention`.

    Raises:
        ConfigError: `modules` is below 1, or an error of `MultiHeadAttention`.
    """

    options = MappingProxyType({**MultiHeadAttention.options, **types_of(Keys)})

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        modules: int = 1,
        num_kv_heads: int | None = None,
        out_bias: bool = True,
        **arguments: Any,
    ):
        if modules < 1:
            raise ConfigError(f"model.modules={modules} must be at least 1.")
        check_shared(num_heads, num_kv_heads or num_heads)
        several = modules > 1
        super().__init__(
            width,
            modules * num_heads,
            head_dim,
            value_dim,
            num_kv_heads=num_kv_heads and modules * num_kv_heads,
            out_bias=out_bias and not several,
            **arguments,
        )
        self.modules = modules
        if several:
            self.out.kernel[...] *= modules**0.5  # initialised for the fan-in of all heads together
        if several and out_bias:
            self.bias = nnx.Param(jnp.zeros((modules, width)), **REPLICATED)

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], Any]:
        """Return output, arrays and cache as in `MultiHeadAttention`."""
        projected, arrays, cache = super().__call__(x, context)
        if self.modules > 1:
            projected = projected / self.modules
        if hasattr(self, "bias"):
            projected = projected + self.bias[...].mean(axis=0).astype(projected.dtype)[None, None]
        return projected, arrays, cache
