"""Norms over the last axis, computed in float32 or wider. All take the same arguments; `rngs` is unused."""

from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from leanformer.errors import ConfigError
from leanformer.layers import with_gradient


class LayerNorm(nnx.Module):
    """LayerNorm. Parameters: scale, bias (width)."""

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: Float[Array, "*rest d"]) -> Float[Array, "*rest d"]:
        y = _standardise(x.astype(jnp.promote_types(x.dtype, jnp.float32)), self.epsilon)
        scale, bias = (jnp.broadcast_to(p[...], y.shape) for p in (self.scale, self.bias))
        return (y * scale + bias).astype(self.dtype)


def _standardise_forward(x: Float[Array, "*rest d"], epsilon: float) -> tuple[Array, tuple[Array, Array]]:
    """Return (x − mean) / √(variance + ε) over the last axis, in two passes: E[x²] − E[x]² cancels in float32.

    The closed-form gradient reads the activations half as often as the separate gradients of mean and variance.
    """
    centred = x - x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return centred * inverse, (centred * inverse, inverse)


def _standardise_backward(_: float, residuals: tuple[Array, Array], g: Array) -> tuple[Array]:
    y, inverse = residuals
    return (inverse * (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True)),)


_standardise = with_gradient(_standardise_forward, _standardise_backward, static=(1,))


class RMSNorm(nnx.Module):
    """RMSNorm: x / √(mean of x² + ε) × scale (Zhang & Sennrich 2019). Parameters: scale (width)."""

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: Float[Array, "*rest d"]) -> Float[Array, "*rest d"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (y * jnp.broadcast_to(self.scale[...], y.shape)).astype(self.dtype)


class UnitNorm(nnx.Module):
    """Unit norm: x / max(‖x‖, ε) × scale, on a sphere of learned radius (Amsel et al. 2025). Parameters: scale ()."""

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        self.scale = nnx.Param(jnp.ones(()))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: Float[Array, "*rest d"]) -> Float[Array, "*rest d"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares = jnp.square(wide).sum(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(jnp.maximum(squares, self.epsilon**2)) * self.scale[...]).astype(self.dtype)


class NoNorm(nnx.Module):
    """Identity in place of a norm, with a cast to `dtype`."""

    def __init__(self, width: int, *, epsilon: float = 0.0, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rest d"]) -> Float[Array, "*rest d"]:
        return x.astype(self.dtype)


NORMS = MappingProxyType({"layernorm": LayerNorm, "rmsnorm": RMSNorm, "unit": UnitNorm, "none": NoNorm})


def make(kind: str, width: int, **common: Any) -> nnx.Module:
    """Return a new norm of a kind of NORMS, as in `model.norm`. Raises ConfigError if it is unknown."""
    if kind not in NORMS:
        raise ConfigError(f'"{kind}": unknown norm. Choose one of: {", ".join(NORMS)}.')
    return NORMS[kind](width, **common)
