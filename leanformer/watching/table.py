"""Rows of a watch as a table for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


HEAD = (
    *("layer", "heads x dim", "measure", "matrix", "median [10 %, 90 %]", "Gaussian", "reference"),
    *("stable", "effective", "n"),
)
LEGEND = (
    "Median [10 %, 90 %] of the condition number over examples (and heads: head_output), or of the entropy and the\n"
    "largest logit. ≥: a lower bound. Gaussian: median for a Gaussian matrix of this shape. stable, effective: median\n"
    "ranks. n: examples."
)


def format_value(row: Mapping[str, Any], key: str) -> str:
    """Return a quantile of a row as text with three digits, with ≥ in front of a lower bound; "-" if it is None.

    Args:
        row: row of `Watch.rows`.
        key: "median", "q10" or "q90".
    """
    if row[key] is None:
        return "-"
    return ("≥" if key in row["bounds"] else "") + f"{row[key]:.3g}"


def format_table(rows: Sequence[Mapping[str, Any]], unmatched: Mapping[str, str]) -> str:
    """Return rows of all heads together as a table of text, one line each, then statuses, and what was not matched.

    Args:
        rows: rows of `Watch.rows`; those of single heads are left out.
        unmatched: reasons by the name of a module or tensor.
    """
    lines: list[tuple[str, ...]] = [HEAD]
    statuses: dict[str, dict[str, list[str]]] = {}  # sentence: measure: layers
    for row in rows:
        if row["head"] is not None:
            continue
        for sentence in row["status"].split("; ") if row["status"] != "ok" else ():
            statuses.setdefault(sentence, {}).setdefault(row["measure"] or "", []).append(row["layer"])
        if row["measure"] is None:
            continue
        low, middle, high = (format_value(row, key) for key in ("q10", "median", "q90"))
        lines.append(
            (
                row["layer"],
                f"{row['heads'] or '?'} x {row['head_dim'] or '?'}",
                row["measure"],
                _format_shape(row),
                middle if low == middle == high else f"{middle} [{low}, {high}]",
                *(f"{row[key]['median']:.3g}" if row[key] else "-" for key in ("gaussian", "reference")),
                *("-" if row[key] is None else f"{row[key]:.3g}" for key in ("stable_rank", "effective_rank")),
                str(row["examples"]),
            )
        )
    if not any(row["reference"] for row in rows):
        lines = [(*line[:6], *line[7:]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += ["", LEGEND] if len(lines) > 1 else []
    text += [f"{_format_places(places)}: {sentence}" for sentence, places in statuses.items()]
    text += [f"Not matched: {name}: {reason}" for name, reason in unmatched.items()]
    return "\n".join(text)


def _format_shape(row: Mapping[str, Any]) -> str:
    if not row["shape"]:
        return "-"
    low, high = row["tokens"]
    return f"{low if low == high else f'{low}-{high}'} x {row['shape'][1]}"


def _format_places(places: Mapping[str, Sequence[str]]) -> str:
    """Return the layers of a sentence, with the measures if it is not about all of them."""
    layers = list(dict.fromkeys(layer for names in places.values() for layer in names))
    what = layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
    measures = [name for name in places if name]
    return what if len(measures) != 1 else f"{what}, {measures[0]}"
