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

from leanformer.config.declare import Size, dataclass, types_of
from leanformer.errors import ConfigError
from leanformer.layers.attention import attend, normal, pad_to_even, times_weights
from leanformer.layers.interventions import Interventions
from leanformer.layers.interventions import Keys as InterventionKeys
from leanformer.layers.masks import EVAL_CONTEXT, PARTS, UNMASKED, Context, Mask
from leanformer.layers.positions import QueryKeyTransform
from leanformer.runtime.mesh import REPLICATED, over_heads, over_key_heads


DROPOUT_KEY = 3  # index of the random key of attention dropout; a block uses 0 to 2 for its own dropout


@dataclass(frozen=True)
class Keys:
    """Options of attention="softmax"; no effect if unset."""

    # number of key and value heads, each shared by several query heads, or one per layer; model.num_heads if unset
    num_kv_heads: Size | None = None
    logit_scale: float | None = None  # factor of the attention logits q·k; 1/√head_dim if unset
    temperature: bool | None = None  # True: each head has a learned factor of its attention logits
    soft_cap: float | None = None  # soft cap c of the attention logits: logit becomes c·tanh(logit / c)
    # dropout rate of attention weights in training; not supported by cuDNN's kernel
    attention_dropout: float | None = None
    qk_norm: str | None = None  # norm of each head's queries and keys: "rmsnorm", "layernorm", "unit"; none if unset
    rotary: float | None = None  # base of rotary positions, for example 10000.0; no rotary positions if unset
    rotary_width: int | None = None  # channels of each head that rotary positions rotate; all if unset
    out_bias: bool | None = None  # False: the attention output projection has no bias
    # number of attention modules per layer, each with separate heads, whose outputs are averaged; 1 if unset
    modules: int | None = None


OPTIONS = types_of(Keys) | types_of(InterventionKeys)


