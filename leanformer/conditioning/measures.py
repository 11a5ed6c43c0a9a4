"""Named measures of conditioning, over the arrays that a tap sees and over weights.

Axes B T S N H D F L are those of `layers.attention`. Every measure states its matrix as rows x columns. Biases are not
part of any weight matrix. A measure requires arrays by name. A block passes `q` and `k` to a tap only if its attention
is softmax(Q Kᵀ / √H) over tokens, so that a name has one meaning in every architecture. If a block's `mask` hides keys,
measures of logits and probabilities use only the visible keys, and only queries that are not padding. Rows of padding
are zero; the singular values of zero that they add do not count.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from array_api_compat import array_namespace, is_jax_array

from leanformer.conditioning import attention_matrix
from leanformer.conditioning.spectrum import FLOOR, Reading, condition, read, singular_values, use_jax, with_spectrum
from leanformer.errors import ConfigError


Named = Mapping[str, Any]  # arrays by name; also "mask", as in `attention_matrix`, and "soft_cap", or None
TOKEN_ROWS = {"out", "tokens", "attention", "middle", "block", "hidden"}  # arrays with a row per token


@dataclasses.dataclass(frozen=True)
class Measure:
    """Definition of a named measure of a block.

    Attributes:
        what: sentence about the matrix or the value, with the matrix as rows x columns.
        needs: names of the arrays that the measure is computed from.
        take: function from these arrays, by name, to a batch of matrices or a `Reading`; None if the only array in
            `needs` is the batch of matrices.
        whole: True if it applies only to sequences without padding, whose rows and columns would add singular values of
            zero.
        logits: True if the logits of another library can take the place of queries and keys.
    """

    what: str
    needs: tuple[str, ...]
    take: Callable[[Named], Any] | None = None
    whole: bool = False
    logits: bool = False


def tap(names: Iterable[str], reduce: Callable[[Any], Any] = condition) -> Callable[[Named], dict[str, Any]]:
    """Return a function for a model's argument `tap`, which computes activation measures inside each layer.

    It has no effect on outputs or gradients.

    Args:
        names: names of measures in ACTIVATIONS.
        reduce: function of a batch of matrices; `singular_values` gives spectra instead of summaries. Only `condition`
            and `with_spectrum` leave out the singular values of padding.

    Returns:
        A function from a block's arrays (`blocks.Block`) to {name: Summary or Reading} with leading axis B, followed
        by N for values per head. `Stack` puts L in front, and returns a list for groups of unequal layers. A measure is
        left out if the block lacks an array that it needs; `by_name` raises for a measure that no block has.

    Raises:
        ConfigError: a name is unknown.
    """
    measures = look_up(names, ACTIVATIONS)

    def reduced(arrays: Named) -> dict[str, Any]:
        return apply(measures, use_jax().observed(dict(arrays)), reduce)

    return reduced


def by_name(stacks: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the requested measures by name, from those of each stack, {stack: {measure: values}}.

    With several stacks the names are "stack.measure"; a measure is left out for a stack that lacks it. If a stack has
    several groups of equal layers, its entry in `stacks` is a list with one dict per group, and the values of each
    measure are a list with one item per group.

    Args:
        stacks: taps of a model, or result of `weights`.
        names: names of the requested measures.

    Raises:
        ConfigError: a name is unknown, or a measure applies to no block of the model.
    """
    names = tuple(names)
    known = look_up(names, ACTIVATIONS | WEIGHTS)
    transposed = {stack: _by_measure(measures) for stack, measures in stacks.items()}
    for name in names:
        if not any(name in measures for measures in transposed.values()):
            spec = known[name]
            needs = ", ".join(spec.needs) + " of sequences without padding" * spec.whole
            raise ConfigError(f"Measure {name!r} does not apply to this model: no block has {needs}. Leave it out.")
    return {
        name if len(stacks) == 1 else f"{stack}.{name}": measures[name]
        for stack, measures in transposed.items()
        for name in names
        if name in measures
    }


