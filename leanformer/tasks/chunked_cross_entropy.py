"""Chunked cross-entropy over a large vocabulary: logits of a part of each row's tokens at a time.

With `tensor` devices in the mesh, each computes the logits of its shard of the vocabulary. They exchange maxima, sums
and target logits, B x T numbers each, and the gradient of x. The vocabulary is padded to equal shards, with logits of
-inf.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from leanformer.layers import with_gradient
from leanformer.runtime.mesh import constrain_tensor, tensor_parts


Residuals = tuple[Array, Array, Array | None]
About = tuple[float | None, int]  # soft cap, and vocabulary size without padding


def cross_entropy(
    x: Float[Array, "b t d"],
    kernel: Float[Array, "d v"],
    bias: Float[Array, "v"] | None,
    targets: Int[Array, "b t"],
    *,
    at_once: int,
    soft_cap: float | None = None,
) -> Float[Array, ""]:
    """Return the sum over tokens of −log softmax(x W + b) at their targets, in nats, in float32 or wider.

    The gradient is computed in the forward pass, chunk by chunk, so that logits are neither stored nor recomputed. This
    takes the same three matmuls as with all logits at once, and memory for two arrays of the size of W. Matmuls are in
    the dtype of x. Negative targets are ignored. `at_once` is the largest number of logits in memory, of B x T x V; at
    least one token per row is processed. `soft_cap` is c of capped logits c tanh(logits / c).
    """
    x, targets = _pieces(x, targets, at_once // kernel.shape[1])
    kernel, bias, real = _shares(kernel, bias)
    return _summed(x, kernel, bias, targets, (soft_cap, real))


def cross_entropy_and_hits(
    x: Float[Array, "b t d"],
    kernel: Float[Array, "d v"],
    bias: Float[Array, "v"] | None,
    targets: Int[Array, "b t"],
    *,
    at_once: int,
    soft_cap: float | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return `cross_entropy`, and the number of targets that have the largest logit, the first among ties."""

    def add(sums: tuple[Array, Array], piece: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        logits, _ = _logits(piece[0], kernel, bias, (soft_cap, real))
        return (sums[0] + _losses(logits, piece[1])[0], sums[1] + jnp.sum(_largest(logits) == piece[1])), None

    pieces = _pieces(x, targets, at_once // kernel.shape[1])
    kernel, bias, real = _shares(kernel, bias)
    return jax.lax.scan(add, (jnp.zeros((), _wide(x)), jnp.zeros((), jnp.int32)), pieces)[0]


def _shares(kernel: Array, bias: Array | None) -> tuple[Array, Array | None, int]:
    """Return kernel and bias with columns padded to a multiple of the `tensor` devices, and the unpadded number."""
    real, parts = kernel.shape[1], tensor_parts()
    if parts == 1:
        return kernel, bias, real
    over = -real % parts
    kernel = constrain_tensor(jnp.pad(kernel, ((0, 0), (0, over))), batch=False)
    return kernel, None if bias is None else jnp.pad(bias, (0, over)), real


def _largest(logits: Array) -> Array:
    if tensor_parts() == 1:
        return jnp.argmax(logits, axis=-1)
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    return jnp.where(logits == logits.max(axis=-1, keepdims=True), places, logits.shape[-1]).min(axis=-1)


def _pieces(x: Array, targets: Array, tokens: int) -> tuple[Array, Array]:
    """Split rows into P pieces, B T D and B T, of at most `tokens` tokens in total, at least one per row."""
    b, t, d = x.shape
    pieces = -(-t // max(1, min(t, tokens // b)))
    length = -(-t // pieces)  # equal lengths: padding of the last piece costs as much as tokens
    missing = pieces * length - t
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(b, pieces, length, d).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, missing)), constant_values=-1)
    return x, targets.reshape(b, pieces, length).swapaxes(0, 1)


def _sum_losses(x: Array, kernel: Array, bias: Array | None, targets: Array, about: About) -> Array:
    """Return the summed loss of pieces P B T D; without differentiation, only losses are computed."""

    def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        logits, _ = _logits(piece[0], kernel, bias, about)
        return total + _losses(logits, piece[1])[0], None

    return jax.lax.scan(add, jnp.zeros((), _wide(x)), (x, targets))[0]


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _logits(x: Array, kernel: Array, bias: Array | None, about: About) -> tuple[Array, Array | float]:
    """Return logits, and their derivative with respect to the uncapped logits."""
    soft_cap, real = about
    logits, slope = _bent(_products(x, kernel, bias), soft_cap)
    if kernel.shape[1] == real:
        return logits, slope
    return jnp.where(jnp.arange(kernel.shape[1]) < real, logits, -jnp.inf), slope


def _products(x: Array, kernel: Array, bias: Array | None) -> Array:
    logits = jnp.einsum("btd,dv->btv", x, kernel.astype(x.dtype), preferred_element_type=_wide(x))
    if bias is not None:
        logits += bias.astype(logits.dtype)[None, None]
    return logits if tensor_parts() == 1 else constrain_tensor(logits, batch=True)


def _bent(logits: Array, soft_cap: float | None) -> tuple[Array, Array | float]:
    if soft_cap is None:
        return logits, 1.0
    bent = jnp.tanh(logits / soft_cap)
    return soft_cap * bent, 1 - jnp.square(bent)


def _losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the sum of losses, and the logarithm of each softmax denominator."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if tensor_parts() == 1:
        target_logits = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)
    else:  # indexing would all-gather the logits
        target_logits = jnp.where(_hit(logits, jnp.maximum(targets, 0)), logits, 0).sum(axis=-1, keepdims=True)
    return jnp.where(targets[..., None] < 0, 0, total - target_logits).sum(), total


