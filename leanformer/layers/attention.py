"""Multi-head attention with heads, head width and model width free of one another.

Axes, here and everywhere in leanformer, in einsum strings, comments and signatures:

    B batch   T query tokens   S key tokens   N heads   H head width (value width per head where it differs)
    D model width   F MLP width   V vocabulary or classes   M landmarks   L layers
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from leanformer.errors import ConfigError
from leanformer.layers.backends import BACKENDS, cap_obstacle, dropout_obstacle, mask_obstacle
from leanformer.layers.dropping import drawn, share_kept
from leanformer.layers.masks import ALL, Lengths, Mask, capped, logits


ATTENDED = "attended"  # what remat keeps of attention: q, k and v as the products read them, and the output

normal = nnx.initializers.normal(0.02)
fan_in = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # within ±1/√inputs, PyTorch's own


@jax.custom_vjp
def _product(x: Float[Array, "m k"], w: Float[Array, "k n"]) -> Float[Array, "m n"]:
    return x @ w


def _product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ w, (x, w)


def _product_backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    return g @ w.T, x.T @ g


_product.defvjp(_product_forward, _product_backward)


def times_weights(x: Array, w: Array, dimension_numbers: Any, precision: Any = None, **_: Any) -> Array:
    """Last axes of x with first axes of w: what `nnx.Linear` takes as its `dot_general`.

    The same numbers as `jax.lax.dot_general`, whose derivative makes the weights' gradient transposed and turns it
    around; made the right way round, a training step takes 15 % less time on a CPU (`benchmarks/step.py`).

    Raises:
        NotImplementedError: other axes, or a precision.
    """
    (x_axes, w_axes), batch = dimension_numbers
    number = len(x_axes)
    if (
        tuple(a % x.ndim for a in x_axes) != tuple(range(x.ndim - number, x.ndim))
        or tuple(w_axes) != tuple(range(number))
        or any(map(len, batch))
        or precision is not None
    ):
        raise NotImplementedError(f"times_weights takes no {dimension_numbers=}, {precision=}.")
    rest, out = x.shape[: x.ndim - number], w.shape[number:]
    flat = _product(x.reshape(math.prod(rest), -1), w.reshape(-1, math.prod(out)))
    return flat.reshape(*rest, *out)


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s k hv"],
    *,
    mask: Mask = ALL,
    scale: float | None = None,
    soft_cap: float | None = None,
    backend: str = "xla",
    lengths: Lengths | None = None,
    dropout: float = 0.0,
    key: Key[Array, "b"] | None = None,
) -> Float[Array, "b t n hv"]:
    """softmax(Q Kᵀ × scale) V per head; softmax and its sums in float32 at least, whatever the inputs.

    "xla" lets the compiler fuse, "cudnn" is the fused kernel that never forms the T × S matrix, "naive" is the
    plain float32 reference. Use `backends.resolve` for the choice; nothing falls back silently here.

    Args:
        k, v: of as many heads as q, or fewer, each of which the next N / K query heads share (Ainslie et al. 2023).
        mask: which keys each query sees, at least one. Others have weight zero, exactly.
        scale: of the logits; 1/√H if None.
        soft_cap: c of logits that are c tanh(Q Kᵀ × scale / c), before the mask (Gemma Team 2024); None for none.
        lengths: `full_lengths` of q, where they are made already; cuDNN wants those of queries beside those of keys.
        dropout: share of the weights of softmax that are zero, the others divided by what it leaves; none without a
            key. The backward pass draws them again.
        key: one an example.

    Raises:
        ConfigError: cudnn, and a mask that it does not know, a soft cap, or dropout.
        ValueError: a number of heads that is no multiple of the keys'.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} heads of keys evenly.")
    if backend == "cudnn":
        if obstacle := mask_obstacle(mask.parts) or cap_obstacle(soft_cap) or dropout_obstacle(dropout):
            raise ConfigError(f'model.backend="cudnn" cannot run: {obstacle}. Use model.backend="xla".')
        return _fused(q, k, v, mask, scale, lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dropout, key = (0.0, None) if key is None or not dropout else (dropout, key)
    if backend == "xla":
        return _grouped(q, k, v, mask, scale, soft_cap, dropout, key)
    if backend == "naive":
        weights = _dropped(probabilities(q, k, mask, scale, soft_cap), dropout, key)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
        return jnp.einsum("bnts,bsnh->btnh", weights, v.astype(weights.dtype)).astype(v.dtype)
    raise ValueError(f"backend={backend!r} is not one of {BACKENDS}.")


def _fused(q: Array, k: Array, v: Array, mask: Mask, scale: float | None, lengths: Lengths | None) -> Array:
    """cuDNN's kernel, which keeps what its gradient reads (see `remat`)."""
    tokens = q.shape[1]
    k, (v, mask) = _even(k), even(v, mask)
    q, k, v = (checkpoint_name(x, ATTENDED) for x in (_even(q), k, v))
    asked = {"key_value_seq_lengths": mask.lengths, "is_causal": mask.causal, "scale": scale}
    if mask.lengths is not None and lengths is not None:
        asked |= {"query_seq_lengths": lengths[1]}
    if mask.window is not None:
        asked["local_window_size"] = (mask.window - 1, 0)  # keys before and after the own one
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **asked)[:, :tokens]