def _by_measure(measures: Any) -> Mapping[str, Any]:
    """Return a stack's values by measure, those of several groups as lists."""
    if not isinstance(measures, list):
        return measures
    return {name: [of_group[name] for of_group in measures] for name in measures[0]}


def measure(name: str) -> Measure:
    """Return the definition of a measure of ACTIVATIONS or WEIGHTS by its name, as "measure" or "stack.measure".

    Raises KeyError for an unknown name.

    >>> measure("attention_output").needs
    ('out',)
    """
    return (ACTIVATIONS | WEIGHTS)[name.rpartition(".")[2]]


def weights(stacks: Mapping[str, Any], names: Iterable[str], reduce: Callable[[Any], Any] = condition) -> Any:
    """Return weight measures of a model's stacked blocks, by name.

    Args:
        stacks: nested arrays of each stack's block by the stack's name, as returned by `model.measured()`: the arrays
            of its `attention`, and of its `mlp` if it has one, with leading axis L; a list of them for groups of
            unequal layers.
        names: names of measures in WEIGHTS.
        reduce: function of a batch of matrices, as for `tap`.

    Returns:
        {stack: {name: Summary}} with leading axis L, followed by N for matrices per head; a list of such mappings for
        groups of unequal layers; see `by_name`.

    Raises:
        ConfigError: a name is unknown, or a block has no `attention` and would be skipped silently.
    """
    measures = look_up(names, WEIGHTS)

    def of_block(stack: str, block: Mapping[str, Any]) -> dict[str, Any]:
        if "attention" not in block:
            raise ConfigError(
                f'Stack {stack} cannot be measured: its block has no "attention", only {", ".join(block)}. Rename the '
                "attention, or leave the stack out of the architecture's `stacks`."
            )
        return apply(measures, _flatten(block), reduce)

    return {
        stack: [of_block(stack, group) for group in block] if isinstance(block, list) else of_block(stack, block)
        for stack, block in stacks.items()
    }


def look_up(names: Iterable[str], table: Mapping[str, Measure]) -> dict[str, Measure]:
    names = list(names)
    for name in names:
        if name not in table:
            raise ConfigError(f"{name!r} is not a known measure. Choose one of: {', '.join(table)}.")
    return {name: table[name] for name in names}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of nested mappings by dotted name."""
    result = {}
    for name, value in tree.items():
        result |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return result


def apply(measures: Mapping[str, Measure], arrays: Named, reduce: Callable[[Any], Any] = condition) -> dict[str, Any]:
    """Return the measures of a block's arrays by name, without those whose arrays are missing."""
    values, mask = {}, arrays.get("mask")
    context = {"mask": mask, "soft_cap": arrays.get("soft_cap")}
    padded = mask is not None and (mask.lengths is not None or mask.keep is not None)
    for name, spec in measures.items():
        needs = ("logits",) if spec.logits and "logits" in arrays else spec.needs
        if not all(need in arrays for need in needs) or (spec.whole and padded):
            continue
        with _exact(arrays[needs[0]]):
            needed = {need: _widen(arrays[need], "float32") for need in needs}
            result = spec.take(needed | context) if spec.take else needed[needs[0]]
            if not isinstance(result, Reading):
                result = _reduce(result, reduce, mask if padded and TOKEN_ROWS.issuperset(spec.needs) else None)
            values[name] = result
    return values


def _widen(x: Any, dtype: str) -> Any:
    xp = array_namespace(x)
    return xp.astype(x, getattr(xp, dtype))


def _exact(x: Any) -> Any:
    """Return a context in which JAX on a GPU does not multiply float32 matrices with ten bits of mantissa."""
    if not is_jax_array(x):
        return contextlib.nullcontext()
    import jax

    return jax.default_matmul_precision("highest")


def _reduce(x: Any, reduce: Callable[[Any], Any], mask: Any) -> Any:
    """Reduce matrices (B ... T D), without the singular values of padding where `reduce` can do so."""
    valid = None if mask is None else mask.valid_tokens(x.shape[-2])
    if valid is None or reduce not in (condition, with_spectrum):
        return reduce(x)
    xp = array_namespace(x)
    rows = xp.sum(xp.astype(valid, xp.int32), axis=1)
    spectrum, summary = with_spectrum(x, xp.reshape(rows, (-1, *(1,) * (x.ndim - 3))))
    return summary if reduce is condition else (spectrum, summary)


