"""Attention of given queries, keys and values, by the backends; `multihead` has the module with heads and projections.

Axes in einsum strings, comments and signatures of all of leanformer:

    B batch   T query tokens   S key tokens   N heads   H head dimension (of values if it differs)
    D embedding dimension   F MLP hidden dimension   V vocabulary or classes   M landmarks   L layers
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from leanformer.errors import ConfigError
from leanformer.layers import backends, with_gradient
from leanformer.layers.masks import UNMASKED, Lengths, Mask, apply_soft_cap, logits


# Checkpoint names of what remat saves: of attention q, k, v as inputs of the matmuls, and the output; of unrolled
# layers also weights in the dtype of activations.
ATTENDED, WEIGHTS = "attended", "weights"

RESOLUTION = 1 << 16  # of dropout rates: 16 random bits per number

normal = nnx.initializers.normal(0.02)
fan_in = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # uniform in ±1/√inputs, the default of PyTorch


def _product_forward(x: Float[Array, "m k"], w: Float[Array, "k n"]) -> tuple[Float[Array, "m n"], tuple[Array, Array]]:
    return x @ w, (x, w)


def _product_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    return g @ w.T, x.T @ g


_product = with_gradient(_product_forward, _product_backward)


def times_weights(x: Array, w: Array, dimension_numbers: Any, **_: Any) -> Array:
    """Contract the last axes of `x` with the first axes of `w`, as the `dot_general` of `nnx.Linear`.

    The derivative of `jax.lax.dot_general` computes the transposed weight gradient and then transposes it. Computing it
    directly saves 15 % of a training step on a CPU (`tools/speed/step.py`).
    """
    number = len(dimension_numbers[0][0])  # of contracted axes
    w = checkpoint_name(w, WEIGHTS)
    rest, out = x.shape[: x.ndim - number], w.shape[number:]
    inner = math.prod(w.shape[:number])
    flat = _product(x.reshape(math.prod(rest), inner), w.reshape(inner, math.prod(out)))
    return flat.reshape(*rest, *out)


class Projection(nnx.LinearGeneral):
    """Linear layer to or from heads, whose bias is added before the outputs are split into heads.

    Only then, and behind a barrier, does XLA add the bias within a GPU's matmul in ViT-B. A kernel of its own reads and
    writes the result once more: 4 to 6 % of the bytes of a step (`tools/gpu/kernels.md`).
    """

    def weights(self) -> Array:
        """Return the weights that multiply tokens, in the shape of the kernel."""
        return self.kernel[...]

    def __call__(  # ty: ignore[incompatible-method-override] - no sharding of the result
        self, inputs: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        bias = None if self.bias is None else self.bias[...].reshape(-1)
        inputs, kernel, bias = self.promote_dtype((inputs, self.weights(), bias), dtype=self.dtype)
        number = len(self.in_features)
        axes = tuple(range(inputs.ndim - number, inputs.ndim))
        kernel = kernel.reshape(*self.in_features, math.prod(self.out_features))
        out = times_weights(inputs, kernel, ((axes, tuple(range(number))), ((), ())))
        if bias is not None:
            out = out + jnp.broadcast_to(jax.lax.optimization_barrier(bias), out.shape)
        return out.reshape(*out.shape[:-1], *self.out_features)


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s k hv"],
    *,
    mask: Mask = UNMASKED,
    scale: float | None = None,
    soft_cap: float | None = None,
    backend: str = "xla",
    lengths: Lengths | None = None,
    dropout: float = 0.0,
    key: Key[Array, "b"] | None = None,
) -> Float[Array, "b t n hv"]:
    """Return softmax(Q Kᵀ × scale) V per head, B T N H', with the softmax and its sums in float32 or wider.

    Backends: "xla" is fused by the compiler, "cudnn" is the fused kernel that never materialises the T × S matrix,
    "naive" is the float32 reference. `backends.resolve` selects one; there is no fallback here.

    Args:
        q: queries, B T N H.
        k, v: keys and values, B S K H and B S K H', of K heads; each is shared by N / K consecutive query heads
            (Ainslie et al. 2023).
        mask: keys visible to each query, at least one. Weights of others are exactly zero.
        scale: factor of the logits; 1/√H if None.
        soft_cap: c of the capped logits c tanh(Q Kᵀ × scale / c), before the mask (Gemma Team 2024); None for no cap.
        backend: one of `backends.BACKENDS`, not "auto".
        lengths: entry (B, T) of `full_lengths`, if T is odd and it was computed before. Only cuDNN uses it, which
            requires lengths of the queries if the mask has lengths of the keys.
        dropout: dropout rate of the attention weights; ignored without a key. The backward pass draws the mask again.
        key: random keys, one per example (B); None for no dropout.

    Raises:
        ConfigError: cudnn does not support the mask, the soft cap, or dropout.
        ValueError: K does not divide N, other axes of q, k and v differ, or the backend is unknown.

    >>> q = k = jnp.zeros((1, 3, 2, 4))  # 2 heads of dimension 4: equal logits
    >>> attend(q, k, jnp.arange(24.0).reshape(1, 3, 2, 4), mask=Mask(causal=True))[0, :, 0, 0].tolist()
    [0.0, 4.0, 8.0]
    """
    if q.shape[2] % k.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"q, k and v of shapes {q.shape}, {k.shape} and {v.shape}: expected B T N H, B S K H and B S K H', with K "
            "a divisor of N."
        )
    if backend == "cudnn":
        if obstacle := backends.obstacle(mask.parts, soft_cap, dropout):
            raise ConfigError(f'model.backend="cudnn" cannot run: {obstacle}. Use model.backend="xla".')
        return _fused(q, k, v, mask, scale, lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dropout, key = (0.0, None) if key is None or not dropout else (dropout, key)
    if backend == "xla":
        return _grouped(q, k, v, mask, scale, soft_cap, dropout, key)
    if backend == "naive":
        weights = _dropped(probabilities(q, k, mask, scale, soft_cap), dropout, key)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
        out = jnp.einsum("bnts,bsnh->btnh", weights, v.astype(weights.dtype), precision="highest")
        return out.astype(v.dtype)
    raise ValueError(f"backend={backend!r} is not one of {backends.BACKENDS}.")


def _fused(q: Array, k: Array, v: Array, mask: Mask, scale: float | None, lengths: Lengths | None) -> Array:
    """Run cuDNN's kernel, with the inputs of its gradient named for remat."""
    tokens = q.shape[1]
    k, (v, mask) = _even(k), pad_to_even(v, mask)
    q, k, v = (checkpoint_name(x, ATTENDED) for x in (_even(q), k, v))
    options: dict[str, Any] = {"key_value_seq_lengths": mask.lengths, "is_causal": mask.causal, "scale": scale}
    if mask.lengths is not None and lengths is not None:
        options |= {"query_seq_lengths": lengths[1]}
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)[:, :tokens]


