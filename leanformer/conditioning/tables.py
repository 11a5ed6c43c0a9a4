"""What was measured as plain numbers and as tables for a terminal, the Gaussian prediction beside it.

Cells are median [10 %, 90 %] over the matrices of a layer; shape and number of singular ones stand in every column.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.conditioning.measures import ACTIVATIONS, WEIGHTS, measure
from leanformer.conditioning.spectrum import digest
from leanformer.conditioning.theory import gaussian


# Rows that sum to 1, and products of two matrices, are nothing like one matrix of independent Gaussian entries.
UNLIKE_GAUSSIAN = (
    "attention_probabilities",
    "landmark_probabilities",
    "query_key_product",
    "value_output_product",
)
LINE = 120  # characters of a table
LEGEND = (
    "Cells: median [10 %, 90 %] over a layer's matrices; * is flagged below. Gaussian: the exact law for that shape.\n"
    "Formula: (√D + √N) / |√D - √N|; (breaks) where it is over 10 % from the Gaussian median."
)


def theory(name: str, shape: Sequence[int]) -> dict[str, Any] | None:
    """The prediction for a Gaussian matrix of this shape, ready for JSON; None for a measure that is unlike one."""
    if name.rpartition(".")[2] in UNLIKE_GAUSSIAN:
        return None
    found = dataclasses.asdict(gaussian(*shape))
    infinite = math.isinf(found["formula"])
    return found | {"formula": None if infinite else found["formula"], "shape": list(shape)}


def describe(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a reader found, by measure: plain numbers, and the singular values (L ... r) of those that have some."""
    entries, spectra, order = {}, {}, list(ACTIVATIONS | WEIGHTS)
    # A jitted function gives its dictionary sorted by name; here by stack, then as the measures are listed.
    for name in sorted(found, key=lambda name: (name.rpartition(".")[0], order.index(name.rpartition(".")[2]))):
        values = found[name]
        matrices = isinstance(values, tuple)
        layers = digest(values[1] if matrices else values)
        shape = layers[0].get("shape")
        entries[name] = {
            "what": measure(name).what,
            "figure": "condition number" if matrices else "value",
            "shape": shape,
            "matrices_per_layer": layers[0]["count"],
            "singular": sum(layer["singular"] for layer in layers) if matrices else None,
            "theory": theory(name, shape) if matrices else None,
            "layers": layers,
        }
        if matrices:
            spectra[name] = np.asarray(values[0])
    return entries, spectra


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The measures of a probe's record as `charts` takes them. Of a record from before shapes were written down nothing
    is known to be a condition number."""
    found = {}
    for name, figures in values.items():
        shape = figures.get("shape", [None])[0]
        layers = [dict(zip(figures, of_layer, strict=True)) for of_layer in zip(*figures.values(), strict=True)]
        found[name] = {"shape": shape, "theory": shape and theory(name, shape), "layers": layers}
    return found


def table(entries: dict[str, Any]) -> str:
    """Layers by measures for a terminal, the Gaussian prediction under each column, and flags under all of it."""
    depth = max(len(entry["layers"]) for entry in entries.values())
    labels = ["", "figure", "matrix", "a layer", *(f"layer {i}" for i in range(depth))]
    labels += ["Gaussian", "its formula", "singular"]
    columns = [_column(name, entry, depth) for name, entry in entries.items()]
    margin, widths = max(map(len, labels)), [max(map(len, column)) for column in columns]
    blocks, begin = [], 0
    while begin < len(columns):
        end = begin + 1
        while end < len(columns) and margin + sum(w + 2 for w in widths[begin : end + 1]) <= LINE:
            end += 1
        shown = list(zip(columns[begin:end], widths[begin:end], strict=True))
        rows = [
            "  ".join([f"{label:<{margin}}", *(f"{c[i]:>{w}}" for c, w in shown)]) for i, label in enumerate(labels)
        ]
        blocks.append("\n".join(rows))
        begin = end
    return "\n\n".join([*blocks, "\n".join([LEGEND, *_flags(entries)])]) + "\n"


def _column(name: str, entry: dict[str, Any], depth: int) -> list[str]:
    shape, said, layers = entry["shape"], entry["theory"], entry["layers"]
    count = sum(layer["count"] for layer in layers)
    formula = "infinite" if said and said["formula"] is None else said and f"{said['formula']:.3g}"
    head = [name, entry["figure"], f"{shape[0]} x {shape[1]}" if shape else "-", str(entry["matrices_per_layer"])]
    cells = [quantiles(layer) + ("*" if layer["flags"] else "") for layer in layers]
    cells += ["-"] * (depth - len(layers))  # stacks of a model may differ in depth
    breaks = " (breaks)" if said and said["breaks"] else ""
    singular = f"{entry['singular']} of {count}" if shape else "-"
    return [*head, *cells, quantiles(said) if said else "-", f"{formula}{breaks}" if said else "-", singular]


def quantiles(found: dict[str, Any]) -> str:
    """median [q10, q90], the median alone where there is nothing to spread."""
    if found["median"] is None:
        return "none finite"
    low, middle, high = (f"{found[key]:.3g}" for key in ("q10", "median", "q90"))
    return middle if low == high else f"{middle} [{low}, {high}]"


def _flags(entries: dict[str, Any]) -> list[str]:
    """One line for each sentence, with the layers that it is true of."""
    said: dict[tuple[str, str], list[str]] = {}
    for name, entry in entries.items():
        for i, layer in enumerate(entry["layers"]):
            for flag in layer["flags"]:
                said.setdefault((name, flag), []).append(str(i))
    return [f"{name}, layer {', '.join(at)}: {flag}" for (name, flag), at in said.items()]


def sweep_table(found: dict[str, Any]) -> str:
    """Rows of a sweep for a terminal."""
    titles = ("trade", "heads", "head width", "matrix", "median [10 %, 90 %]", "medians of seeds", "effective rank")
    rows, flags = [(*titles, "Gaussian", "its formula", "singular")], []
    for p in found["points"]:
        medians = " ".join("-" if value is None else f"{value:.3g}" for value in p["by_seed"])
        entry = {"figure": "", "matrices_per_layer": p["pooled"]["count"], "singular": p["pooled"]["singular"]}
        _, _, matrix, _, cell, *rest = _column("", entry | p | {"layers": [p["pooled"]]}, 1)
        rank = "-" if p["pooled"]["effective_rank"] is None else f"{p['pooled']['effective_rank']:.3g}"
        rows.append((p["trade"], str(p["heads"]), str(p["head_dim"]), matrix, cell, medians, rank, *rest))
        flags += [f"{p['trade']}, {p['heads']} heads: {flag}" for flag in p["pooled"]["flags"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"Condition number of {found['measure']} {found['when']}, all layers, seeds {found['seeds']}"
    return "\n".join([title, *lines, *flags]) + "\n"
