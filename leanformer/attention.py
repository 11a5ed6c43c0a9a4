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
from jaxtyping import Array, Bool, Float, Int

from leanformer.backends import BACKENDS
from leanformer.errors import ConfigError


ATTENDED = "attended"  # what remat keeps of attention: q, k and v as the products read them, and the output

# Which keys count and which are padding: the first so many of each example, or any, as booleans.
Lengths = Int[Array, "b"] | Bool[Array, "b s"]

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
    k: Float[Array, "b s n h"],
    v: Float[Array, "b s n hv"],
    *,
    lengths: Lengths | None = None,
    backend: str = "xla",
) -> Float[Array, "b t n hv"]:
    """softmax(Q Kᵀ / √H) V per head; softmax and its sums in float32 at least, whatever the inputs.

    "xla" lets the compiler fuse, "cudnn" is the fused kernel that never forms the T × S matrix, "naive" is the
    plain float32 reference. Use `backends.resolve` for the choice; nothing falls back silently here.

    Args:
        lengths: the keys of each example that count, at least one; all if None. Others have weight zero, exactly.

    Raises:
        ConfigError: cudnn, and `lengths` are booleans.
    """
    if backend == "cudnn":
        if lengths is not None and lengths.dtype == bool:
            raise ConfigError(
                'model.backend="cudnn" leaves out the keys from a length on, and here some are padding between others. '
                'Use model.backend="xla".'
            )
        return _fused(q, k, v, lengths)
    if backend == "xla":
        return _attend(q, k, v, lengths)
    if backend == "naive":
        weights = probabilities(q, k, lengths)
        return jnp.einsum("bnts,bsnh->btnh", weights, v.astype(weights.dtype)).astype(v.dtype)
    raise ValueError(f"backend={backend!r} is not one of {BACKENDS}.")


def _fused(q: Array, k: Array, v: Array, lengths: Int[Array, "b"] | None) -> Array:
    """cuDNN's kernel, which keeps what its gradient reads (see `remat`)."""
    tokens = q.shape[1]
    k, v, lengths = _even(k), *even(v, lengths)
    q, k, v = (checkpoint_name(x, ATTENDED) for x in (_even(q), k, v))
    out = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
    return out[:, :tokens]


def even(x: Float[Array, "b s *rest"], lengths: Lengths | None) -> tuple[Float[Array, "b even *rest"], Lengths | None]:
    """Tokens to be keys, one of zeros more where they are odd in number, and lengths that leave it out.

    JAX refuses the gradient of cuDNN's kernel for odd numbers, which cuDNN itself takes. Added before the projections,
    the token costs nothing to speak of; added to q, k and v by `attend`, 8 % of the bytes that a step's fusions move.
    """
    if lengths is None and x.shape[1] % 2:
        lengths = jnp.full(len(x), x.shape[1], jnp.int32)
    return _even(x), lengths


def _even(x: Float[Array, "b t *rest"]) -> Float[Array, "b even *rest"]:
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), *((0, 0),) * (x.ndim - 2))) if x.shape[1] % 2 else x


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, lengths: Lengths | None) -> Array:
    """`attend` itself. Its gradient makes the matrix again from the largest logit and the sum of each row."""
    return _attend_forward(q, k, v, lengths)[0]


def _attend_forward(q: Array, k: Array, v: Array, lengths: Lengths | None) -> tuple[Array, tuple[Any, ...]]:
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.promote_types(v.dtype, jnp.float32))
    # Heads before tokens: what the products and the softmax between them read in one piece.
    q, k, v = (checkpoint_name(x.swapaxes(1, 2), ATTENDED) for x in (q * q.shape[-1] ** -0.5, k, v))
    logits = _leave_out(product("bnth,bnsh->bnts", q, k), lengths)
    largest = checkpoint_name(logits.max(-1, keepdims=True), ATTENDED)
    weights = jnp.exp(logits - largest)
    total = checkpoint_name(weights.sum(-1, keepdims=True), ATTENDED)
    # Divide after the second product: T × H numbers to scale rather than T × S.
    out = product("bnts,bnsh->bnth", weights.astype(v.dtype), v) / total
    out = checkpoint_name(out.astype(v.dtype), ATTENDED)
    return out.swapaxes(1, 2), (q, k, v, lengths, largest, total, out)


