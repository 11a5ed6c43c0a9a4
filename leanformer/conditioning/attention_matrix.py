"""Measures of attention heads: entropies, logits, distance, correlation. Each returns a `Reading` (B N).

Arrays by name: `q` (B T N H), `k` (B S K H), `mask` (a `masks.Mask`, or `Padding`) or None, and `soft_cap` or None. For
a model of another library, `logits` (B N T S), which include every mask and bias, take the place of q and k; logits of
at most HIDDEN are masked keys. Only keys that the mask allows and queries that are not padding count.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from array_api_compat import array_namespace, device, is_jax_array

from leanformer.conditioning.spectrum import FLOOR, Reading, read, singular_values


Named = Mapping[str, Any]
HIDDEN = -9e3  # libraries mask with -1e4, the lowest float16 or float32, or -inf


@dataclasses.dataclass(frozen=True)
class Padding:
    """Mask of padding alone."""

    keep: Any  # bool B S: True for tokens that are not padding
    lengths = None

    def valid_tokens(self, keys: int) -> Any:
        return self.keep

    def attention_mask(self, queries: int, keys: int) -> Any:
        return self.keep[:, None, None]


def _namespace(a: Named) -> Any:
    return array_namespace(a["logits"] if "logits" in a else a["q"])


def _sizes(a: Named) -> tuple[int, int]:
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
    """Return the attention probabilities, B N T S."""
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
    """Return the mean of values B N T over the queries B T that count, others being zero; over all if None."""
    xp = _namespace(a)
    if counted is None:
        return read(xp.mean(values, axis=-1))
    number = xp.sum(xp.astype(counted, xp.int32), axis=-1)[:, None]
    return read(xp.sum(values, axis=-1) / xp.clip(number, 1, None))


def _mean_of_valid(a: Named, values: Any) -> Reading:
    """Return the mean of values B N T over queries that are not padding."""
    valid = _valid(a)
    return _mean(a, values if valid is None else _namespace(a).where(valid[:, None], values, 0), valid)


def entropy(a: Named) -> Reading:
    """Return the entropy of the attention probabilities in nats, a mean over queries."""
    entropies, keys = _entropies(a)
    return _mean(a, entropies, None if _valid(a) is None else keys > 0)


def relative_entropy(a: Named) -> Reading:
    """Return attention entropy / log(visible keys), averaged over queries, 0 to 1; invalid if no query sees two."""
    xp, (entropies, keys) = _namespace(a), _entropies(a)
    several = keys > 1
    shares = entropies / xp.log(xp.astype(xp.clip(keys, 2, None), xp.float32))[:, None]
    total = xp.sum(xp.where(several[:, None], shares, 0), axis=-1)
    return read(total / xp.sum(xp.astype(several, xp.int32), axis=-1)[:, None])


def self_weight(a: Named) -> Reading:
    """Return the probability of a query's own token, a mean over queries; not valid with more keys than queries."""
    p = probabilities(a)
    return _if_square(p, _mean_of_valid(a, _namespace(a).linalg.diagonal(p)))


def distance(a: Named) -> Reading:
    """Return the distance Σ_j p_ij |i - j| in tokens, a mean over queries i (Raghu et al. 2021, there in pixels).

    Tokens of a grid count in the order of their rows. With more keys than queries it is not valid.
    """
    xp, p = _namespace(a), probabilities(a)
    at = xp.astype(xp.arange(p.shape[-1], device=device(p)), xp.float32)
    away = xp.sum(p * xp.abs(at[: p.shape[2], None] - at[None])[None, None], axis=-1)
    return _if_square(p, _mean_of_valid(a, away))


def _if_square(p: Any, reading: Reading) -> Reading:
    return Reading(reading.value, reading.valid & (p.shape[-1] == p.shape[-2]))


