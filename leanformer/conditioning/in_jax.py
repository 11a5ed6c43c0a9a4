"""What JAX does in its own way: factorisations in float64 whatever its default is, and classes as pytrees."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Float64

from leanformer.conditioning import gram


# Ratio of rows to columns from which a QR before the SVD is faster, measured on a CPU (tools/speed/probe.py).
TALL = 1.5


@functools.cache
def register(*classes: type) -> None:
    """Make dataclasses known to JAX as pytrees."""
    for one in classes:
        jax.tree_util.register_dataclass(one)


@jax.jit
def factorised(x: Float[Array, "*b m n"]) -> Float[Array, "*b n"]:
    """Return singular values, largest first, of float32 matrices, m ≥ n, in float32, by the method of the platform."""
    with jax.enable_x64(True):
        x = x.astype(jnp.float64)
        return jax.lax.platform_dependent(x, cpu=by_reflections, default=by_gram).astype(jnp.float32)


def by_reflections(x: Float64[Array, "*b m n"]) -> Float64[Array, "*b n"]:
    """Return singular values by orthogonal reductions, m ≥ n: QR if the matrix is tall, then bidiagonalisation."""
    if x.shape[-2] >= TALL * x.shape[-1]:
        x = jnp.linalg.qr(x, mode="r")
    return jax.lax.linalg.svd(x, full_matrices=False, compute_uv=False)


def by_gram(x: Float64[Array, "*b m n"]) -> Float64[Array, "*b n"]:
    """Return `gram.by_gram`: cuSOLVER's eigensolver takes whole batches, its SVD only matrices up to 32 x 32."""
    # Not `matmul`, which records a dtype of the result that a vmap outside `enable_x64` would truncate to float32.
    return gram.by_gram(x, jnp, jax.lax.batch_matmul)


def check_concrete(x: Any) -> None:
    """Raise TypeError for a traced array, which cannot be measured on the host."""
    if isinstance(x, Tracer):
        raise TypeError(f"condition() under jit takes float32 and below, found {x.dtype}: call it outside, or cast.")


def observed(arrays: Any) -> Any:
    """Return arrays without gradients, behind a barrier: fused with a measure, the model could round differently."""
    return jax.lax.optimization_barrier(jax.lax.stop_gradient(arrays))
