"""Named measures of conditioning, over the arrays that a tap sees and over weights.

Every measure states its matrix as rows x columns, with the axes of `layers.attention`, without biases. A block passes
`q` and `k` to a tap only if its attention is softmax(Q Kᵀ / √H) over tokens, so that a name has one meaning in every
architecture. Rows of padding are zero; the singular values that they add do not count.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from array_api_compat import array_namespace, is_jax_array

from leanformer.conditioning import attention_matrix
from leanformer.conditioning.attention_matrix import Named, cast, heads_first, product, repeat_heads
from leanformer.conditioning.spectrum import (
    Reading,
    Summary,
    condition,
    observed,
    singular_values,
    summarise,
    unit_roundoff,
    with_spectrum,
)
from leanformer.errors import ConfigError


TOKEN_ROWS = {"out", "tokens", "attention", "middle", "block", "hidden"}  # arrays with a row per token


@dataclasses.dataclass(frozen=True)
class Measure:
    """Definition of a named measure of a block."""

    what: str  # sentence about the value, or the matrix, as rows x columns
    needs: tuple[str, ...]  # names of the arrays that it is computed from
    # function from these arrays, by name, to a batch of matrices or a `Reading`; None for a single array of matrices
    take: Callable[[Named], Any] | None = None
    whole: bool = False  # True: only for sequences without padding, whose columns would add singular values of zero
    logits: bool = False  # True: logits of another library can take the place of queries and keys


def tap(names: Iterable[str], reduce: Callable[[Any], Any] = condition) -> Callable[[Named], dict[str, Any]]:
    """Return a function for a model's argument `tap`, which computes activation measures inside each layer.

    It has no effect on outputs or gradients. It takes a block's arrays (`blocks.Block`) and returns {name: Summary or
    Reading} with leading axis B, followed by N for values per head. `Stack` puts L in front, and returns a list for
    groups of unequal layers. A measure is left out if the block lacks an array that it needs; `by_name` raises for a
    measure that no block has.

    Args:
        names: names of measures in ACTIVATIONS. Raises ConfigError for others.
        reduce: function of a batch of matrices; `singular_values` gives spectra instead of summaries. Only `condition`
            and `with_spectrum` leave out the singular values of padding.
    """
    measures = look_up(names, ACTIVATIONS)
    return lambda arrays: apply(measures, observed(dict(arrays)), reduce)


def by_name(stacks: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the requested measures by name, from taps of a model or the result of `weights`.

    `stacks` is {stack: {measure: values}}, or a list of such dictionaries for a stack with several groups of equal
    layers, whose values stay lists. With several stacks the names are "stack.measure"; a measure is left out for a
    stack that lacks it. Raises ConfigError if a name is unknown, or a measure applies to no block of the model.
    """
    names = tuple(names)
    known = look_up(names, ACTIVATIONS | WEIGHTS)
    by_stack = {
        stack: {name: [group[name] for group in measures] for name in measures[0]}
        if isinstance(measures, list)
        else measures
        for stack, measures in stacks.items()
    }
    for name in names:
        if not any(name in measures for measures in by_stack.values()):
            needs = ", ".join(known[name].needs) + " of sequences without padding" * known[name].whole
            raise ConfigError(f"Measure {name!r} does not apply to this model: no block has {needs}. Leave it out.")
    return {
        name if len(stacks) == 1 else f"{stack}.{name}": measures[name]
        for stack, measures in by_stack.items()
        for name in names
        if name in measures
    }


def measure(name: str) -> Measure:
    """Return the definition of a measure of ACTIVATIONS or WEIGHTS by its name, as "measure" or "stack.measure".

    Raises KeyError for an unknown name.

    >>> measure("attention_output").needs
    ('out',)
    """
    return (ACTIVATIONS | WEIGHTS)[name.rpartition(".")[2]]


def weights(stacks: Mapping[str, Any], names: Iterable[str], reduce: Callable[[Any], Any] = condition) -> Any:
    """Return weight measures of a model's stacked blocks, for `by_name`: {stack: {name: Summary}}.

    A summary has a leading axis L, followed by N for matrices per head. A measure whose matrix a block lacks is left
    out.

    Args:
        stacks: nested arrays of each stack's block by the stack's name, from `model.measured()`: its `attention`, and
            its `mlp` if it has one, with leading axis L. For groups of unequal layers, this and the result are lists.
        names: names of measures in WEIGHTS. Raises ConfigError for others.
        reduce: function of a batch of matrices, as for `tap`.
    """
    measures = look_up(names, WEIGHTS)

    def of_blocks(blocks: Any) -> Any:
        if isinstance(blocks, list):
            return [of_blocks(group) for group in blocks]
        return apply(measures, _flatten(blocks), reduce)

    return {stack: of_blocks(blocks) for stack, blocks in stacks.items()}


