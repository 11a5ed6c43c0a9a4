"""Attention masks, shared by attention, its gradient, its kernels and measures; and the context of a call."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from leanformer.errors import ConfigError


STATIC = {"static": True}
Lengths = tuple[Array, Array]  # int B: numbers of keys and of queries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Visible keys of each query: those allowed by all parts; all keys if no part is set.

    Attributes:
        lengths: int B, number of keys before the padding of each example; None for no such padding.
        keep: bool B S, True for valid keys, for padding between tokens; None if all are valid.
        segments: int B S, segments of packed rows; a query sees only its own segment. None for unpacked rows.
        offset: int, position of the first query among the keys, if earlier keys come from a cache; None for 0.
        causal: True to hide the keys after the query.

    >>> Mask(causal=True, lengths=jnp.array([2])).parts
    ('lengths', 'causal')
    >>> Mask(causal=True).attention_mask(queries=2, keys=2).astype(int).tolist()
    [[[[1, 0], [1, 1]]]]
    """

    lengths: Any = None
    keep: Any = None
    segments: Any = None
    offset: Any = None
    causal: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are set."""
        return tuple(name for name in PARTS if getattr(self, name) is not None and getattr(self, name) is not False)

    def valid_tokens(self, keys: int) -> Bool[Array, "b {keys}"] | None:
        """Return the mask of valid keys, bool B S: False for padding; None if all are valid."""
        if self.lengths is None:
            return self.keep
        real = jnp.arange(keys)[None] < self.lengths[:, None]
        return real if self.keep is None else real & self.keep

    def attention_mask(self, queries: int, keys: int) -> Bool[Array, "#b 1 #{queries} {keys}"] | None:
        """Return the mask of visible keys, bool (B or 1, 1, T or 1, S); None if all are visible."""
        masks = []
        if (real := self.valid_tokens(keys)) is not None:
            masks.append(real[:, None, None])
        first = 0 if self.offset is None else self.offset
        if self.segments is not None:
            segment = jax.lax.dynamic_slice_in_dim(self.segments, first, queries, axis=1)
            masks.append((segment[:, :, None] == self.segments[:, None])[:, None])
        if self.causal:
            back = (jnp.arange(queries)[:, None] + first - jnp.arange(keys)[None])[None, None]
            masks.append(back >= 0)
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def hide_last(self, batch: int, keys: int, lengths: Lengths | None = None) -> "Mask":
        """Return the mask with one more, hidden key, for masks without `keep` and `segments`; see `full_lengths`."""
        if self.lengths is not None:
            return self
        return dataclasses.replace(self, lengths=jnp.full(batch, keys, jnp.int32) if lengths is None else lengths[0])

    def mask_logits(self, logits: Float[Array, "b n t s"], queries: int) -> Float[Array, "b n t s"]:
        """Return the logits with the lowest finite number at hidden keys, so that softmax gives them weight 0.

        If all keys of a query are hidden, its weights are uniform instead of NaN. The third axis may also be several
        times T, for the queries of several heads one after the other.
        """
        visible = self.attention_mask(queries, logits.shape[3])
        if visible is None:
            return logits
        if visible.shape[2] > 1 and logits.shape[2] > queries:
            visible = jnp.tile(visible, (1, 1, logits.shape[2] // queries, 1))
        return jnp.where(visible, logits, jnp.finfo(logits.dtype).min)


def mean_pool(x: Float[Array, "b t d"], lengths: Int[Array, "b"] | None) -> Float[Array, "b d"]:
    """Return the mean over the valid tokens of each row, the first `lengths` ones; over all if None."""
    if lengths is None:
        return x.mean(axis=1)
    valid = (jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None]
    return jnp.where(valid, x, 0).sum(axis=1) / lengths[:, None].astype(x.dtype)


UNMASKED = Mask()  # all keys are visible
PARTS = tuple(field.name for field in dataclasses.fields(Mask))
PADDING = ("lengths", "keep")  # parts that mark padding tokens, as queries and as keys


def check_supported(name: str, supported: Collection[str], parts: Collection[str]) -> None:
    """Raise ConfigError if an attention, such as one without a T × S matrix, does not support parts of a mask."""
    if wrong := [part for part in parts if part not in supported]:
        raise ConfigError(f'{name} does not support masks with {", ".join(wrong)}. Choose model.attention="softmax".')


def logits(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    mask: Mask = UNMASKED,
    scale: float | None = None,
    soft_cap: Any = None,
) -> Float[Array, "b n t s"]:
    """Return the attention logits Q Kᵀ × scale, B N T S, in the dtype of q and k; arguments as in `attention.attend`.

    Float32 products are exact to float32 on GPUs too, which would otherwise use TF32.
    """
    if q.shape[2] != k.shape[2]:
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    products = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    products *= q.shape[-1] ** -0.5 if scale is None else scale
    return mask.mask_logits(apply_soft_cap(products, soft_cap), q.shape[1])


def apply_soft_cap(logits: Float[Array, "*shape"], soft_cap: Any) -> Float[Array, "*shape"]:
    """Return soft_cap × tanh(logits / soft_cap); the logits themselves if `soft_cap` is None."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


# Maps a block's named arrays to a small pytree, inside the block (see `blocks.Block`).
Tap = Callable[[dict[str, Any]], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Context of a call of a stack, from which the stack derives the context of each block."""

    # Random keys, one per example (B). In a stack they switch training on; in a block they draw dropout.
    key: Any = None
    mask: Mask = UNMASKED  # keys visible to each query
    positions: Any = None  # of the tokens, int T or B T; consecutive from the mask's offset if None
    cache: Any = None  # keys and values of earlier tokens, from `Stack.empty_cache`; a block gets only its own layer's
    tap: Tap | None = dataclasses.field(default=None, metadata=STATIC)
    # Set by the stack for its blocks: result of `attention.full_lengths`; stochastic-depth factors of the residual
    # branches, (branches, B); True to use and update batch statistics.
    lengths: Mapping[tuple[int, int], Lengths] = dataclasses.field(default_factory=dict)
    scales: Any = None
    train: bool = dataclasses.field(default=False, metadata=STATIC)


EVAL_CONTEXT = Context()  # evaluation, all keys visible, no tap
