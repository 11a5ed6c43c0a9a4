"""Text generation, token by token, with a key-value cache.

Axes as in `layers.attention`. Draws of a row depend only on the key, its index and the position, not on other rows.
"""

import dataclasses
import functools
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.config.rules import WHOLE_NUMBER
from leanformer.errors import ConfigError


LOWEST = 1e-30  # temperature; logits divided by less may overflow, and the division flushes less than 1.2e-38 to zero
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
        kinds = {"temperature": numbers.Real, "top_k": numbers.Integral, "top_p": numbers.Real}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "temperature"):
                raise ConfigError(f"--{name}={value!r}: must be a {'whole ' * (name == 'top_k')}number.")
        if self.temperature != 0 and not LOWEST <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature={self.temperature}: must be 0, for the most likely token, or finite and at least "
                f"{LOWEST}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top_k={self.top_k} must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top_p={self.top_p} must be a probability mass above 0 and at most 1.")


def check_numbers(seed: int, tokens: int | None) -> None:
    """Raise ConfigError unless --seed is an int32 of at least 0, and --tokens an int32 of at least 1, or None."""
    for name, value, least in (("seed", seed, 0), ("tokens", 1 if tokens is None else tokens, 1)):
        if not isinstance(value, int | np.integer) or not least <= value <= WHOLE_NUMBER:
            raise ConfigError(f"--{name}={value}: must be a whole number from {least} to {WHOLE_NUMBER:,}.")


def tokens_available(prompts: Sequence[np.ndarray], most: int, requested: int | None) -> int:
    """Return the number of tokens to generate after each prompt.

    Args:
        prompts: tokens of the prompts, with the token that begins a document.
        most: maximal length of the model in tokens.
        requested: requested number; None for as many as the model's length allows after the longest prompt.

    Raises:
        ConfigError: prompt and generated tokens are longer than the model's length.
    """
    longest = max(map(len, prompts))
    number = most - longest if requested is None else requested
    if number < 1 or longest + number > most:
        raise ConfigError(
            f"model.max_length={most}: the longest prompt has {longest} tokens, including the one that begins a "
            f"document, so at most {max(most - longest, 0)} can be generated. Lower --tokens, or shorten the prompt."
        )
    return number


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
    tokens: int,
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
        tokens: maximum number of tokens that follow a prompt.
        end: token that ends a row; None for none.
        key: random key of all draws.
        how: sampling settings.

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