def block_jacobian(function: Callable[[Any, Any], Any], blocks: Any, examples: Any) -> Summary:
    """Return condition numbers of each block's Jacobian J, (B·V) x P: rows are outputs of examples, columns parameters.

    Its squared singular values are the eigenvalues of the empirical neural tangent kernel restricted to one block
    (Jacot et al. 2018). They come from J itself, since the kernel J Jᵀ would square the condition number. The summary
    has the axis L.

    Cost: B·V backward passes, V at a time, and B·V times the parameters of all blocks in memory, briefly twice that (8
    losses of a 12-layer ViT-B: 2.7 GB). Then a QR per parameter array, 2 (B·V)² flops per parameter. Float32 resolves
    about min(B·V, P) directions if the examples differ: equal examples make J singular.

    Args:
        function: function (blocks, example) -> loss of the example, shape () with V = 1, or its outputs (V,).
        blocks: parameters of the stacked blocks, leading axis L on every leaf.
        examples: pytree of examples with leading axis B.
    """
    import jax
    import jax.numpy as jnp

    def rows(example: Any) -> Any:
        return jax.jacrev(lambda b: jnp.atleast_1d(function(b, example)).astype(jnp.float32))(blocks)

    def reduced(leaf: Any) -> Any:
        """Return the R factor, L R B·V, of a leaf B V L ..."""
        by_layer = jnp.moveaxis(leaf, 2, 0).astype(jnp.float32)  # L B V ...
        transposed = by_layer.reshape(by_layer.shape[0], leaf.shape[0] * leaf.shape[1], -1).mT  # L P B·V
        with jax.enable_x64(True):  # float64, as in singular_values
            return jnp.linalg.qr(transposed.astype(jnp.float64), mode="r").astype(jnp.float32)

    leaves = jax.tree.leaves(jax.lax.map(rows, examples))
    count = sum(leaf[0, 0, 0].size for leaf in leaves)
    # QR of each leaf, then of the stacked factors, has the singular values of all columns concatenated.
    factors = jnp.concatenate([reduced(leaf) for leaf in leaves], axis=-2)
    return summarise(singular_values(factors), (leaves[0].shape[0] * leaves[0].shape[1], count))


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


def apply(
    measures: Mapping[str, Measure], arrays: Named, reduce: Callable[[Any], Any] = condition, dtype: Any = None
) -> dict[str, Any]:
    """Return the measures of a block's arrays by name, without those whose arrays are missing.

    `dtype` is the type that stored the arrays, if it is not their own.
    """
    values, mask = {}, arrays.get("mask")
    context = {"mask": mask, "soft_cap": arrays.get("soft_cap")}
    padded = mask is not None and (mask.lengths is not None or mask.keep is not None)
    for name, spec in measures.items():
        needs = ("logits",) if spec.logits and "logits" in arrays else spec.needs
        if not all(need in arrays for need in needs) or (spec.whole and padded):
            continue
        with _exact(arrays[needs[0]]):
            stored = max((dtype or arrays[need].dtype for need in needs), key=unit_roundoff)
            needed = {need: cast(arrays[need], "float32") for need in needs}
            result = spec.take(needed | context) if spec.take else needed[needs[0]]
            if not isinstance(result, Reading):
                shown = mask if padded and TOKEN_ROWS.issuperset(spec.needs) else None
                result = _reduce(result, reduce, shown, stored)
            values[name] = result
    return values


def _exact(x: Any) -> Any:
    """Return a context in which JAX on a GPU does not multiply float32 matrices with ten bits of mantissa."""
    if not is_jax_array(x):
        return contextlib.nullcontext()
    import jax

    return jax.default_matmul_precision("highest")


def _reduce(x: Any, reduce: Callable[[Any], Any], mask: Any, dtype: Any) -> Any:
    """Reduce matrices (B ... T D), where `reduce` can do so by their dtype and without padding's singular values."""
    if reduce not in (condition, with_spectrum):
        return reduce(x)
    xp, rows = array_namespace(x), None
    if mask is not None and (valid := mask.valid_tokens(x.shape[-2])) is not None:
        rows = xp.reshape(xp.sum(xp.astype(valid, xp.int32), axis=1), (-1, *(1,) * (x.ndim - 3)))
    spectrum, summary = with_spectrum(x, rows, dtype)
    return summary if reduce is condition else (spectrum, summary)


def _join(out: Any) -> Any:
    """Return ... T N·H of ... T N H."""
    return array_namespace(out).reshape(out, (*out.shape[:-2], out.shape[-2] * out.shape[-1]))


