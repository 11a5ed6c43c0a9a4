"""Text generation, token by token, with a key-value cache.

Axes as in `layers.attention`. Draws of a row depend only on the key, its index and the position, not on other rows.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.errors import ConfigError


MIN_TEMPERATURE = 1e-30  # logits divided by less may overflow, and the division flushes less than 1.2e-38 to zero
NOTHING = -1  # marks rows that still read their prompt, or have ended


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of the next token."""

    temperature: float = 1.0  # divisor of the logits; 0 selects the most likely token
    top_k: int | None = None  # most likely tokens to sample from, and more if others are as likely as the last
    top_p: float | None = None  # smallest total probability of the tokens to sample from (Holtzman et al. 2020)

    def __post_init__(self):
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(f"--temperature={self.temperature}: must be 0, or at least {MIN_TEMPERATURE}.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top_k={self.top_k}: must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top_p={self.top_p}: must be above 0 and at most 1.")


def tokens_available(prompts: Mapping[str, np.ndarray], max_length: int, requested: int | None) -> list[int]:
    """Return the number of tokens to generate after each prompt, by its place: `requested`, or as many as fit.

    Raises ConfigError if a prompt with its generated tokens is too long for the model.
    """
    numbers = {place: max_length - len(tokens) if requested is None else requested for place, tokens in prompts.items()}
    for place, number in numbers.items():
        length = len(prompts[place])
        if number < 1 or length + number > max_length:
            raise ConfigError(
                f"{place}: the prompt has {length} tokens, including the one that begins a document, of "
                f"model.max_length={max_length}. Shorten it, or set --tokens={max(1, max_length - length)} or less."
            )
    return [*numbers.values()]


def choose(logits: Float[Array, "b v"], keys: Key[Array, "b"], how: Sampling) -> Int[Array, "b"]:
    """Return the next token of each row, sampled from its logits."""
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
        before = jnp.pad(jnp.cumsum(shares, axis=-1), ((0, 0), (1, 0)))[:, :-1]
        least = jnp.maximum(least, jnp.where(before < how.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True))
    return jax.vmap(jax.random.categorical)(keys, jnp.where(logits < least, -jnp.inf, logits))


def position_keys(key: Key[Array, ""], rows: int, place: Int[Array, ""]) -> Key[Array, "{rows}"]:
    """Return a random key for each row, derived from `key`, the row's index, and the position `place`."""
    row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, place)


@functools.partial(nnx.jit, static_argnames="how")
def _next(
    model: Any, tokens: Array | np.ndarray, cache: Any, offset: Array, key: Array, how: Sampling
) -> tuple[Array, Any]:
    logits, cache = model.extend(tokens, cache, offset)
    return choose(logits, position_keys(key, len(tokens), offset + tokens.shape[1]), how), cache


def generate(
    model: Any,
    prompts: Sequence[np.ndarray],
    tokens: int | Sequence[int],
    *,
    end: int | None,
    key: Key[Array, ""],
    how: Sampling = Sampling(),
) -> Iterator[np.ndarray]:
    """Yield the tokens that follow each prompt, position by position, as int arrays (B,), one entry per prompt.

    Prompts start at the same position, so longer ones end later. An entry is NOTHING (-1) while the row is still in its
    prompt, and after its end. Positions without any token are not yielded. The token `end` of a row is yielded.
    `tokens` is the maximum number for all rows, or for each. The model has `extend` and `empty_cache` (`models.gpt`).
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    stops = lengths + np.asarray(tokens)
    shortest, total = int(lengths.min()), int(stops.max())
    given = np.stack([np.pad(prompt, (0, total - len(prompt))) for prompt in prompts]).astype(np.int32)
    cache, fed, ended = model.empty_cache(len(prompts), total), given[:, :shortest], np.zeros(len(prompts), bool)
    for place in range(shortest, total):
        drawn, cache = _next(model, fed, cache, jnp.int32(place - fed.shape[1]), key, how)
        reading = place < lengths
        column = np.where(reading, given[:, place], np.asarray(drawn))
        fed = column[:, None].astype(np.int32)
        silent = reading | ended | (place >= stops)
        if not silent.all():
            yield np.where(silent, NOTHING, column)
        ended |= ~silent & (column == end)
        if (ended | (place + 1 >= stops)).all():
            return