def full_lengths(*tokens: Float[Array, "..."]) -> dict[tuple[int, int], Lengths]:
    """Return {(B, T): int32 lengths (B times T, B times T + 1)} for each array B T D with an odd T, for cuDNN's kernel.

    A stack computes them before its scan; inside, every layer would compute them again.
    """
    odd = {x.shape[:2] for x in tokens if x.ndim == 3 and x.shape[1] % 2}
    full = functools.partial(jnp.full, dtype=jnp.int32)
    return {(b, t): jax.lax.optimization_barrier((full(b, t), full(b, t + 1))) for b, t in sorted(odd)}


def pad_to_even(
    x: Float[Array, "b s *rest"], mask: Mask, lengths: Lengths | None = None
) -> tuple[Float[Array, "b even *rest"], Mask]:
    """Append a token of zeros to an odd number of tokens and hide it in the mask; return an even number unchanged.

    JAX rejects the gradient of cuDNN's kernel for odd numbers of tokens. Padding before the projections has negligible
    cost; padding q, k and v in `attend` costs 8 % of the bytes moved by the fusions of a step.
    """
    return (_even(x), mask.hide_last(*x.shape[:2], lengths)) if x.shape[1] % 2 else (x, mask)


def _even(x: Float[Array, "b t *rest"]) -> Float[Array, "b even *rest"]:
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), *((0, 0),) * (x.ndim - 2))) if x.shape[1] % 2 else x


