"""Multi-head attention, heads and head dimension independent of the width: projections, grouped heads, cache.

Axes as in `leanformer.layers.attention`; K heads of keys and values.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.config.attention import InterventionKeys, SoftmaxKeys
from leanformer.config.declare import types_of
from leanformer.config.rules import require
from leanformer.layers.attention import Projection, attend, normal, pad_to_even
from leanformer.layers.interventions import intervene
from leanformer.layers.masks import EVAL_CONTEXT, PARTS, UNMASKED, Context
from leanformer.layers.positions import QueryKeyTransform
from leanformer.runtime.mesh import REPLICATED, over_heads, over_key_heads


DROPOUT_KEY = 3  # index of the random key of attention dropout; a block uses 0 to 2 for its own dropout


OPTIONS = types_of(SoftmaxKeys) | types_of(InterventionKeys)


class MultiHeadAttention(nnx.Module):
    """Self-attention: N heads of dimension H, independent of the embedding dimension D (Vaswani et al. 2017, 3.2.2).

    Called with tokens B T D and a `Context`, it returns the output B T D, {name: array for a tap} and the extended
    cache.

    Parameters: query (D, N, H), key (D, K, H), value (D, K, H'), out (N, H', D), each with a bias; the first three
    without one if `qkv_bias` is False, the last if `out_bias` is; norms of queries and keys (`process`); a temperature
    (N) if configured; and what interventions add (see `interventions.Linear`).

    Args:
        width: D, embedding dimension.
        num_heads: N, number of query heads.
        head_dim: H, dimension of a query and of a key of a head.
        value_dim: H', dimension of a value of a head; `head_dim` if None.
        num_kv_heads: K, key and value heads, each shared by N / K query heads (Ainslie et al. 2023); N if None.
        logit_scale: factor of q·k; 1/√H if None.
        temperature: True for a learned factor of the logits of each head, initially 1.
        soft_cap: soft cap of the logits, see `attention.attend`; not with cuDNN.
        attention_dropout: dropout rate of the attention weights in training; None for none; not with cuDNN.
        qk_norm: norm of queries and keys, of `norms.NORMS`; None for none.
        rotary, rotary_width: base of rotary positions, None for none; number of rotated channels, all if None.
        qkv_bias, out_bias: True for biases of the query, key and value projections, and of the output projection.
        backend: resolved attention backend, "xla", "cudnn" or "naive", see `attention.attend`.
        kernel_init: initialiser of the matrices.
        interventions: spectral, qkv_init, levers_on, sigma_reparam, see `InterventionKeys`.

    Attributes:
        options: {key of config.model: type} of the options; `masks`: names of the supported parts of a `masks.Mask`.
        projection: constructor of the linear layers to and from heads.
        query, key, value: projections from tokens to heads and channels, set by `make_projections`.

    Raises:
        ConfigError: K does not divide N, the soft cap is not positive, the norm is unknown, or channels do not fit.

    >>> attention = MultiHeadAttention(12, num_heads=5, head_dim=3, rngs=nnx.Rngs(0))
    >>> output, arrays, _ = attention(jnp.ones((2, 7, 12)))
    >>> output.shape, arrays["q"].shape
    ((2, 7, 12), (2, 7, 5, 3))
    """

    options: Mapping[str, Any] = MappingProxyType({name: OPTIONS[name] for name in OPTIONS if name != "modules"})
    masks: Collection[str] = PARTS
    projection: Any = Projection
    query: Any
    key: Any
    value: Any

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        logit_scale: float | None = None,
        temperature: bool = False,
        soft_cap: float | None = None,
        attention_dropout: float | None = None,
        qk_norm: str | None = None,
        rotary: float | None = None,
        rotary_width: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        backend: str = "xla",
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **interventions: Any,
    ):
        value_dim, kv = value_dim or head_dim, num_heads if num_kv_heads is None else num_kv_heads
        require(
            num_heads % kv == 0, f"model.num_kv_heads: {num_heads} query heads cannot share {kv} key heads equally."
        )
        require(soft_cap is None or soft_cap > 0, f"model.soft_cap={soft_cap} must be positive, or unset.")
        self.attention_dropout = attention_dropout or 0.0
        self.backend, self.logit_scale, self.soft_cap = backend, logit_scale, soft_cap
        settings = (qk_norm, rotary, rotary_width)
        processed = any(value is not None for value in settings)
        self.process = QueryKeyTransform(head_dim, *settings, dtype=dtype, rngs=rngs) if processed else None
        linear = functools.partial(self.projection, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
        shapes = {"query": (num_heads, head_dim), "key": (kv, head_dim), "value": (kv, value_dim)}
        self.interventions = InterventionKeys(**interventions)
        self.make_projections(linear, width, shapes, qkv_bias)
        out = functools.partial(intervene(self.interventions, "out", linear), axis=(-2, -1), use_bias=out_bias)
        self.out: Any = out((num_heads, value_dim), width, kernel_metadata=over_heads(-3))
        if temperature:
            self.temperature = nnx.Param(jnp.ones(num_heads))

    @staticmethod
    def query_width(head_dim: int, options: Mapping[str, Any]) -> int:
        """Return the dimension of a query and key of a head, which a subclass may make larger than `head_dim`."""
        return head_dim

    def make_projections(
        self, linear: functools.partial[nnx.Module], width: int, shapes: Mapping[str, tuple[int, int]], bias: bool
    ) -> None:
        """Set `query`, `key` and `value`: projections from D to `shapes`, (heads, channels) by name."""
        for name, shape in shapes.items():
            axes = over_heads(-2) if name == "query" else over_key_heads(-2)
            metadata = {"kernel_metadata": axes, "bias_metadata": axes}
            setattr(self, name, intervene(self.interventions, name, linear)(width, shape, use_bias=bias, **metadata))

    def projections(
        self, x: Float[Array, "b t d"], positions: Int[Array, "#b t"]
    ) -> tuple[Float[Array, "b t n h"], dict[str, Array]]:
        """Return the queries (B T N H), and the arrays that a cache stores and `keys_values` reads."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.process is not None:
            q, k = self.process(q, k, positions)
        return q, {"k": k, "v": v}

    def keys_values(self, cached: Mapping[str, Array]) -> tuple[Float[Array, "b s k h"], Float[Array, "b s k hv"]]:
        """Return keys (B S K H) and values (B S K H') from the arrays of `projections`, or from a cache of S tokens."""
        return cached["k"], cached["v"]

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], Any]:
        """Return the projected output, the arrays for a tap (see `blocks.Block`), and the cache with these tokens."""
        tokens = x.shape[1]
        arrays, cache = self.attended(x, context)
        # Sliced after the output projection, so that the slice fuses with the residual sum.
        projected = self.out(arrays["out"])[:, :tokens]
        return projected, {name: array[:, :tokens] for name, array in arrays.items()} | self.capped(), cache

    def capped(self) -> dict[str, Array]:
        """Return {"soft_cap": float32 number} for a tap; {} if there is no soft cap."""
        return {} if self.soft_cap is None else {"soft_cap": jnp.float32(self.soft_cap)}

    def attended(self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT) -> tuple[dict[str, Array], Any]:
        """Return q (B T N H), k, v and out (B T N H', before the projection) by name, and the extended cache, if any.

        k and v have S tokens: T, or the length of the cache. The fused kernel pads an odd number of tokens to an even
        one, so arrays may have T + 1 tokens. With a `logit_scale`, the returned q is scaled so that attention is
        softmax(Q Kᵀ / √H).
        """
        mask, lengths = context.mask, context.lengths.get(x.shape[:2])
        # cuDNN takes queries from the first token on, and a token of padding would be written to the cache.
        backend = "xla" if context.cache is not None and self.backend == "cudnn" else self.backend
        if backend == "cudnn":
            x, mask = pad_to_even(x, mask, lengths)
        q, cached = self.projections(x, _positions(context, x.shape[1]))
        if hasattr(self, "temperature"):
            q = q * self.temperature[...].astype(q.dtype)[None, None, :, None]
        cache = None
        if context.cache is not None:
            write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=mask.offset, axis=1)
            cache = cached = {name: write(old, cached[name].astype(old.dtype)) for name, old in context.cache.items()}
        k, v = self.keys_values(cached)
        options: dict[str, Any] = {"scale": self.logit_scale, "soft_cap": self.soft_cap, "lengths": lengths}
        if context.key is not None and self.attention_dropout:
            fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
            options |= {"dropout": self.attention_dropout, "key": fold(context.key, DROPOUT_KEY)}
        out = attend(q, k, v, mask=mask, backend=backend, **options)
        shown = q if self.logit_scale is None else q * (self.logit_scale * math.sqrt(q.shape[-1]))
        return {"q": shown, "k": k, "v": v, "out": out}, cache

    def empty_cache(self, batch: int, size: int) -> dict[str, Array]:
        """Return a cache of zeros for `batch` rows of `size` tokens: {"k": B S K H, "v": B S K H'}."""
        of_token = {"k": self.key, "v": self.value}
        return {name: jnp.zeros((batch, size, *x.out_features), x.dtype) for name, x in of_token.items()}