def full_lengths(*tokens: Float[Array, "..."]) -> dict[tuple[int, int], Lengths]:
    """By B and T of arrays B T D: T, and T made even, of every example, for cuDNN's kernel of an odd number of tokens.

    For a stack of layers to make before its scan: inside, each layer of a compiled program makes its own.
    """
    odd = {x.shape[:2] for x in tokens if x.ndim == 3 and x.shape[1] % 2}
    return {(b, t): jax.lax.optimization_barrier((_all(b, t), _all(b, t + 1))) for b, t in sorted(odd)}


def _all(batch: int, length: int) -> Int[Array, "{batch}"]:
    return jnp.full(batch, length, jnp.int32)


def even(
    x: Float[Array, "b s *rest"], mask: Mask, lengths: Lengths | None = None
) -> tuple[Float[Array, "b even *rest"], Mask]:
    """Tokens to be keys, one of zeros more where they are odd in number, and a mask that leaves it out.

    JAX refuses the gradient of cuDNN's kernel for odd numbers, which cuDNN itself takes. Added before the projections,
    the token costs nothing to speak of; added to q, k and v by `attend`, 8 % of the bytes that a step's fusions move.
    """
    return (_even(x), mask.hide_last(*x.shape[:2], lengths)) if x.shape[1] % 2 else (x, mask)


def _even(x: Float[Array, "b t *rest"]) -> Float[Array, "b even *rest"]:
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), *((0, 0),) * (x.ndim - 2))) if x.shape[1] % 2 else x


def _dropped(weights: Float[Array, "b n t s"], rate: float, key: Key[Array, "b"] | None) -> Float[Array, "b n t s"]:
    if key is None:
        return weights
    return jnp.where(drawn(key, weights.shape[1:], rate), weights / share_kept(rate), 0)


