"""Class tokens, position indices, sinusoidal embeddings, and rotary positions and norms of queries and keys."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.config.rules import require
from leanformer.layers import norms


def check_length(tokens: int, most: int) -> None:
    """Raise ConfigError if a row has more tokens than the model has positions."""
    require(tokens <= most, f"model.max_length={most}: a row has {tokens} tokens. Increase it, or truncate the rows.")


def prepend(token: nnx.Param[Array], x: Float[Array, "b *t d"]) -> Float[Array, "b tokens d"]:
    """Put a learned token (1 1 D) in front of the tokens of each example, or of the pixels of a map, row by row."""
    first = jnp.broadcast_to(token[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
    return jnp.concatenate([first, jax.lax.collapse(x, 1, -1)], axis=1)


def token_positions(tokens: Int[Array, "b t"], segments: Int[Array, "b t"] | None = None) -> Int[Array, "#b t"]:
    """Return the position of each token from 0: in its row, 1 T, or in its segment of a packed row, B T."""
    index = jnp.arange(tokens.shape[1])[None]
    if segments is None:
        return index
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def sinusoidal_embeddings(places: Int[Array, "#b t"], width: int) -> Float[Array, "#b t {width}"]:
    """Return fixed embeddings: channels 2i and 2i + 1 are sin and cos of place / 10,000^(2i/D) (Vaswani et al.)."""
    rates = 10_000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = places[..., None].astype(jnp.float32) * rates[None, None]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*places.shape, -1)[..., :width]


def rotate(
    x: Float[Array, "b t n h"], positions: Int[Array, "#b t"], *, base: float = 10_000.0, width: int | None = None
) -> Float[Array, "b t n h"]:
    """Rotate channels i and i + width/2 by the angle position / base^(2i/width), i < width/2 (Su et al. 2021).

    Pairs are halves, not neighbours, as in published weights of Llama. Only the first `width` channels of each head are
    rotated, all if None. Angles, sines and products are float32 or wider.
    """
    width = width or x.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rates = base ** (-jnp.arange(0, width, 2, dtype=wide) / width)
    angles = positions[..., None, None].astype(wide) * rates[None, None, None]  # B T 1 H/2
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = jnp.split(x.astype(wide), (width // 2, width), axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class QueryKeyTransform(nnx.Module):
    """Norm of queries and keys per head (Henry et al. 2020; Dehghani et al. 2023), then rotary positions.

    A norm without a scale commutes with rotation; with a scale it comes first, as in Qwen3. Parameters: `query_norm`
    and `key_norm`, over the head dimension, shared by all heads.
    """

    def __init__(
        self,
        head_dim: int,
        qk_norm: str | None,
        rotary: float | None,
        rotary_width: int | None,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_rotary(head_dim, rotary, rotary_width)
        self.base, self.width = rotary, rotary_width
        self.query_norm, self.key_norm = (
            None if qk_norm is None else norms.make(qk_norm, head_dim, dtype=dtype, rngs=rngs) for _ in range(2)
        )

    def __call__(
        self, q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], positions: Int[Array, "#b t"]
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b t k h"]]:
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.base is not None:
            q, k = (rotate(x, positions, base=self.base, width=self.width) for x in (q, k))
        return q, k


def check_rotary(head_dim: int, rotary: float | None, rotary_width: int | None) -> None:
    """Raise ConfigError if the settings of rotary positions are invalid."""
    if rotary is None:
        require(rotary_width is None, f"model.rotary_width={rotary_width}: model.rotary is unset. Set its base.")
        return
    require(rotary > 1, f"model.rotary={rotary}: the base of the angles must be above 1. Set, for example, 10,000.")
    name, width = ("head_dim", head_dim) if rotary_width is None else ("rotary_width", rotary_width)
    pairs = width % 2 == 0 and 2 <= width <= head_dim
    require(pairs, f"model.{name}={width}: rotary positions need an even number, at most model.head_dim={head_dim}.")
