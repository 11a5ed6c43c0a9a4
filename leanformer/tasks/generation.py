"""Text generation, token by token, with a key-value cache.

Axes as in `layers.attention`. Draws of a row depend only on the key, its index and the position, not on other rows.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.errors import ConfigError


NOTHING = -1  # marks rows that still read their prompt, or have ended


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of the next token. Raises ConfigError for one that is out of range."""

    temperature: float = 1.0  # divisor of the logits; 0 selects the most likely token
    top_k: int | None = None  # number of most likely tokens to sample from; None for all
    top_p: float | None = None  # probability mass of the tokens to sample from (Holtzman et al. 2020); None for all

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature={self.temperature}: must be finite and not negative. 0 = most likely token."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top_k={self.top_k} must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top_p={self.top_p} must be a probability mass above 0 and at most 1.")


def choose(logits: Float[Array, "b v"], keys: Key[Array, "b"], how: Sampling) -> Int[Array, "b"]:
    """Sample the next token of each row."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if not how.temperature:
        return jnp.argmax(logits, axis=-1)
    logits /= how.temperature
    ordered = -jnp.sort(-logits, axis=-1)
    least = ordered[:, -1:]
    if how.top_k is not None:
        least = ordered[:, min(how.top_k, logits.shape[1]) - 1, None]
    if how.top_p is not None:
        shares = jax.nn.softmax(jnp.where(ordered < least, -jnp.inf, ordered), axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        least = jnp.maximum(least, jnp.where(before < how.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True))
    return jax.vmap(jax.random.categorical)(keys, jnp.where(logits < least, -jnp.inf, logits))


def position_keys(key: Key[Array, ""], rows: int, place: Int[Array, ""]) -> Key[Array, "{rows}"]:
    """Return a random key per row for the token at a position."""
    row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, place)


@functools.partial(nnx.jit, static_argnames="how")
def _next(model: nnx.Module, tokens: Array, cache: Any, offset: Array, key: Array, how: Sampling) -> tuple[Array, Any]:
    """Return the token sampled after further tokens, and the cache with them."""
    logits, cache = model.extend(tokens, cache, offset)
    return choose(logits, position_keys(key, len(tokens), offset + tokens.shape[1]), how), cache


def generate(
    model: nnx.Module,
    prompts: Sequence[np.ndarray],
    tokens: int,
    *,
    end: int | None,
    key: Key[Array, ""],
    how: Sampling = Sampling(),
) -> Iterator[np.ndarray]:
    """Yield the tokens that follow each prompt, a column (B,) at a time, with NOTHING for rows without one.

    Args:
        model: model with `extend` and `empty_cache`, such as `models.gpt`.
        prompts: token arrays, of at least one token each.
        tokens: maximum number of tokens that follow a prompt.
        end: token that ends a row; None for none.

    Raises:
        ConfigError: prompts and generated tokens exceed the positions of the model.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    shortest, total = int(lengths.min()), int(lengths.max()) + tokens
    given = np.stack([np.pad(prompt, (0, total - len(prompt))) for prompt in prompts]).astype(np.int32)
    cache, fed, ended = model.empty_cache(len(prompts), total), given[:, :shortest], np.zeros(len(prompts), bool)
    for place in range(shortest, total):
        drawn, cache = _next(model, fed, cache, jnp.int32(place - fed.shape[1]), key, how)
        reading = place < lengths
        column = np.where(reading, given[:, place], np.asarray(drawn))
        fed = column[:, None].astype(np.int32)
        silent = reading | ended | (place >= lengths + tokens)
        if not silent.all():
            yield np.where(silent, NOTHING, column)
        ended |= ~silent & (column == end)
        if (ended | (place + 1 >= lengths + tokens)).all():
            return