def _grouped(
    q: Array, k: Array, v: Array, mask: Mask, scale: float, soft_cap: float | None, rate: float, key: Any
) -> Array:
    """`_attend`, the query heads that share a head of keys as more queries of it, so that no key is copied."""
    (b, t, n, h), kv = q.shape, k.shape[2]
    if n == kv:
        return _attend(q, k, v, mask, key, scale, t, soft_cap, rate)
    q = jnp.moveaxis(q.reshape(b, t, kv, n // kv, h), 3, 1).reshape(b, -1, kv, h)
    out = _attend(q, k, v, mask, key, scale, t, soft_cap, rate).reshape(b, n // kv, t, kv, -1)
    return jnp.moveaxis(out, 1, 3).reshape(b, t, n, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _attend(
    q: Array, k: Array, v: Array, mask: Mask, key: Any, scale: float, queries: int, soft_cap: float | None, rate: float
) -> Array:
    """`attend` itself. Its gradient makes the matrix again from the largest logit and the sum of each row."""
    return _attend_forward(q, k, v, mask, key, scale, queries, soft_cap, rate)[0]


def _attend_forward(
    q: Array, k: Array, v: Array, mask: Mask, key: Any, scale: float, queries: int, soft_cap: float | None, rate: float
) -> tuple[Array, tuple[Any, ...]]:
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.promote_types(v.dtype, jnp.float32))
    # Heads before tokens: what the products and the softmax between them read in one piece.
    q, k, v = (checkpoint_name(x.swapaxes(1, 2), ATTENDED) for x in (q * scale, k, v))
    logits = mask.leave_out(capped(product("bnth,bnsh->bnts", q, k), soft_cap), queries)
    largest = checkpoint_name(logits.max(-1, keepdims=True), ATTENDED)
    weights = jnp.exp(logits - largest)
    total = checkpoint_name(weights.sum(-1, keepdims=True), ATTENDED)
    # Divide after the second product: T × H numbers to scale rather than T × S.
    out = product("bnts,bnsh->bnth", _dropped(weights, rate, key).astype(v.dtype), v) / total
    out = checkpoint_name(out.astype(v.dtype), ATTENDED)
    return out.swapaxes(1, 2), (q, k, v, mask, key, largest, total, out)


def _attend_backward(
    scale: float, queries: int, soft_cap: float | None, rate: float, kept: tuple[Any, ...], g: Array
) -> tuple[Array | None, ...]:
    q, k, v, mask, key, largest, total, out = kept
    product = functools.partial(jnp.einsum, preferred_element_type=total.dtype)
    g = g.swapaxes(1, 2)
    along = jnp.sum(g * out, -1, keepdims=True)
    g = g.astype(v.dtype)
    logits = capped(product("bnth,bnsh->bnts", q, k), soft_cap)
    weights = jnp.exp(mask.leave_out(logits, queries) - largest) / total
    by_logits = weights * (_dropped(product("bnth,bnsh->bnts", g, v), rate, key) - along)
    if soft_cap is not None:
        by_logits *= 1 - jnp.square(logits / soft_cap)  # of those before the mask, all within ±soft_cap
    by_q = product("bnts,bnsh->bnth", by_logits.astype(k.dtype), k) * scale
    # Sums over the rows of a T × S matrix: with the narrow factor turned first, the wide one is read as it lies.
    by_k = _turned(product("bnht,bnts->bnhs", _turned(q), by_logits.astype(q.dtype)))
    by_v = _turned(product("bnht,bnts->bnhs", _turned(g), _dropped(weights, rate, key).astype(v.dtype)))
    grads = (x.swapaxes(1, 2).astype(y.dtype) for x, y in ((by_q, q), (by_k, k), (by_v, v)))
    return (*grads, None, None)


def _turned(x: Float[Array, "b n i j"]) -> Float[Array, "b n j i"]:
    """Transposed, on a CPU in memory and not in the dimension numbers of a product, which would take the slow kind."""

    def in_memory(x: Array) -> Array:
        return jax.lax.optimization_barrier(jax.lax.optimization_barrier(x).swapaxes(2, 3))

    return jax.lax.platform_dependent(x, cpu=in_memory, default=lambda x: x.swapaxes(2, 3))


_attend.defvjp(_attend_forward, _attend_backward)


def probabilities(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    mask: Mask = ALL,
    scale: float | None = None,
    soft_cap: Any = None,
) -> Float[Array, "b n t s"]:
    """The attention matrix softmax(Q Kᵀ × scale) itself, in float32 (float64 for float64 inputs)."""
    q, k = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k))
    return jax.nn.softmax(logits(q, k, mask, scale, soft_cap))
