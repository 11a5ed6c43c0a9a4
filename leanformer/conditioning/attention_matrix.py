"""Measures of one head's attention matrix: entropies, logits, and the weight of a token on itself.

Each function takes a block's arrays `q` and `k`, its `mask` (a `masks.Mask`), and `soft_cap`, the soft cap of the
logits or None. Only keys that the mask allows and queries that are not padding count.

For a model of another library, `logits` (B N T S) take the place of q and k. They include every mask and bias; logits
of at most HIDDEN are masked keys.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from leanformer.conditioning.spectrum import Reading, read
from leanformer.layers.masks import logits


Named = Mapping[str, Any]
HIDDEN = -9e3  # libraries mask with -1e4, the lowest float16 or float32, or -inf


def _sizes(a: Named) -> tuple[int, int]:
    """Return the numbers of queries and keys."""
    return a["logits"].shape[2:] if "logits" in a else (a["q"].shape[1], a["k"].shape[1])


def _is_seen(values: Float[Array, "b n t s"]) -> Bool[Array, "b n t s"]:
    """Return True where a logit is not that of a hidden key; NaN is not, and makes the measures NaN."""
    return ~(values <= HIDDEN)


def _visible(a: Named) -> Bool[Array, "#b 1 #t #s"]:
    """Return the attention mask: True where a query that is not padding may attend to a key."""
    queries, keys = _sizes(a)
    valid = a["mask"].valid_tokens(queries)
    if "logits" in a:
        seen = jnp.any(_is_seen(a["logits"]), axis=1, keepdims=True)
    else:
        seen = a["mask"].attention_mask(queries, keys)
        seen = jnp.ones((1, 1, 1, 1), bool) if seen is None else seen
    return seen if valid is None else seen & valid[:, None, :, None]


def _logits(a: Named) -> Float[Array, "b n t s"]:
    """Return the attention logits, with the lowest float where a key is masked."""
    if "logits" in a:
        return jnp.where(_is_seen(a["logits"]), a["logits"], jnp.finfo(jnp.float32).min)
    return logits(a["q"], a["k"], a["mask"], soft_cap=a["soft_cap"])


def probabilities(a: Named) -> Float[Array, "b n t s"]:
    """Return the attention probabilities (B N T S) of a layer.

    Args:
        a: arrays of a block by name: `q`, `k`, `mask` and `soft_cap`, or `logits` and `mask`.
    """
    return jax.nn.softmax(_logits(a))


def _entropies(a: Named) -> tuple[Float[Array, "b n t"], Int[Array, "b t"]]:
    """Return the entropy of each query's probabilities (0 for padding) and the number of keys it may attend to."""
    log = jax.nn.log_softmax(_logits(a))
    seen = _visible(a)
    count = jnp.broadcast_to(seen, (len(log), 1, *log.shape[2:])).sum(axis=-1)[:, 0]
    return -jnp.sum(jnp.where(seen, jnp.exp(log) * log, 0), axis=-1), count


def entropy(a: Named) -> Reading:
    """Return each head's attention entropy in nats, a mean over queries except padding, as a `Reading` (B N).

    Args:
        a: arrays of a block by name: `q`, `k`, `mask` and `soft_cap`, or `logits` and `mask`.
    """
    entropies, keys = _entropies(a)
    if a["mask"].valid_tokens(keys.shape[1]) is None:
        return read(entropies.mean(axis=-1))
    return read(entropies.sum(axis=-1) / jnp.maximum((keys > 0).sum(axis=-1), 1)[:, None])


def relative_entropy(a: Named) -> Reading:
    """Return each head's attention entropy over the log of the number of visible keys, as a `Reading` (B N).

    The values are 0 to 1. They are averaged over queries that see at least two keys; not valid if there are none.

    Args:
        a: arrays of a block by name: `q`, `k`, `mask` and `soft_cap`, or `logits` and `mask`.
    """
    entropies, keys = _entropies(a)
    several = keys > 1
    shares = jnp.where(several[:, None], entropies / jnp.log(jnp.maximum(keys, 2))[:, None], 0)
    return read(shares.sum(axis=-1) / several.sum(axis=-1)[:, None])


def self_weight(a: Named) -> Reading:
    """Return each head's attention probability of a token on itself, as a `Reading` (B N).

    It is averaged over queries except padding.

    Args:
        a: arrays of a block by name: `q`, `k`, `mask` and `soft_cap`, or `logits` and `mask`.
    """
    diagonal = jnp.diagonal(probabilities(a), axis1=-2, axis2=-1)  # B N T
    valid = a["mask"].valid_tokens(_sizes(a)[0])
    if valid is None:
        return read(diagonal.mean(axis=-1))
    return read(jnp.where(valid[:, None], diagonal, 0).sum(axis=-1) / jnp.maximum(valid.sum(axis=-1), 1)[:, None])


def largest_logit(a: Named) -> Reading:
    """Return each head's largest attention logit, signed, scaled and soft-capped, as a `Reading` (B N).

    Padding and masked keys do not count; not valid for an example that has no other tokens.

    Args:
        a: arrays of a block by name: `q`, `k`, `mask` and `soft_cap`, or `logits` and `mask`. q and k give logits
            Q Kᵀ / √H, then capped; `logits` are used as they are.
    """
    return read(jnp.where(_visible(a), _logits(a), -jnp.inf).max(axis=(-2, -1)))