def _join(out: Any) -> Any:
    """Return B T N·H of B T N H."""
    return array_namespace(out).reshape(out, (*out.shape[:-2], out.shape[-2] * out.shape[-1]))


def _heads(x: Any) -> Any:
    """Return B N T H of B T N H."""
    return array_namespace(x).moveaxis(x, -2, -3)


def _pseudo_inverse_residual(a: Named) -> Reading:
    matrix, inverse = a["landmark_probabilities"], a["pseudo_inverse"]
    norm = array_namespace(matrix).linalg.matrix_norm
    return read(norm(matrix @ inverse @ matrix - matrix) / norm(matrix))


def _head_correlation(a: Named) -> Reading:
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


def _product(left: Any, right: Any) -> Any:
    """Return a k x k matrix with the non-zero singular values of left rightᵀ, k = min(D, H), without forming D x D.

    `left` and `right` are ... D H.
    """
    context = contextlib.nullcontext()
    if is_jax_array(left):
        import jax

        context = jax.enable_x64(True)
    with context:  # condition numbers multiply, which is too much for float32
        xp = array_namespace(left)
        left, right = (xp.linalg.qr(_widen(x, "float64"))[1] for x in (left, right))
        return _widen(left @ xp.matrix_transpose(right), "float32")


def _logit_energy(a: Named) -> Any:
    """Return the squared singular values of the logits Q Kᵀ, keys centred, over their sum, B N r, largest first."""
    q, k, xp = _heads(a["q"]), _heads(a["k"]), array_namespace(a["k"])
    k = _repeat_heads(k - xp.mean(k, axis=-2, keepdims=True), q.shape[1])
    s = singular_values(_product(q, k))
    s = s / s[..., :1]
    return s**2 / xp.sum(s**2, axis=-1, keepdims=True)


def _logit_entropy(a: Named) -> Reading:
    p, xp = _logit_energy(a), array_namespace(a["q"])
    return read(-xp.sum(p * xp.log(xp.where(p > 0, p, 1)), axis=-1))


def _logit_components(a: Named) -> Reading:
    p, xp = _logit_energy(a), array_namespace(a["q"])
    missing = xp.cumulative_sum(p, axis=-1) < 0.9
    return read(xp.where(xp.isfinite(p[..., 0]), 1 + xp.sum(xp.astype(missing, xp.int32), axis=-1), xp.nan))


