"""Measures of one head's attention matrix: entropies, logits, distance, and the weight of a token on itself.

Each function takes a block's arrays by name: `q` (B T N H) and `k` (B S K H), its `mask` (a `masks.Mask`, or
`Padding`) or None, and `soft_cap`, the soft cap of the logits or None. Only keys that the mask allows and queries that
are not padding count.

For a model of another library, `logits` (B N T S) take the place of q and k. They include every mask and bias; logits
of at most HIDDEN are masked keys.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from array_api_compat import array_namespace, device

from leanformer.conditioning.spectrum import Reading, read


Named = Mapping[str, Any]
HIDDEN = -9e3  # libraries mask with -1e4, the lowest float16 or float32, or -inf


@dataclasses.dataclass(frozen=True)
class Padding:
    """Mask of padding alone: `keep` (B S) is True for tokens that are not padding."""

    keep: Any
    lengths = None

    def valid_tokens(self, keys: int) -> Any:
        """Return `keep`."""
        return self.keep

    def attention_mask(self, queries: int, keys: int) -> Any:
        """Return the visible keys, B 1 1 S."""
        return self.keep[:, None, None]


def _namespace(a: Named) -> Any:
    return array_namespace(a["logits"] if "logits" in a else a["q"])


def _sizes(a: Named) -> tuple[int, int]:
    """Return the numbers of queries and keys."""
    return a["logits"].shape[2:] if "logits" in a else (a["q"].shape[1], a["k"].shape[1])


def _valid(a: Named) -> Any:
    """Return the queries that are not padding, bool B T; None if all are."""
    return None if a["mask"] is None else a["mask"].valid_tokens(_sizes(a)[0])


def _visible(a: Named) -> Any:
    """Return the attention mask, bool (B or 1, 1, T or 1, S): True where a query that is not padding sees a key."""
    xp, (queries, keys), valid = _namespace(a), _sizes(a), _valid(a)
    if "logits" in a:
        seen = xp.any(~(a["logits"] <= HIDDEN), axis=1, keepdims=True)  # a NaN is not hidden: measures become NaN
    else:
        seen = None if a["mask"] is None else a["mask"].attention_mask(queries, keys)
        seen = xp.ones((1, 1, 1, 1), dtype=xp.bool, device=device(a["q"])) if seen is None else seen
    return seen if valid is None else seen & valid[:, None, :, None]


def _logits(a: Named) -> Any:
    """Return the attention logits, B N T S, with the lowest float where a key is masked."""
    xp = _namespace(a)
    lowest = float(xp.finfo(xp.float32).min)
    if "logits" in a:
        return xp.where(a["logits"] <= HIDDEN, lowest, a["logits"])
    q, k = a["q"], a["k"]
    if q.shape[2] != k.shape[2]:
        k = xp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    result = xp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    if a["soft_cap"] is not None:
        result = a["soft_cap"] * xp.tanh(result / a["soft_cap"])
    visible = None if a["mask"] is None else a["mask"].attention_mask(*_sizes(a))
    return result if visible is None else xp.where(visible, result, lowest)


def probabilities(a: Named) -> Any:
    """Return the attention probabilities (B N T S) of a layer."""
    xp, x = _namespace(a), _logits(a)
    weights = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def _entropies(a: Named) -> tuple[Any, Any]:
    """Return the entropy B N T of each query's probabilities (0 for padding) and the number B T of keys it may see."""
    xp, x = _namespace(a), _logits(a)
    shifted = x - xp.max(x, axis=-1, keepdims=True)
    log = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
    seen = _visible(a)
    seen_by = xp.broadcast_to(seen, (log.shape[0], 1, *log.shape[2:]))
    count = xp.sum(xp.astype(seen_by, xp.int32), axis=-1)[:, 0]
    return -xp.sum(xp.where(seen, xp.exp(log) * log, 0), axis=-1), count


def _mean(a: Named, values: Any, counted: Any) -> Reading:
    """Return the mean B N of values B N T over the queries B T that count, others being zero; over all if None."""
    xp = _namespace(a)
    if counted is None:
        return read(xp.mean(values, axis=-1))
    number = xp.sum(xp.astype(counted, xp.int32), axis=-1)[:, None]
    return read(xp.sum(values, axis=-1) / xp.clip(number, 1, None))


def _mean_of_valid(a: Named, values: Any) -> Reading:
    """Return the mean B N of values B N T over queries that are not padding."""
    valid = _valid(a)
    return _mean(a, values if valid is None else _namespace(a).where(valid[:, None], values, 0), valid)


def entropy(a: Named) -> Reading:
    """Return each head's attention entropy in nats, a mean over queries except padding, as a `Reading` (B N)."""
    entropies, keys = _entropies(a)
    return _mean(a, entropies, None if _valid(a) is None else keys > 0)


def relative_entropy(a: Named) -> Reading:
    """Return each head's attention entropy over the log of the number of visible keys, as a `Reading` (B N).

    The values are 0 to 1. They are averaged over queries that see at least two keys; not valid if there are none.
    """
    xp, (entropies, keys) = _namespace(a), _entropies(a)
    several = keys > 1
    shares = entropies / xp.log(xp.astype(xp.clip(keys, 2, None), xp.float32))[:, None]
    total = xp.sum(xp.where(several[:, None], shares, 0), axis=-1)
    return read(total / xp.sum(xp.astype(several, xp.int32), axis=-1)[:, None])


def self_weight(a: Named) -> Reading:
    """Return each head's attention probability of a token on itself, as a `Reading` (B N).

    It is averaged over queries except padding.
    """
    return _mean_of_valid(a, _namespace(a).linalg.diagonal(probabilities(a)))


def distance(a: Named) -> Reading:
    """Return each head's mean attention distance in tokens, as a `Reading` (B N).

    Σ_j p_ij |i - j|, a mean over queries i except padding (Raghu et al. 2021, there in pixels of images). Tokens of a
    grid count in the order of their rows. It needs as many queries as keys.
    """
    xp, p = _namespace(a), probabilities(a)
    at = xp.astype(xp.arange(p.shape[-1], device=device(p)), xp.float32)
    away = xp.sum(p * xp.abs(at[: p.shape[2], None] - at[None])[None, None], axis=-1)
    return _mean_of_valid(a, away)


def largest_logit(a: Named) -> Reading:
    """Return each head's largest attention logit, signed, scaled and soft-capped, as a `Reading` (B N).

    Padding and masked keys do not count; not valid for an example that has no other tokens. q and k give logits
    Q Kᵀ / √H, then capped; `logits` are used as they are.
    """
    xp = _namespace(a)
    return read(xp.max(xp.where(_visible(a), _logits(a), -xp.inf), axis=(-2, -1)))
