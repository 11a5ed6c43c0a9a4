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

from leanformer.config.rules import WHOLE_NUMBER
from leanformer.errors import ConfigError


MIN_TEMPERATURE = 1e-30  # logits divided by less may overflow, and the division flushes less than 1.2e-38 to zero
NOTHING = -1  # marks rows that still read their prompt, or have ended


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of the next token. Raises ConfigError for one that is out of range.

    Attributes:
        temperature: divisor of the logits; 0 selects the most likely token.
        top_k: number of most likely tokens to sample from, and more if others are as likely as the last; None for all.
        top_p: the most likely tokens are sampled whose probabilities together reach this, above 0 and at most 1
            (Holtzman et al. 2020); None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        limits = {
            "temperature": (self.temperature, self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf),
            "top_k": (self.top_k, self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= 1)),
            "top_p": (self.top_p, self.top_p is None or 0 < self.top_p <= 1),
        }
        for name, (value, valid) in limits.items():
            if not valid:
                raise ConfigError(
                    f"--{name}={value}: temperature must be 0, for the most likely token, or at least "
                    f"{MIN_TEMPERATURE}; top_k a whole number from 1; top_p a probability mass above 0 and at most 1."
                )


def check_numbers(seed: int, tokens: int | None) -> None:
    """Raise ConfigError unless --seed is an int32 of at least 0, and --tokens an int32 of at least 1, or None."""
    for name, value, least in (("seed", seed, 0), ("tokens", 1 if tokens is None else tokens, 1)):
        if not isinstance(value, int | np.integer) or not least <= value <= WHOLE_NUMBER:
            raise ConfigError(f"--{name}={value}: must be a whole number from {least} to {WHOLE_NUMBER:,}.")


def tokens_available(prompts: Mapping[str, np.ndarray], max_length: int, requested: int | None) -> list[int]:
    """Return the number of tokens to generate after each prompt.

    Args:
        prompts: tokens of each prompt by its place, such as "prompts.txt, line 3", with the token that begins a
            document.
        max_length: maximal length of the model in tokens.
        requested: number for every prompt; None for as many as the model's length allows.

    Raises:
        ConfigError: a prompt with its generated tokens is longer than the model's length.
    """
    numbers = {place: max_length - len(tokens) if requested is None else requested for place, tokens in prompts.items()}
    for place, number in numbers.items():
        length = len(prompts[place])
        if number < 1 or length + number > max_length:
            fix = (
                "Shorten it." if length >= max_length else f"Shorten it, or set --tokens={max_length - length} or less."
            )
            raise ConfigError(
                f"{place}: the prompt has {length} tokens, including the one that begins a document, of "
                f"model.max_length={max_length}. {fix}"
            )
    return [*numbers.values()]


def choose(logits: Float[Array, "b v"], keys: Key[Array, "b"], how: Sampling) -> Int[Array, "b"]:
    """Return the next token of each row, sampled from its logits.

    Args:
        logits: logits of the next token, for rows B and vocabulary V.
        keys: random key of each row; not used at temperature 0.
        how: temperature, top-k and top-p.
    """
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
    """Return a random key for each of `rows` rows, derived from `key`, the row's index, and the position `place`."""
    row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, place)


@functools.partial(nnx.jit, static_argnames="how")
def _next(
    model: Any, tokens: Array | np.ndarray, cache: Any, offset: Array, key: Array, how: Sampling
) -> tuple[Array, Any]:
    """Return the token sampled after further tokens, and the cache with them."""
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

    Args:
        model: model with `extend` and `empty_cache`, such as `models.gpt`.
        prompts: B token arrays, of at least one token each.
        tokens: maximum number of tokens that follow a prompt: one for all, or one per prompt.
        end: token that ends a row; None for none.
        key: random key of all draws.
        how: sampling settings.

    Raises:
        ConfigError: prompts and generated tokens exceed the positions of the model.
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
