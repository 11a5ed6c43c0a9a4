"""What one head's attention matrix says: entropies and logits, over the keys that are seen by queries that are tokens.

Of a block's arrays `q`, `k`, `mask`, a `masks.Mask`, and `soft_cap`, of the logits, or None.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from leanformer.conditioning.spectrum import Reading, read
from leanformer.layers.masks import logits


Named = Mapping[str, Any]


def _seen(a: Named) -> Bool[Array, "#b 1 #t #s"]:
    """Which keys are seen by which query that is no padding."""
    queries, keys = a["q"].shape[1], a["k"].shape[1]
    seen, real = a["mask"].kept(queries, keys), a["mask"].real(queries)
    seen = jnp.ones((1, 1, 1, 1), bool) if seen is None else seen
    return seen if real is None else seen & real[:, None, :, None]


def _logits(a: Named) -> Float[Array, "b n t s"]:
    """With the lowest number where a key is not seen."""
    return logits(a["q"], a["k"], a["mask"], soft_cap=a["soft_cap"])


def probabilities(a: Named) -> Float[Array, "b n t s"]:
    return jax.nn.softmax(_logits(a))


def _entropies(a: Named) -> tuple[Float[Array, "b n t"], Int[Array, "b t"]]:
    """Of each query's probabilities, 0 for padding; and of how many keys."""
    log = jax.nn.log_softmax(_logits(a))
    seen = _seen(a)
    count = jnp.broadcast_to(seen, (len(log), 1, *log.shape[2:])).sum(axis=-1)[:, 0]
    return -jnp.sum(jnp.where(seen, jnp.exp(log) * log, 0), axis=-1), count


def entropy(a: Named) -> Reading:
    entropies, keys = _entropies(a)
    if a["mask"].real(keys.shape[1]) is None:
        return read(entropies.mean(axis=-1))
    return read(entropies.sum(axis=-1) / jnp.maximum((keys > 0).sum(axis=-1), 1)[:, None])


def relative_entropy(a: Named) -> Reading:
    entropies, keys = _entropies(a)
    choice = keys > 1
    shares = jnp.where(choice[:, None], entropies / jnp.log(jnp.maximum(keys, 2))[:, None], 0)
    return read(shares.sum(axis=-1) / choice.sum(axis=-1)[:, None])


def self_weight(a: Named) -> Reading:
    own = jnp.diagonal(probabilities(a), axis1=-2, axis2=-1)  # B N T
    real = a["mask"].real(a["q"].shape[1])
    if real is None:
        return read(own.mean(axis=-1))
    return read(jnp.where(real[:, None], own, 0).sum(axis=-1) / jnp.maximum(real.sum(axis=-1), 1)[:, None])


def largest_logit(a: Named) -> Reading:
    return read(jnp.where(_seen(a), _logits(a), -jnp.inf).max(axis=(-2, -1)))