def _hit(logits: Array, targets: Array) -> Array:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]


def _forward(x: Array, kernel: Array, bias: Array | None, targets: Array, about: About) -> tuple[Array, Residuals]:
    wide, narrow = _wide(x), kernel.astype(x.dtype)

    def add(sums: tuple[Any, ...], piece: tuple[Array, Array]) -> tuple[tuple[Any, ...], Array]:
        part, targets_part = piece
        logits, slope = _logits(part, kernel, bias, about)
        loss, total = _losses(logits, targets_part)
        by_logits = jnp.where(
            targets_part[..., None] < 0, 0, (jnp.exp(logits - total) - _hit(logits, targets_part)) * slope
        )
        by_bias = sums[2] if bias is None else sums[2] + by_logits.sum(axis=(0, 1))
        by_logits = by_logits.astype(x.dtype)
        by_kernel = jnp.einsum("btd,btv->dv", part, by_logits, preferred_element_type=wide)
        by_part = jnp.einsum("btv,dv->btd", by_logits, narrow, preferred_element_type=wide)
        return (sums[0] + loss, sums[1] + by_kernel, by_bias), by_part.astype(x.dtype)

    zeros = jnp.zeros(kernel.shape, wide)
    zeros = zeros if tensor_parts() == 1 else constrain_tensor(zeros, batch=False)
    none: Any = jnp.zeros((), wide), zeros, None if bias is None else jnp.zeros(bias.shape, wide)
    (loss, by_kernel, by_bias), by_x = jax.lax.scan(add, none, (x, targets))
    return loss, (by_x, by_kernel.astype(kernel.dtype), None if bias is None else by_bias.astype(bias.dtype))


def _backward(about: About, residuals: Residuals, g: Array) -> tuple[Array | None, ...]:
    by_x, by_kernel, by_bias = jax.tree.map(lambda gradient: gradient * g.astype(gradient.dtype), residuals)
    return by_x, by_kernel, by_bias, None


_summed = with_gradient(_forward, _backward, plain=_sum_losses, static=(4,))
