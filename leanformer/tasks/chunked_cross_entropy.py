"""Cross-entropy over a large vocabulary, without its logits: a piece of each row's tokens at a time.

Where a mesh has `tensor` devices, each has the logits of its share of the vocabulary alone: maxima, sums and the logit
of the target go between them, B x T numbers each, and the gradient of x. The vocabulary is filled up to whole shares;
logits that stand for no token are -inf.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from leanformer.runtime.mesh import constrain_tensor, tensor_parts


Kept = tuple[Array, Array, Array | None]
About = tuple[float | None, int]  # the soft cap, and how many logits are of tokens


def cross_entropy(
    x: Float[Array, "b t d"],
    kernel: Float[Array, "d v"],
    bias: Float[Array, "v"] | None,
    targets: Int[Array, "b t"],
    *,
    at_once: int,
    soft_cap: float | None = None,
) -> Float[Array, ""]:
    """The sum over tokens of −log softmax(x W + b) at their targets, nats, in float32 at least.

    Its gradient is made beside it, piece by piece, so that no logit is kept or made again: the same three products as
    of logits that are all there, and two arrays of the weights' size.

    Args:
        x: what the last norm gives.
        kernel, bias: W and b, of any dtype; products are in that of x, sums in float32.
        targets: tokens; nothing is asked where one is negative.
        at_once: logits that are there at a time, of B × T × V; of one token of each row at least.
        soft_cap: c of logits that are c tanh(logits / c); None for none.
    """
    x, targets = _pieces(x, targets, at_once // kernel.shape[1])
    kernel, bias, real = _shares(kernel, bias)
    return _summed(x, kernel, bias, targets, (soft_cap, real))


def hits(
    x: Float[Array, "b t d"],
    kernel: Float[Array, "d v"],
    bias: Float[Array, "v"] | None,
    targets: Int[Array, "b t"],
    *,
    at_once: int,
) -> Int[Array, ""]:
    """How many targets have the largest logit, the first of equal ones; arguments as of `cross_entropy`."""

    def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        logits, _ = _logits(piece[0], kernel, bias, (None, real))
        return total + jnp.sum(_largest(logits) == piece[1]), None

    pieces = _pieces(x, targets, at_once // kernel.shape[1])
    kernel, bias, real = _shares(kernel, bias)
    return jax.lax.scan(add, jnp.zeros((), jnp.int32), pieces)[0]


def _shares(kernel: Array, bias: Array | None) -> tuple[Array, Array | None, int]:
    """Both with a column for each token and as many as `tensor` devices can share out; and how many are of tokens."""
    real, parts = kernel.shape[1], tensor_parts()
    if parts == 1:
        return kernel, bias, real
    over = -real % parts
    kernel = constrain_tensor(jnp.pad(kernel, ((0, 0), (0, over))), batch=False)
    return kernel, None if bias is None else jnp.pad(bias, (0, over)), real


def _largest(logits: Array) -> Array:
    """The place of the largest logit, the first of equal ones."""
    if tensor_parts() == 1:
        return jnp.argmax(logits, axis=-1)
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    return jnp.where(logits == logits.max(axis=-1, keepdims=True), places, logits.shape[-1]).min(axis=-1)


def _pieces(x: Array, targets: Array, tokens: int) -> tuple[Array, Array]:
    """P pieces of each row, B T D and B T, that together have so many tokens at most, one of each row at least."""
    b, t, d = x.shape
    pieces = -(-t // max(1, min(t, tokens // b)))
    length = -(-t // pieces)  # alike: a last piece of padding costs what others do
    missing = pieces * length - t
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(b, pieces, length, d).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, missing)), constant_values=-1)
    return x, targets.reshape(b, pieces, length).swapaxes(0, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(x: Array, kernel: Array, bias: Array | None, targets: Array, about: About) -> Array:
    """Of pieces P B T D; without a gradient no more than the losses is made."""

    def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        logits, _ = _logits(piece[0], kernel, bias, about)
        return total + _losses(logits, piece[1])[0], None

    return jax.lax.scan(add, jnp.zeros((), _wide(x)), (x, targets))[0]


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _logits(x: Array, kernel: Array, bias: Array | None, about: About) -> tuple[Array, Array | float]:
    """Logits, and their derivative by what they would be without the soft cap."""
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
    """Their sum, and the logarithm of each softmax's denominator."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if tensor_parts() == 1:
        own = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)
    else:  # a look-up would bring all logits together
        own = jnp.where(_hit(logits, jnp.maximum(targets, 0)), logits, 0).sum(axis=-1, keepdims=True)
    return jnp.where(targets[..., None] < 0, 0, total - own).sum(), total


def _hit(logits: Array, targets: Array) -> Array:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]


def _forward(x: Array, kernel: Array, bias: Array | None, targets: Array, about: About) -> tuple[Array, Kept]:
    wide, narrow = _wide(x), kernel.astype(x.dtype)

    def add(sums: tuple[Any, ...], piece: tuple[Array, Array]) -> tuple[tuple[Any, ...], Array]:
        part, wanted = piece
        logits, slope = _logits(part, kernel, bias, about)
        loss, total = _losses(logits, wanted)
        by_logits = jnp.where(wanted[..., None] < 0, 0, (jnp.exp(logits - total) - _hit(logits, wanted)) * slope)
        by_bias = sums[2] if bias is None else sums[2] + by_logits.sum(axis=(0, 1))
        by_logits = by_logits.astype(x.dtype)
        by_kernel = jnp.einsum("btd,btv->dv", part, by_logits, preferred_element_type=wide)
        by_part = jnp.einsum("btv,dv->btd", by_logits, narrow, preferred_element_type=wide)
        return (sums[0] + loss, sums[1] + by_kernel, by_bias), by_part.astype(x.dtype)

    zeros = jnp.zeros(kernel.shape, wide)
    zeros = zeros if tensor_parts() == 1 else constrain_tensor(zeros, batch=False)
    none = jnp.zeros((), wide), zeros, None if bias is None else jnp.zeros(bias.shape, wide)
    (loss, by_kernel, by_bias), by_x = jax.lax.scan(add, none, (x, targets))
    return loss, (by_x, by_kernel.astype(kernel.dtype), None if bias is None else by_bias.astype(bias.dtype))


def _backward(about: About, kept: Kept, g: Array) -> tuple[Array | None, ...]:
    by_x, by_kernel, by_bias = jax.tree.map(lambda gradient: gradient * g.astype(gradient.dtype), kept)
    return by_x, by_kernel, by_bias, None


_summed.defvjp(_forward, _backward)
