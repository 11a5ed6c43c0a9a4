"""Multi-head latent attention: keys and values are computed from a small latent per token, which the cache holds."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.config.attention import LatentKeys
from leanformer.config.declare import types_of
from leanformer.config.rules import require
from leanformer.layers import norms
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.positions import check_rotary, rotate
from leanformer.runtime.mesh import REPLICATED, over_heads


SHARED_OPTIONS = ("rotary", "rotary_width", "logit_scale", "temperature", "soft_cap", "out_bias", "attention_dropout")


class LatentAttention(MultiHeadAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1, equations 9 to 19).

    Keys and values of all heads are linear in a latent of R = `kv_rank` channels, so the keys of all heads together
    have at most rank R, for any N · H. Rotary positions use `rotary_width` additional channels of each query, and of
    one key shared by all heads, since a rotated latent could not be cached. Logits are multiplied by 1/√(H +
    rotary_width).

    Parameters: `latent` (D, R), `key_up` (R, N, H), `value_up` (R, N, H'); `query` (D, N, H + rotary_width), or with a
    `query_rank` R' `query_latent` (D, R') and `query_up` (R', N, H + rotary_width); with rotary positions `turned` (D,
    rotary_width); `out` as in `MultiHeadAttention`; biases likewise; and a norm of each latent if configured.
    """

    options = MappingProxyType(
        types_of(LatentKeys) | {name: MultiHeadAttention.options[name] for name in SHARED_OPTIONS}
    )

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
        for name, rank in (("kv_rank", kv_rank), ("query_rank", query_rank or width)):
            valid = rank is not None and 1 <= rank <= width
            require(valid, f"model.{name}={rank}: a latent has 1 to model.width={width} channels. Set their number.")
        complete = rotary is None or rotary_width is not None
        require(complete, f"model.rotary={rotary}: latent attention rotates extra channels. Set model.rotary_width.")
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
        return head_dim + (options.get("rotary_width") or 0)

    def make_projections(
        self, linear: Callable[..., nnx.Module], width: int, shapes: Mapping[str, tuple[int, int]], bias: bool
    ) -> None:
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
        """Return queries (B T N H + rotary_width), latents (B T R) and shared rotated keys (B T rotary_width)."""
        latent = _normed(self.latent_norm, self.latent(x))
        narrow = self.ranks[1] is not None
        q = self.query_up(_normed(self.query_norm, self.query_latent(x))) if narrow else self.query(x)
        if not self.ranks[2]:
            return q, {"latent": latent}
        plain, turned = jnp.split(q, [q.shape[-1] - self.ranks[2]], axis=-1)
        q = jnp.concatenate([plain, rotate(turned, positions, base=self.base)], axis=-1)
        return q, {"latent": latent, "turned": rotate(self.turned(x)[:, :, None], positions, base=self.base)[:, :, 0]}

    def keys_values(self, cached: Mapping[str, Array]) -> tuple[Float[Array, "b s n h"], Float[Array, "b s n hv"]]:
        """Return keys (B S N H + rotary_width) and values (B S N H') from latents, also cached ones at every step."""
        k, v = self.key_up(cached["latent"]), self.value_up(cached["latent"])
        if "turned" in cached:
            shared = jnp.broadcast_to(cached["turned"][:, :, None], (*k.shape[:3], self.ranks[2]))
            k = jnp.concatenate([k, shared], axis=-1)
        return k, v

    def empty_cache(self, batch: int, size: int) -> dict[str, Array]:
        rank, _, turned = self.ranks
        widths = {"latent": rank} | ({"turned": turned} if turned else {})
        return {name: jnp.zeros((batch, size, width), self.latent.dtype) for name, width in widths.items()}


def _normed(norm: nnx.Module | None, x: Float[Array, "b t r"]) -> Float[Array, "b t r"]:
    return x if norm is None else norm(x)
