"""Where tokens stand in their rows: their places, how many there can be, and sinusoids of them.

Axes as in `leanformer.layers.attention`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from leanformer.errors import ConfigError


def check_length(tokens: int, most: int) -> None:
    """Raises ConfigError for more tokens than a model has positions for."""
    if tokens > most:
        raise ConfigError(f"{tokens} tokens in a row, and model.max_length={most}. Raise it, or cut them.")


def places(tokens: Int[Array, "b t"], segments: Int[Array, "b t"] | None = None) -> Int[Array, "#b t"]:
    """Where each token stands, from 0: in its row, or in its own segment of a packed one."""
    index = jnp.arange(tokens.shape[1])[None]
    if segments is None:
        return index
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def sinusoids(places: Int[Array, "#b t"], width: int) -> Float[Array, "#b t {width}"]:
    """Channel 2i is sin(place / 10,000^(2i / D)) and channel 2i + 1 its cosine (Vaswani et al. 2017, section 3.5)."""
    rates = 10_000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = places[..., None].astype(jnp.float32) * rates[None, None]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*places.shape, -1)[..., :width]