class MultiHeadAttention(nnx.Module):
    """Self-attention: N heads of dimension H, independent of the embedding dimension D (Vaswani et al. 2017, 3.2.2).

    Parameters: query (D, N, H), key (D, K, H), value (D, K, H'), out (N, H', D), each with a bias; the first three
    without one if `qkv_bias` is False, the last if `out_bias` is; norms of queries and keys (`process`); a temperature
    (N) if configured; and those of interventions (see `interventions.Linear`).

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
        qk_norm, rotary, rotary_width: norm and rotary positions of queries and keys, see `positions.QueryKeyTransform`.
        spectral, qkv_init, levers_on, sigma_reparam: see `interventions.Interventions`.
        qkv_bias, out_bias: True for biases of the query, key and value projections, and of the output projection.
        backend: resolved attention backend, "xla", "cudnn" or "naive", see `attention.attend`.
        kernel_init: initialiser of the matrices.

    Attributes:
        masks: names of the supported parts of a `masks.Mask`.
        query, key, value: projections from tokens to heads and channels, set by `make_projections`.

    Raises:
        ConfigError: K does not divide N, the soft cap is not positive, dropout is outside [0, 1), or
            `positions.QueryKeyTransform` raises it.

    >>> attention = MultiHeadAttention(12, num_heads=5, head_dim=3, rngs=nnx.Rngs(0))
    >>> output, arrays, _ = attention(jnp.ones((2, 7, 12)))
    >>> output.shape, arrays["q"].shape
    ((2, 7, 12), (2, 7, 5, 3))
    """

    options: Mapping[str, Any] = MappingProxyType({name: OPTIONS[name] for name in OPTIONS if name != "modules"})
    masks: Collection[str] = PARTS
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
        spectral: float | None = None,
        qkv_init: str | None = None,
        levers_on: str | None = None,
        sigma_reparam: bool | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        backend: str = "xla",
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        value_dim, kv = value_dim or head_dim, num_heads if num_kv_heads is None else num_kv_heads
        check_shared(num_heads, kv)
        if soft_cap is not None and soft_cap <= 0:
            raise ConfigError(f"model.soft_cap={soft_cap} must be positive. Set a positive number, or leave it unset.")
        if attention_dropout is not None and not 0 <= attention_dropout < 1:
            raise ConfigError(f"model.attention_dropout={attention_dropout} must be in [0, 1).")
        self.attention_dropout = attention_dropout or 0.0
        self.backend, self.logit_scale, self.soft_cap = backend, logit_scale, soft_cap
        settings: dict[str, Any] = {"qk_norm": qk_norm, "rotary": rotary, "rotary_width": rotary_width}
        processed = any(value is not None for value in settings.values())
        self.process = QueryKeyTransform(head_dim, **settings, dtype=dtype, rngs=rngs) if processed else None
        linear = functools.partial(
            nnx.LinearGeneral, kernel_init=kernel_init, dot_general=times_weights, dtype=dtype, rngs=rngs
        )
        shapes = {"query": (num_heads, head_dim), "key": (kv, head_dim), "value": (kv, value_dim)}
        self.levers = Interventions(spectral, qkv_init, levers_on, sigma_reparam)
        self.make_projections(linear, width, shapes, qkv_bias)
        out = functools.partial(self.levers.of("out", linear), axis=(-2, -1), use_bias=out_bias)
        self.out: Any = out((num_heads, value_dim), width, kernel_metadata=over_heads(-3))
        if temperature:
            self.temperature = nnx.Param(jnp.ones(num_heads))

    @staticmethod
    def query_width(head_dim: int, options: Mapping[str, Any]) -> int:
        """Return the dimension of a query and key of a head, which a subclass may make larger than `head_dim`.

        Args:
            head_dim: configured head dimension.
            options: section config.model with the options of the attention.
        """
        return head_dim

    def make_projections(
        self, linear: functools.partial[nnx.Module], width: int, shapes: Mapping[str, tuple[int, int]], bias: bool
    ) -> None:
        """Set the attributes `query`, `key` and `value`: projections from tokens, D to (heads, channels).

        Args:
            linear: constructor of a projection, without sizes.
            width: D.
            shapes: (heads, channels) by name: {"query": (N, H), "key": (K, H), "value": (K, H')}.
            bias: True for projections with biases.
        """
        for name, shape in shapes.items():
            axes = over_heads(-2) if name == "query" else over_key_heads(-2)
            metadata = {"kernel_metadata": axes, "bias_metadata": axes}
            setattr(self, name, self.levers.of(name, linear)(width, shape, use_bias=bias, **metadata))

    def projections(
        self, x: Float[Array, "b t d"], positions: Int[Array, "#b t"]
    ) -> tuple[Float[Array, "b t n h"], dict[str, Array]]:
        """Return the queries (B T N H), and the arrays that a cache stores and `keys_values` reads.

        These arrays are {"k": keys B T K H, "v": values B T K H'}. Queries and keys are normed and rotated, if
        configured.

        Args:
            x: tokens, B T D.
            positions: position of each token, B T or 1 T, for rotary positions.
        """
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
        """Return the projected output, the intermediate arrays for a tap, and the cache with these tokens.

        Arrays (see `blocks.Block`): q, k, v and out, and the soft cap if there is one.
        `probabilities(q, k, context.mask, soft_cap=soft_cap)` recomputes the attention matrix, which fused kernels do
        not materialise.
        """
        tokens = x.shape[1]
        arrays, cache = self.attended(x, context)
        # Sliced after the output projection, so that the slice fuses with the residual sum.
        projected = self.out(arrays["out"])[:, :tokens]
        return projected, {name: array[:, :tokens] for name, array in arrays.items()} | self.capped(), cache

    def capped(self) -> dict[str, Array]:
        """Return {"soft_cap": float32 number} for a tap; {} if there is no soft cap."""
        return {} if self.soft_cap is None else {"soft_cap": jnp.float32(self.soft_cap)}

    def attended(self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT) -> tuple[dict[str, Array], Any]:
        """Return the arrays of the attention by name, and the extended cache, None if the context has none.

        The arrays are q (B T N H), k (B S K H), v (B S K H') and out (B T N H', before the output projection). S is T,
        or the length of the cache.

        The fused kernel pads an odd number of tokens to an even one, so arrays may have T + 1 tokens. With a
        `logit_scale`, the returned q is scaled so that attention is softmax(Q Kᵀ / √H).
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
            cache = cached = extend_cache(context.cache, cached, mask)
        k, v = self.keys_values(cached)
        options: dict[str, Any] = {
            "scale": self.logit_scale,
            "soft_cap": self.soft_cap,
            "backend": backend,
            "lengths": lengths,
        }
        if context.key is not None and self.attention_dropout:
            fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
            options |= {"dropout": self.attention_dropout, "key": fold(context.key, DROPOUT_KEY)}
        out = attend(q, k, v, mask=mask, **options)
        shown = q if self.logit_scale is None else q * (self.logit_scale * math.sqrt(q.shape[-1]))
        return {"q": shown, "k": k, "v": v, "out": out}, cache

    def empty_cache(self, batch: int, size: int) -> dict[str, Array]:
        """Return an empty cache for `batch` rows of `size` tokens: {"k": B S K H, "v": B S K H'}."""
        return {name: new_cache(batch, size, p) for name, p in (("k", self.key), ("v", self.value))}


def new_cache(batch: int, size: int, projection: Any) -> Float[Array, "b s k h"]:
    """Return a cache of zeros for the outputs of a projection, B S K H in the dtype of the projection.

    Args:
        batch: B, number of rows.
        size: S, number of tokens.
        projection: `nnx.LinearGeneral` from tokens to (heads, channels), that is (K, H).
    """
    return jnp.zeros((batch, size, *projection.out_features), projection.dtype)


def extend_cache(cache: dict[str, Array], new: dict[str, Array], mask: Mask) -> dict[str, Array]:
    """Return the cache with new tokens, written from the mask's offset on. The caller ensures that they fit.

    Args:
        cache: arrays by name, with axes B S ...
        new: arrays of the new tokens by the same names, B T ...
        mask: causal mask whose offset is the number of tokens in the cache.

    Raises:
        ValueError: the mask is not causal or has no offset, so that empty positions would be visible.
    """
    if not mask.causal or mask.offset is None:
        raise ValueError("A cache requires a causal mask with an offset, which hides its empty positions.")
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=mask.offset, axis=1)
    return {name: write(old, new[name].astype(old.dtype)) for name, old in cache.items()}


