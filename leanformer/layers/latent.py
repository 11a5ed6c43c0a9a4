"""Multi-head latent attention: keys and values are computed from a small latent per token, which the cache holds.

Axes as in `leanformer.layers.attention`; R channels of the latent.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.config.declare import dataclass, types_of
from leanformer.errors import ConfigError
from leanformer.layers import norms
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.positions import check_rotary, rotate
from leanformer.runtime.mesh import REPLICATED, over_heads


SHARED_OPTIONS = ("rotary", "rotary_width", "logit_scale", "temperature", "soft_cap", "out_bias", "attention_dropout")


@dataclass(frozen=True)
class Keys:
    """Options of attention="latent" besides SHARED_OPTIONS of attention="softmax"."""

    kv_rank: int | None = None  # channels of the latent that keys and values are computed from
    query_rank: int | None = None  # channels of the latent that queries are computed from; no query latent if unset
    latent_norm: str | None = None  # norm of the key-value and query latents; none if unset


class LatentAttention(MultiHeadAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1, equations 9 to 19).

    Keys and values of all heads are linear in a latent of R channels, so the keys of all heads together have at most
    rank R, for any N · H. Rotary positions use `rotary_width` additional channels of each query, and of one key shared
    by all heads, since a rotated latent could not be cached. Logits are multiplied by 1/√(H + rotary_width).

    Parameters: `latent` (D, R), `key_up` (R, N, H), `value_up` (R, N, H'); `query` (D, N, H + rotary_width), or with a
    `query_rank` R' `query_latent` (D, R') and `query_up` (R', N, H + rotary_width); with rotary positions `turned`
    (D, rotary_width); `out` as in `MultiHeadAttention`; biases likewise; and a norm of each latent if configured.

    Args:
        width, num_heads, head_dim, value_dim: D, N, H and H' as of `MultiHeadAttention`.
        kv_rank: R, at most D.
        query_rank: R', at most D; None for queries straight from the tokens.
        latent_norm: norm of the latents, of `norms.NORMS`; "rmsnorm" in the original, None for none.
        rotary, rotary_width: base of the angles, and number of rotated channels; None for no rotary positions.
        arguments: further arguments of `MultiHeadAttention`; of its options only those in `options`.

    Raises:
        ConfigError: a rank is missing or above D, the norm is unknown, an option is not supported, or the rotary
            settings are invalid.
    """

    options = MappingProxyType(types_of(Keys) | {name: MultiHeadAttention.options[name] for name in SHARED_OPTIONS})

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        kv_rank: int | None = None,
        query_rank: int | None = None,
        latent_norm: str | None = None,
        rotary: float | None = None,
        rotary_width: int | None = None,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **arguments: Any,
    ):
        for name in sorted(MultiHeadAttention.options.keys() - self.options.keys()):
            if arguments.get(name) and (name, arguments[name]) != ("num_kv_heads", num_heads):
                raise ConfigError(
                    f"model.{name}={arguments[name]}: latent attention has no such option. Leave it unset."
                )
        _check_rank("kv_rank", kv_rank, width)
        if query_rank is not None:
            _check_rank("query_rank", query_rank, width)
        if rotary is not None and rotary_width is None:
            raise ConfigError(
                f"model.rotary={rotary}: latent attention rotates separate channels. "
                f"Set model.rotary_width, for example {head_dim // 2}."
            )
        check_rotary(rotary_width or head_dim, rotary, rotary_width)
        self.base: Any = rotary  # a number if there are rotary positions
        self.ranks = (kv_rank, query_rank, rotary_width or 0)
        self.latent_norm, self.query_norm = (
            None
            if latent_norm is None or rank is None
            else norms.make(latent_norm, rank, epsilon=1e-6, dtype=dtype, rngs=rngs)
            for rank in (kv_rank, query_rank)
        )
        super().__init__(width, num_heads, head_dim, value_dim, dtype=dtype, rngs=rngs, **arguments)

    @staticmethod
    def query_width(head_dim: int, options: Mapping[str, Any]) -> int:
        """Return the dimension of a query and key of a head: `head_dim` + `rotary_width`, if the options have one."""
        return head_dim + (options.get("rotary_width") or 0)

    def make_projections(
        self, linear: Callable[..., nnx.Module], width: int, shapes: Mapping[str, tuple[int, int]], bias: bool
    ) -> None:
        """Set the projections from tokens to latents and from latents to heads, attributes named like the parameters.

        Args:
            linear: constructor of a projection, without sizes.
            width: D.
            shapes: {"query": (N, H), "key": (K, H), "value": (K, H')}; K is ignored, since keys and values have N
                heads.
            bias: True for projections with biases.
        """
        rank, query_rank, turned = self.ranks
        (heads, head_dim), (_, value_dim) = shapes["query"], shapes["value"]
        narrow = functools.partial(linear, width, use_bias=bias, kernel_metadata=REPLICATED)
        of_heads = {"kernel_metadata": over_heads(-2), "bias_metadata": over_heads(-2)}
        by_heads = functools.partial(linear, use_bias=bias, **of_heads)
        self.latent: Any = narrow(rank)
        self.key_up, self.value_up = by_heads(rank, (heads, head_dim)), by_heads(rank, (heads, value_dim))
        queries = (heads, head_dim + turned)
        if query_rank is None:
            self.query = by_heads(width, queries)
        else:
            self.query_latent, self.query_up = narrow(query_rank), by_heads(query_rank, queries)
        if turned:
            self.turned = narrow(turned)

    def projections(
        self, x: Float[Array, "b t d"], positions: Int[Array, "#b t"]
    ) -> tuple[Float[Array, "b t n h"], dict[str, Array]]:
        """Return the queries (B T N H + rotary_width), and the arrays that a cache stores and `keys_values` reads.

        These arrays are `latent` (B T R) and, with rotary positions, `turned` (B T rotary_width), the shared rotated
        keys.

        Args:
            x: tokens, B T D.
            positions: position of each token, B T or 1 T.
        """
        latent = _normed(self.latent_norm, self.latent(x))
        narrow = self.ranks[1] is not None
        q = self.query_up(_normed(self.query_norm, self.query_latent(x))) if narrow else self.query(x)
        if not self.ranks[2]:
            return q, {"latent": latent}
        plain, turned = jnp.split(q, [q.shape[-1] - self.ranks[2]], axis=-1)
        q = jnp.concatenate([plain, rotate(turned, positions, base=self.base)], axis=-1)
        return q, {"latent": latent, "turned": rotate(self.turned(x)[:, :, None], positions, base=self.base)[:, :, 0]}

    def keys_values(self, cached: Mapping[str, Array]) -> tuple[Float[Array, "b s n h"], Float[Array, "b s n hv"]]:
        """Return keys (B S N H + rotary_width) and values (B S N H') from the latents of `projections`, or of a cache.

        With a cache this is repeated at every step: the price of caching R + rotary_width numbers per token instead of
        N (H + H').
        """
        k, v = self.key_up(cached["latent"]), self.value_up(cached["latent"])
        if "turned" in cached:
            shared = jnp.broadcast_to(cached["turned"][:, :, None], (*k.shape[:3], self.ranks[2]))
            k = jnp.concatenate([k, shared], axis=-1)
        return k, v

    def empty_cache(self, batch: int, size: int) -> dict[str, Array]:
        """Return an empty cache for B = `batch` rows of up to S = `size` tokens, zeros: {"latent": B S R}.

        With rotary positions it also has "turned" (B S rotary_width), the shared rotated keys.
        """
        rank, _, turned = self.ranks
        widths = {"latent": rank} | ({"turned": turned} if turned else {})
        return {name: jnp.zeros((batch, size, width), self.latent.dtype) for name, width in widths.items()}


def _normed(norm: nnx.Module | None, x: Float[Array, "b t r"]) -> Float[Array, "b t r"]:
    return x if norm is None else norm(x)


def _check_rank(name: str, rank: int | None, width: int) -> None:
    if rank is None or not 1 <= rank <= width:
        raise ConfigError(
            f"model.{name}={rank}: a latent has 1 to model.width={width} channels. "
            f"Set model.{name}, for example {max(1, width // 4)}."
        )