def dropout(x: Float[Array, "b *rest"], rate: float, key: Key[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Set each number to zero with probability `rate`, and divide the others by `keep_probability`; no key: no dropout.

    Each example has its own key, and the mask of a token does not depend on the number of tokens after it.
    """
    if key is None or not rate:
        return x
    keep = checkpoint_name(dropout_mask(key, x.shape[1:], rate), "dropout")
    return jnp.where(keep, x / keep_probability(rate), 0)


def dropout_embeddings(
    x: Float[Array, "b t d"], rate: float, key: Key[Array, "b"] | None
) -> tuple[Float[Array, "b t d"], Key[Array, "b"] | None]:
    """Apply dropout before the first block, and return the keys for the blocks."""
    if key is None:
        return x, None
    key, own = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
    return dropout(x, rate, own), key


def dropout_mask(key: Key[Array, "b"], shape: tuple[int, ...], rate: float) -> Bool[Array, "b *rest"]:
    """Draw masks B *shape from one key per example; False with probability `rate`, in 16 bits."""
    *tokens, width = shape

    def draw(key: Key[Array, ""]) -> Bool[Array, "*rest"]:
        words = jax.random.bits(key, (*tokens, -(-width // 2)), jnp.uint32)  # two numbers each: drawing is the cost
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*tokens, -1)[..., :width]
        return halves >= round(rate * RESOLUTION)

    return jax.vmap(draw)(key)


def keep_probability(rate: float) -> float:
    """Return the exact probability with which `dropout` keeps a number: 1 − rate, rounded to 16 bits."""
    return 1 - round(rate * RESOLUTION) / RESOLUTION


def _dropped(weights: Float[Array, "b n t s"], rate: float, key: Key[Array, "b"] | None) -> Float[Array, "b n t s"]:
    if key is None:
        return weights
    return jnp.where(dropout_mask(key, weights.shape[1:], rate), weights / keep_probability(rate), 0)


def _grouped(
    q: Array, k: Array, v: Array, mask: Mask, scale: float, soft_cap: float | None, rate: float, key: Any
) -> Array:
    """Run `_attend` with query heads of a shared key head as additional queries, so that no key is copied."""
    (b, t, n, h), kv = q.shape, k.shape[2]
    if n == kv:
        return _attend(q, k, v, mask, key, _Settings(scale, t, soft_cap, rate))
    q = jnp.moveaxis(q.reshape(b, t, kv, n // kv, h), 3, 1).reshape(b, t * (n // kv), kv, h)
    out = _attend(q, k, v, mask, key, _Settings(scale, t, soft_cap, rate)).reshape(b, n // kv, t, kv, v.shape[-1])
    return jnp.moveaxis(out, 1, 3).reshape(b, t, n, v.shape[-1])


class _Settings(NamedTuple):
    scale: float  # factor of the logits
    queries: int  # number of queries of one head of a group
    soft_cap: float | None
    rate: float  # dropout rate


def _attend_forward(
    q: Array, k: Array, v: Array, mask: Mask, key: Any, settings: _Settings
) -> tuple[Array, tuple[Any, ...]]:
    scale, queries, soft_cap, rate = settings
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.promote_types(v.dtype, jnp.float32))
    # Heads before tokens: the matmuls and the softmax then read contiguous memory.
    q, k, v = (checkpoint_name(x.swapaxes(1, 2), ATTENDED) for x in (q * scale, k, v))
    logits = mask.mask_logits(apply_soft_cap(product("bnth,bnsh->bnts", q, k), soft_cap), queries)
    largest = checkpoint_name(logits.max(-1, keepdims=True), ATTENDED)
    weights = jnp.exp(logits - largest)
    total = checkpoint_name(weights.sum(-1, keepdims=True), ATTENDED)
    # Divide after the second matmul: it scales T × H numbers instead of T × S.
    out = product("bnts,bnsh->bnth", _dropped(weights, rate, key).astype(v.dtype), v) / total
    out = checkpoint_name(out.astype(v.dtype), ATTENDED)
    return out.swapaxes(1, 2), (q, k, v, mask, key, largest, total, out)


def _attend_backward(settings: _Settings, residuals: tuple[Any, ...], g: Array) -> tuple[Array | None, ...]:
    scale, queries, soft_cap, rate = settings
    q, k, v, mask, key, largest, total, out = residuals
    product = functools.partial(jnp.einsum, preferred_element_type=total.dtype)
    g = g.swapaxes(1, 2)
    along = jnp.sum(g * out, -1, keepdims=True)
    g = g.astype(v.dtype)
    logits = apply_soft_cap(product("bnth,bnsh->bnts", q, k), soft_cap)
    weights = jnp.exp(mask.mask_logits(logits, queries) - largest) / total
    by_logits = weights * (_dropped(product("bnth,bnsh->bnts", g, v), rate, key) - along)
    if soft_cap is not None:
        by_logits *= 1 - jnp.square(logits / soft_cap)  # from the unmasked logits, all within ±soft_cap
    by_q = product("bnts,bnsh->bnth", by_logits.astype(k.dtype), k) * scale
    # Sums over the rows of a T × S matrix: transposing the small factor avoids transposing the large one.
    by_k = product("bnht,bnts->bnhs", q.swapaxes(2, 3), by_logits.astype(q.dtype)).swapaxes(2, 3)
    dropped = _dropped(weights, rate, key).astype(v.dtype)
    by_v = product("bnht,bnts->bnhs", g.swapaxes(2, 3), dropped).swapaxes(2, 3)
    grads = (x.swapaxes(1, 2).astype(y.dtype) for x, y in ((by_q, q), (by_k, k), (by_v, v)))
    return (*grads, None, None)


# The gradient recomputes the matrix from the largest logit and the sum of each row.
_attend = with_gradient(_attend_forward, _attend_backward, static=(5,))


def probabilities(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    mask: Mask = UNMASKED,
    scale: float | None = None,
    soft_cap: Any = None,
) -> Float[Array, "b n t s"]:
    """Return the attention matrix softmax(Q Kᵀ × scale), B N T S, in float32 (float64 for float64 inputs).

    Arguments as in `attend`; hidden keys have probability 0.
    """
    q, k = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k))
    return jax.nn.softmax(logits(q, k, mask, scale, soft_cap))
