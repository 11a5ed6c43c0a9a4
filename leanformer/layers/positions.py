"""Position indices, sinusoidal embeddings, and rotary positions and norms of queries and keys.

Axes as in `leanformer.layers.attention`; K heads of keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.errors import ConfigError
from leanformer.layers import norms


def check_length(tokens: int, most: int) -> None:
    """Raise ConfigError if a row has more tokens than the model has positions.

    Args:
        tokens: number of tokens of a row.
        most: `model.max_length`.
    """
    if tokens > most:
        raise ConfigError(f"model.max_length={most}: a row has {tokens} tokens. Increase it, or truncate the rows.")


def token_positions(tokens: Int[Array, "b t"], segments: Int[Array, "b t"] | None = None) -> Int[Array, "#b t"]:
    """Return the position of each token from 0: in its row, 1 T, or in its segment of a packed row, B T.

    Args:
        tokens: token ids, B T, of which only the shape is used.
        segments: segment of each token of packed rows, B T; None for unpacked rows.
    """
    index = jnp.arange(tokens.shape[1])[None]
    if segments is None:
        return index
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def sinusoidal_embeddings(places: Int[Array, "#b t"], width: int) -> Float[Array, "#b t {width}"]:
    """Return fixed position embeddings: channels 2i and 2i + 1 are sin and cos of place / 10,000^(2i/D).

    They are those of Vaswani et al. 2017, section 3.5, in float32.

    Args:
        places: positions of the tokens, B T or 1 T.
        width: D, embedding dimension.
    """
    rates = 10_000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = places[..., None].astype(jnp.float32) * rates[None, None]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*places.shape, -1)[..., :width]


def rotate(
    x: Float[Array, "b t n h"], positions: Int[Array, "#b t"], *, base: float = 10_000.0, width: int | None = None
) -> Float[Array, "b t n h"]:
    """Rotate channels i and i + width/2 by the angle position / base^(2i/width), i < width/2 (Su et al. 2021).

    Pairs are halves, not neighbours, as in published weights of Llama. Angles, sines and products are float32 or wider.

    Args:
        x: queries or keys.
        positions: position of each token, B T or 1 T.
        base: base of the angles.
        width: number of rotated channels, the first of each head; all if None.
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
    """Norm of queries and keys per head, then rotary positions.

    Called with queries (B T N H), keys (B T K H) and positions (B T or 1 T), it returns the new queries and keys in the
    same shapes. A norm without a scale commutes with rotation; with a scale it comes first, as in Qwen3.

    Parameters: those of `query_norm` and `key_norm`, over the head dimension, shared by all heads.

    Args:
        head_dim: H, dimension of queries and keys.
        qk_norm: norm type, of `norms.NORMS` (Henry et al. 2020; Dehghani et al. 2023); None for none.
        rotary: base of the angles, 10,000 in the original; None for no rotary positions.
        rotary_width: number of rotated channels of a head; all if None.

    Raises:
        ConfigError: the norm is unknown, the base is not above 1, or the width is odd, above the head dimension, or set
            without a base.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        qk_norm: str | None = None,
        rotary: float | None = None,
        rotary_width: int | None = None,
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
    """Raise ConfigError if the settings of rotary positions are invalid.

    Args:
        head_dim: H, even if all channels are rotated.
        rotary: base of the angles, above 1; None for no rotary positions.
        rotary_width: even number of rotated channels, at most `head_dim`; all if None, required without a base.
    """
    if rotary is None:
        if rotary_width is not None:
            raise ConfigError(
                f"model.rotary_width={rotary_width}: model.rotary is unset. Set its base, for example 10,000."
            )
        return
    if rotary <= 1:
        raise ConfigError(f"model.rotary={rotary}: the base of the angles must be above 1. Set, for example, 10,000.")
    name, width = ("head_dim", head_dim) if rotary_width is None else ("rotary_width", rotary_width)
    if width % 2 or not 2 <= width <= head_dim:
        raise ConfigError(
            f"model.{name}={width}: rotary positions rotate pairs of the model.head_dim={head_dim} channels. Set "
            f"an even {name} of at most {head_dim - head_dim % 2 if head_dim > 1 else 2}."
        )