ACTIVATIONS = {
    "attention_output": Measure(
        "heads concatenated, before the output projection, T x N·H (Leaner Transformers, Definition 3.1, Figure 2)",
        ("out",),
        lambda a: _join(a["out"]),
    ),
    "head_output": Measure("one head's output, T x H", ("out",), lambda a: _heads(a["out"])),
    "attention_probabilities": Measure(
        "one head's softmax matrix, T x S, of sequences without padding",
        ("q", "k"),
        attention_matrix.probabilities,
        whole=True,
        logits=True,
    ),
    "tokens": Measure("tokens entering the block, T x D", ("tokens",)),
    "attention_branch": Measure("after the output projection, before the skip, T x D", ("attention",)),
    "attention_branch_with_skip": Measure("tokens + attention, T x D", ("middle",)),
    "block_output": Measure("leaving the block, both skips added, T x D", ("block",)),
    "block_output_without_skip": Measure(
        "what the block added to its tokens, attention's branch + MLP's branch, T x D",
        ("block", "tokens"),
        lambda a: a["block"] - a["tokens"],
    ),
    "mlp_hidden": Measure("the MLP's hidden layer, input of its last matrix, T x F", ("hidden",)),
    "head_correlation": Measure("mean linear CKA over pairs of heads' outputs, 0 to 1", ("out",), _head_correlation),
    "attention_entropy": Measure(
        "one head's entropy, mean over query tokens, nats, 0 to the log of the keys seen",
        ("q", "k"),
        attention_matrix.entropy,
        logits=True,
    ),
    "relative_attention_entropy": Measure(
        "one head's entropy over the log of the keys seen, mean over query tokens that see two or more, 0 to 1",
        ("q", "k"),
        attention_matrix.relative_entropy,
        logits=True,
    ),
    "largest_logit": Measure(
        "one head's largest logit, scaled and soft-capped, of keys that are seen",
        ("q", "k"),
        attention_matrix.largest_logit,
        logits=True,
    ),
    "self_weight": Measure(
        "one head's probability of each token itself, mean over tokens",
        ("q", "k"),
        attention_matrix.self_weight,
        logits=True,
    ),
    "attention_distance": Measure(
        "one head's distance from a token to those it attends to, in tokens, weighted by attention, mean over tokens",
        ("q", "k"),
        attention_matrix.distance,
        logits=True,
    ),
    "logit_spectral_entropy": Measure(
        "entropy of σ² / Σσ² of one head's logits Q Kᵀ before the mask, keys centred, T x S, nats (arXiv 2606.28116)",
        ("q", "k"),
        _logit_entropy,
        whole=True,
    ),
    "logit_components": Measure(
        "singular components that hold 90 % of Σσ² of the same logits (arXiv 2604.04384)",
        ("q", "k"),
        _logit_components,
        whole=True,
    ),
    "landmark_probabilities": Measure(
        "Nyström attention's softmax matrix F of landmarks and landmarks, one head, M x M", ("landmark_probabilities",)
    ),
    "pseudo_inverse_residual": Measure(
        "what its iteration left undone, ‖F Z F − F‖ / ‖F‖ (Frobenius), one head; 0 for a pseudo-inverse Z",
        ("landmark_probabilities", "pseudo_inverse"),
        _pseudo_inverse_residual,
    ),
}


def _query_key(a: Named) -> Any:
    query, key = _heads(a[QUERY]), _heads(a[KEY])
    return _product(query, _repeat_heads(key, query.shape[1]))


def _value_output(a: Named) -> Any:
    value, out = _heads(a[VALUE]), a[OUT]
    return _product(_repeat_heads(value, out.shape[1]), array_namespace(out).matrix_transpose(out))


def _repeat_heads(shared: Any, heads: int) -> Any:
    """Repeat the key or value heads of L K D H that query heads share: L N D H."""
    return array_namespace(shared).repeat(shared, heads // shared.shape[1], axis=1)


def _output(a: Named) -> Any:
    out = a[OUT]
    return array_namespace(out).reshape(out, (out.shape[0], out.shape[1] * out.shape[2], out.shape[3]))


QUERY, KEY, VALUE, OUT = (f"attention.{name}.kernel" for name in ("query", "key", "value", "out"))
WEIGHTS = {}  # of W_Q, W_K, W_V (L D N H) and W_O (L N H D), whole and per head
for _name, _path in (("query", QUERY), ("key", KEY), ("value", VALUE)):
    _w = f"W_{_name[0].upper()}"
    WEIGHTS[f"{_name}_weights"] = Measure(f"{_w}, D x N·H", (_path,), lambda a, p=_path: _join(a[p]))
    WEIGHTS[f"{_name}_weights_per_head"] = Measure(f"one head's {_w}, D x H", (_path,), lambda a, p=_path: _heads(a[p]))
WEIGHTS |= {
    "output_weights": Measure("W_O, N·H x D", (OUT,), _output),
    "output_weights_per_head": Measure("one head's rows of W_O, H x D", (OUT,)),
    "query_key_product": Measure("one head's W_Q W_Kᵀ, non-zero part, H x H of D x D", (QUERY, KEY), _query_key),
    "value_output_product": Measure("one head's W_V W_O, non-zero part, H x H of D x D", (VALUE, OUT), _value_output),
    "mlp_up_weights": Measure("the MLP's first matrix, D x F", ("mlp.up.kernel",)),
    "mlp_down_weights": Measure("the MLP's second matrix, F x D", ("mlp.down.kernel",)),
}
