"""Which keys a query sees: said here alone, for attention, its gradient, its kernels and the probe's measures."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from leanformer.errors import ConfigError


STATIC = {"static": True}
Lengths = tuple[Array, Array]  # int B: of keys, and of queries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys each query sees: those that every part allows, and all of them without any part.

    Raises:
        ConfigError: a window of no key.
    """

    lengths: Any = None  # int B: the keys of each example from here on are padding
    keep: Any = None  # bool B S: which keys are no padding, where some lies between others
    segments: Any = None  # int B S: of sequences packed into one; a token sees its own segment alone
    offset: Any = None  # int: which key is the first query's own token, where those before it come from a cache
    causal: bool = dataclasses.field(default=False, metadata=STATIC)  # nothing after a query's own token is seen
    window: int | None = dataclasses.field(default=None, metadata=STATIC)  # keys back from the own one, which counts;
    # unless causal, as many ahead

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ConfigError(f"A window of {self.window} keys leaves a query nothing to see. Take at least 1.")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that are given."""
        return tuple(name for name in PARTS if getattr(self, name) is not None and getattr(self, name) is not False)

    def real(self, keys: int) -> Bool[Array, "b {keys}"] | None:
        """Which keys are no padding; None if all."""
        if self.lengths is None:
            return self.keep
        real = jnp.arange(keys)[None] < self.lengths[:, None]
        return real if self.keep is None else real & self.keep

    def kept(self, queries: int, keys: int) -> Bool[Array, "#b 1 #{queries} {keys}"] | None:
        """Which keys are seen by which query, every head alike; None if all."""
        found = []
        if (real := self.real(keys)) is not None:
            found.append(real[:, None, None])
        first = 0 if self.offset is None else self.offset
        if self.segments is not None:
            own = jax.lax.dynamic_slice_in_dim(self.segments, first, queries, axis=1)
            found.append((own[:, :, None] == self.segments[:, None])[:, None])
        if self.causal or self.window is not None:
            back = (jnp.arange(queries)[:, None] + first - jnp.arange(keys)[None])[None, None]
            if self.causal:
                found.append(back >= 0)
            if self.window is not None:
                found.append((back if self.causal else jnp.abs(back)) < self.window)
        return functools.reduce(jnp.logical_and, found) if found else None

    def hide_last(self, batch: int, keys: int, lengths: Lengths | None = None) -> "Mask":
        """With one key more than `keys`, which nobody sees. Of masks without `keep` and `segments`.

        `lengths` are `attention.full_lengths` of just so many, if there are some.
        """
        if self.lengths is not None:
            return self
        return dataclasses.replace(self, lengths=jnp.full(batch, keys, jnp.int32) if lengths is None else lengths[0])

    def leave_out(self, logits: Float[Array, "b n t s"], queries: int) -> Float[Array, "b n t s"]:
        """The logits, the lowest finite number where a key is not seen.

        Its weight is zero, and a row of nothing else stays finite. Where `t` is a multiple of `queries`, it is so many
        heads one after another.
        """
        kept = self.kept(queries, logits.shape[3])
        if kept is None:
            return logits
        if kept.shape[2] > 1 and logits.shape[2] > queries:
            kept = jnp.tile(kept, (1, 1, logits.shape[2] // queries, 1))
        return jnp.where(kept, logits, jnp.finfo(logits.dtype).min)


ALL = Mask()  # every key is seen
PARTS = tuple(field.name for field in dataclasses.fields(Mask))
PADDING = ("lengths", "keep")  # the parts that say which tokens are no tokens, as queries no more than as keys


def check_heeded(asker: str, heeded: Collection[str], parts: Collection[str]) -> None:
    """Raises ConfigError on parts of a mask that an attention would pass over, such as one without a T × S matrix."""
    if wrong := [part for part in parts if part not in heeded]:
        raise ConfigError(
            f"{asker} mixes tokens without asking which query sees which key: it takes no mask with "
            f"{', '.join(wrong)}, and what may be hidden from it is {', '.join(heeded) or 'nothing'}. "
            'Choose model.attention="softmax".'
        )


def logits(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    mask: Mask = ALL,
    scale: float | None = None,
    soft_cap: Any = None,
) -> Float[Array, "b n t s"]:
    """Q Kᵀ × scale of each query head, 1/√H by default, in the dtype of q and k; the lowest number where unseen.

    With a soft cap c they are c tanh(logit / c), and never beyond ±c.
    """
    if q.shape[2] != k.shape[2]:
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    products = jnp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return mask.leave_out(capped(products, soft_cap), q.shape[1])


def capped(logits: Float[Array, "*shape"], soft_cap: Any) -> Float[Array, "*shape"]:
    """soft_cap × tanh(logits / soft_cap); None leaves them as they are."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