def largest_logit(a: Named) -> Reading:
    """Return the largest logit, signed, scaled and soft-capped; not valid for an example that has only padding."""
    xp = _namespace(a)
    return read(xp.max(xp.where(_visible(a), _logits(a), -xp.inf), axis=(-2, -1)))


def heads_first(x: Any) -> Any:
    """Return ... N T H of ... T N H."""
    return array_namespace(x).moveaxis(x, -2, -3)


def repeat_heads(shared: Any, heads: int) -> Any:
    """Repeat the key or value heads of L K D H that query heads share: L N D H."""
    return array_namespace(shared).repeat(shared, heads // shared.shape[1], axis=1)


def cast(x: Any, dtype: str) -> Any:
    xp = array_namespace(x)
    return xp.astype(x, getattr(xp, dtype))


def pseudo_inverse_residual(a: Named) -> Reading:
    matrix, inverse = a["landmark_probabilities"], a["pseudo_inverse"]
    norm = array_namespace(matrix).linalg.matrix_norm
    return read(norm(matrix @ inverse @ matrix - matrix) / norm(matrix))


def head_correlation(a: Named) -> Reading:
    """Return the mean linear CKA between outputs of head pairs, tokens centred (Kornblith et al. 2019, eq. 3)."""
    out, xp = a["out"], array_namespace(a["out"])
    valid = xp.any(out != 0, axis=(2, 3), keepdims=True)  # padding rows are zero
    number = xp.sum(xp.astype(valid, xp.int32), axis=1, keepdims=True)
    original = xp.max(xp.abs(out), axis=(1, 3), keepdims=True)
    out = xp.where(valid, out - xp.sum(out, axis=1, keepdims=True) / xp.clip(number, 1, None), 0)
    # The scale cancels; without it, fourth powers would overflow. Equal tokens leave only rounding noise.
    scale = xp.max(xp.abs(out), axis=(1, 3), keepdims=True)
    out = xp.where(scale > FLOOR * original, out / scale, 0)
    overlap = xp.sum(xp.einsum("btnh,btmg->bnmhg", out, out) ** 2, axis=(-2, -1))  # B N N
    norms = xp.sqrt(xp.linalg.diagonal(overlap))
    cka = overlap / (norms[:, :, None] * norms[:, None, :])
    heads = out.shape[2]
    return read((xp.sum(cka, axis=(-2, -1)) - heads) / max(heads * (heads - 1), 1), defined=heads > 1)


def product(left: Any, right: Any) -> Any:
    """Return a k x k matrix with the non-zero singular values of left rightᵀ, each ... D H; k = min(D, H)."""
    context = contextlib.nullcontext()
    if is_jax_array(left):
        import jax

        context = jax.enable_x64(True)
    with context:  # condition numbers multiply, which is too much for float32
        xp = array_namespace(left)
        left, right = (xp.linalg.qr(cast(x, "float64"))[1] for x in (left, right))
        return cast(left @ xp.matrix_transpose(right), "float32")


def _logit_energy(a: Named) -> Any:
    """Return the squared singular values of the logits Q Kᵀ, keys centred, over their sum, B N r, largest first."""
    q, k, xp = heads_first(a["q"]), heads_first(a["k"]), array_namespace(a["k"])
    k = repeat_heads(k - xp.mean(k, axis=-2, keepdims=True), q.shape[1])
    s = singular_values(product(q, k))
    s = s / s[..., :1]
    return s**2 / xp.sum(s**2, axis=-1, keepdims=True)


def logit_entropy(a: Named) -> Reading:
    p, xp = _logit_energy(a), array_namespace(a["q"])
    return read(-xp.sum(p * xp.log(xp.where(p > 0, p, 1)), axis=-1))


def logit_components(a: Named) -> Reading:
    p, xp = _logit_energy(a), array_namespace(a["q"])
    missing = xp.cumulative_sum(p, axis=-1) < 0.9
    return read(xp.where(xp.isfinite(p[..., 0]), 1 + xp.sum(xp.astype(missing, xp.int32), axis=-1), xp.nan))