def _of_logits(what: str, take: Callable[[Named], Any], *, whole: bool = False) -> Measure:
    return Measure(what, ("q", "k"), take, whole=whole, logits=True)


ACTIVATIONS = {
    "attention_output": Measure(
        "heads concatenated, before the output projection, T x N·H (Leaner Transformers, Definition 3.1, Figure 2)",
        ("out",),
        lambda a: _join(a["out"]),
    ),
    "head_output": Measure("one head's output, T x H", ("out",), lambda a: heads_first(a["out"])),
    "attention_probabilities": _of_logits(
        "one head's softmax matrix, T x S, of sequences without padding", attention_matrix.probabilities, whole=True
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
    "head_correlation": Measure(
        "mean linear CKA over pairs of heads' outputs, 0 to 1", ("out",), attention_matrix.head_correlation
    ),
    "attention_entropy": _of_logits(
        "one head's entropy, mean over query tokens, nats, 0 to the log of the keys seen", attention_matrix.entropy
    ),
    "relative_attention_entropy": _of_logits(
        "one head's entropy over the log of the keys seen, mean over query tokens that see two or more, 0 to 1",
        attention_matrix.relative_entropy,
    ),
    "largest_logit": _of_logits(
        "one head's largest logit, scaled and soft-capped, of keys that are seen", attention_matrix.largest_logit
    ),
    "self_weight": _of_logits(
        "one head's probability of each token itself, mean over tokens", attention_matrix.self_weight
    ),
    "attention_distance": _of_logits(
        "one head's distance from a token to those it attends to, in tokens, weighted by attention, mean over tokens",
        attention_matrix.distance,
    ),
    "logit_spectral_entropy": Measure(
        "entropy of σ² / Σσ² of one head's logits Q Kᵀ before the mask, keys centred, T x S, nats (arXiv 2606.28116)",
        ("q", "k"),
        attention_matrix.logit_entropy,
        whole=True,
    ),
    "logit_components": Measure(
        "singular components that hold 90 % of Σσ² of the same logits (arXiv 2604.04384)",
        ("q", "k"),
        attention_matrix.logit_components,
        whole=True,
    ),
    "landmark_probabilities": Measure(
        "Nyström attention's softmax matrix F of landmarks and landmarks, one head, M x M", ("landmark_probabilities",)
    ),
    "pseudo_inverse_residual": Measure(
        "what its iteration left undone, ‖F Z F − F‖ / ‖F‖ (Frobenius), one head; 0 for a pseudo-inverse Z",
        ("landmark_probabilities", "pseudo_inverse"),
        attention_matrix.pseudo_inverse_residual,
    ),
}

QUERY, KEY, VALUE, OUT = (f"attention.{name}.kernel" for name in ("query", "key", "value", "out"))


def _query_key(a: Named) -> Any:
    query, key = heads_first(a[QUERY]), heads_first(a[KEY])
    return product(query, repeat_heads(key, query.shape[1]))


def _value_output(a: Named) -> Any:
    value, out = heads_first(a[VALUE]), a[OUT]
    return product(repeat_heads(value, out.shape[1]), array_namespace(out).matrix_transpose(out))


def _output(a: Named) -> Any:
    out = a[OUT]
    return array_namespace(out).reshape(out, (out.shape[0], out.shape[1] * out.shape[2], out.shape[3]))


WEIGHTS = {}  # of W_Q, W_K, W_V (L D N H) and W_O (L N H D), whole and per head
for _name, _path in (("query", QUERY), ("key", KEY), ("value", VALUE)):
    _w = f"W_{_name[0].upper()}"
    WEIGHTS[f"{_name}_weights"] = Measure(f"{_w}, D x N·H", (_path,), lambda a, p=_path: _join(a[p]))
    WEIGHTS[f"{_name}_weights_per_head"] = Measure(
        f"one head's {_w}, D x H", (_path,), lambda a, p=_path: heads_first(a[p])
    )
WEIGHTS |= {
    "output_weights": Measure("W_O, N·H x D", (OUT,), _output),
    "output_weights_per_head": Measure("one head's rows of W_O, H x D", (OUT,)),
    "query_key_product": Measure("one head's W_Q W_Kᵀ, non-zero part, H x H of D x D", (QUERY, KEY), _query_key),
    "value_output_product": Measure("one head's W_V W_O, non-zero part, H x H of D x D", (VALUE, OUT), _value_output),
    "mlp_up_weights": Measure("the MLP's first matrix, D x F", ("mlp.up.kernel",)),
    "mlp_down_weights": Measure("the MLP's second matrix, F x D", ("mlp.down.kernel",)),
}