def _attend_backward(kept: tuple[Any, ...], g: Array) -> tuple[Array | None, ...]:
    q, k, v, lengths, largest, total, out = kept
    product = functools.partial(jnp.einsum, preferred_element_type=total.dtype)
    g = g.swapaxes(1, 2)
    along = jnp.sum(g * out, -1, keepdims=True)
    g = g.astype(v.dtype)
    weights = jnp.exp(_leave_out(product("bnth,bnsh->bnts", q, k), lengths) - largest) / total
    by_logits = weights * (product("bnth,bnsh->bnts", g, v) - along)
    by_q = product("bnts,bnsh->bnth", by_logits.astype(k.dtype), k) * q.shape[-1] ** -0.5
    # Sums over the rows of a T × S matrix: with the narrow factor turned first, the wide one is read as it lies.
    by_k = _turned(product("bnht,bnts->bnhs", _turned(q), by_logits.astype(q.dtype)))
    by_v = _turned(product("bnht,bnts->bnhs", _turned(g), weights.astype(v.dtype)))
    grads = (x.swapaxes(1, 2).astype(y.dtype) for x, y in ((by_q, q), (by_k, k), (by_v, v)))
    return (*grads, None)


def _turned(x: Float[Array, "b n i j"]) -> Float[Array, "b n j i"]:
    """Transposed, on a CPU in memory and not in the dimension numbers of a product, which would take the slow kind."""

    def in_memory(x: Array) -> Array:
        return jax.lax.optimization_barrier(jax.lax.optimization_barrier(x).swapaxes(2, 3))

    return jax.lax.platform_dependent(x, cpu=in_memory, default=lambda x: x.swapaxes(2, 3))


_attend.defvjp(_attend_forward, _attend_backward)


def probabilities(
    q: Float[Array, "b t n h"], k: Float[Array, "b s n h"], lengths: Lengths | None = None
) -> Float[Array, "b n t s"]:
    """The attention matrix softmax(Q Kᵀ / √H) itself, in float32 (float64 for float64 inputs)."""
    q, k = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k))
    return jax.nn.softmax(_leave_out(jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5, lengths))


def real(lengths: Lengths, size: int) -> Bool[Array, "b {size}"]:
    """Which of `size` tokens are no padding."""
    return lengths if lengths.dtype == bool else jnp.arange(size)[None] < lengths[:, None]


def _leave_out(logits: Float[Array, "b n t s"], lengths: Lengths | None) -> Float[Array, "b n t s"]:
    if lengths is None:
        return logits
    kept = real(lengths, logits.shape[-1])[:, None, None]
    # The lowest finite number: its weight is zero, and a row of nothing else stays finite.
    return jnp.where(kept, logits, jnp.finfo(logits.dtype).min)


class MultiHeadAttention(nnx.Module):
    """Self-attention: N heads of width H, whatever the model width D (Vaswani et al. 2017, section 3.2.2).

    Parameters: query, key (D, N, H), value (D, N, H'), out (N, H', D), each with a bias; the first three without one
    if `qkv_bias` is False.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        qkv_bias: bool = True,
        backend: str = "xla",
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        value_dim = value_dim or head_dim
        self.backend = backend
        linear = functools.partial(
            nnx.LinearGeneral, kernel_init=kernel_init, dot_general=times_weights, dtype=dtype, rngs=rngs
        )
        self.query = linear(width, (num_heads, head_dim), use_bias=qkv_bias)
        self.key = linear(width, (num_heads, head_dim), use_bias=qkv_bias)
        self.value = linear(width, (num_heads, value_dim), use_bias=qkv_bias)
        self.out = linear((num_heads, value_dim), width, axis=(-2, -1))

    def __call__(
        self, x: Float[Array, "b t d"], lengths: Lengths | None = None
    ) -> tuple[Float[Array, "b t d"], dict[str, Array]]:
        """The projected output, and the arrays on the way for a tap (see `blocks.Block`): q, k, v and out, B T N H.

        `probabilities(q, k)` recomputes the attention matrix, which no fused kernel ever forms. Tokens that `lengths`
        calls padding are no keys; a tap gets no q and k then, since it would take them for keys.
        """
        tokens, masked = x.shape[1], lengths is not None
        q, k, v, out = self.attended(x, lengths)
        # Cut after the output projection, where the sum with the skip reads it.
        arrays = {"v": v, "out": out} | ({} if masked else {"q": q, "k": k})
        return self.out(out)[:, :tokens], {name: array[:, :tokens] for name, array in arrays.items()}

    def attended(self, x: Float[Array, "b t d"], lengths: Lengths | None = None) -> tuple[Array, ...]:
        """q, k, v and out, B T N H; for the fused kernel an even number of tokens, the last one to be cut off."""
        if self.backend == "cudnn":
            x, lengths = even(x, lengths)
        q, k, v = self.query(x), self.key(x), self.value(x)
        return q, k, v, attend(q, k, v, lengths=lengths, backend=self.backend)


class ClassAttention(MultiHeadAttention):
    """Attention of the first token, the class's, to all of them (Touvron et al. 2021b, section 3)."""

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b 1 d"]:
        keys, lengths = even(x, None) if self.backend == "cudnn" else (x, None)
        q, k, v = self.query(x[:, :1]), self.key(keys), self.value(keys)
        return self.out(attend(q, k, v, lengths=lengths, backend=self.backend))