def _positions(context: Context, tokens: int) -> Int[Array, "#b {tokens}"]:
    if context.positions is None:
        first = 0 if context.mask.offset is None else context.mask.offset
        return (first + jnp.arange(tokens))[None]
    positions = jnp.atleast_2d(context.positions)
    return jnp.pad(positions, ((0, 0), (0, tokens - positions.shape[1])))  # the padding token is hidden


class ClassAttention(MultiHeadAttention):
    """Attention of the class token, the first one, to all tokens (Touvron et al. 2021b, section 3): B T D to B 1 D.

    Of the options of `MultiHeadAttention`, only interventions and `out_bias` have an effect.
    """

    def __call__(  # ty: ignore[incompatible-method-override] - no cache or tap
        self, x: Float[Array, "b t d"]
    ) -> Float[Array, "b 1 d"]:
        keys, mask = pad_to_even(x, UNMASKED) if self.backend == "cudnn" else (x, UNMASKED)
        q, k, v = self.query(x[:, :1]), self.key(keys), self.value(keys)
        return self.out(attend(q, k, v, mask=mask, backend=self.backend))


class AveragedAttention(MultiHeadAttention):
    """Mean of the outputs of `modules` independent modules of multi-head attention, as one module of all their heads.

    `num_heads` and `num_kv_heads` are per module. Parameters: as in `MultiHeadAttention` with all heads; with several
    modules, output biases are `bias` (modules, D).
    """

    options = MappingProxyType(OPTIONS)

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
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], Any]:
        projected, arrays, cache = super().__call__(x, context)
        if self.modules > 1:
            projected = projected / self.modules
        if hasattr(self, "bias"):
            projected = projected + self.bias[...].mean(axis=0).astype(projected.dtype)[None, None]
        return projected, arrays, cache


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings of the attention in a block."""

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    kind: Callable[..., MultiHeadAttention] = MultiHeadAttention
    qkv_bias: bool = True
    backend: str = "xla"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keyword arguments that only this kind takes

    def make(self, width: int, **common: Any) -> MultiHeadAttention:
        """Return a new attention module for tokens of dimension D; `common` are kernel_init, dtype and rngs."""
        sizes = (width, self.num_heads, self.head_dim, self.value_dim)
        return self.kind(*sizes, qkv_bias=self.qkv_bias, backend=self.backend, **common, **self.options)