def check_shared(num_heads: int, num_kv_heads: int) -> None:
    """Raise ConfigError if the number of key and value heads does not divide the number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={num_kv_heads}: not a divisor of {num_heads} query heads. "
            f"Choose one of {', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}."
        )


def _positions(context: Context, tokens: int) -> Int[Array, "#b {tokens}"]:
    if context.positions is None:
        first = 0 if context.mask.offset is None else context.mask.offset
        return (first + jnp.arange(tokens))[None]
    positions = jnp.atleast_2d(context.positions)
    return jnp.pad(positions, ((0, 0), (0, tokens - positions.shape[1])))  # the padding token is hidden


class ClassAttention(MultiHeadAttention):
    """Attention of the class token, which is the first, to all tokens (Touvron et al. 2021b, section 3).

    Called with tokens B T D, it returns the projected output of the class token, B 1 D, and no arrays or cache.
    Arguments and parameters are those of `MultiHeadAttention`, of which norms and rotary positions of queries and keys,
    the logit scale, the temperature, the soft cap and attention dropout have no effect.
    """

    def __call__(  # ty: ignore[incompatible-method-override] - no cache or tap
        self, x: Float[Array, "b t d"]
    ) -> Float[Array, "b 1 d"]:
        keys, mask = pad_to_even(x, UNMASKED) if self.backend == "cudnn" else (x, UNMASKED)
        q, k, v = self.query(x[:, :1]), self.key(keys), self.value(keys)
        return self.out(attend(q, k, v, mask=mask, backend=self.backend))


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
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], Any]:
        """Return output, arrays and cache as in `MultiHeadAttention`."""
        projected, arrays, cache = super().__call__(x, context)
        if self.modules > 1:
            projected = projected / self.modules
        if hasattr(self, "bias"):
            projected = projected + self.bias[...].mean(axis=0).astype(projected.dtype)[None, None]
        return projected, arrays, cache


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings of the attention in a block.

    Attributes:
        num_heads: N, number of query heads.
        head_dim: H, dimension of a query and of a key of a head.
        value_dim: H', dimension of a value of a head; `head_dim` if None.
        kind: class of the attention, one of `Family.attentions` of an architecture.
        qkv_bias: True for biases in the query, key and value projections.
        backend: resolved attention backend, "xla", "cudnn" or "naive".
        options: keyword arguments that only this `kind` takes, such as `landmarks` of Nyström attention.
    """

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    kind: Callable[..., MultiHeadAttention] = MultiHeadAttention
    qkv_bias: bool = True
    backend: str = "xla"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, width: int, **common: Any) -> MultiHeadAttention:
        """Return a new attention module for tokens of dimension `width`.

        Args:
            width: D, embedding dimension.
            common: further arguments of the module: kernel_init, dtype and rngs.
        """
        sizes = (width, self.num_heads, self.head_dim, self.value_dim)
        return self.kind(*sizes, qkv_bias=self.qkv_bias, backend=self.backend, **common, **self.options)
