"""Measured values as plain numbers and as tables for a terminal, with the Gaussian prediction."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from leanformer import text
from leanformer.conditioning.measures import ACTIVATIONS, WEIGHTS, measure
from leanformer.conditioning.spectrum import digest
from leanformer.conditioning.theory import gaussian


# Matrices whose rows sum to 1, and products of two matrices, do not resemble one with independent Gaussian entries.
UNLIKE_GAUSSIAN = ("attention_probabilities", "landmark_probabilities", "query_key_product", "value_output_product")
LEGEND = (
    "κ, the condition number, is the largest over the smallest singular value, 1 or more. Cells: median "
    "[10 %, 90 %] over the matrices of a layer; * marks a flag, listed below. Gaussian: exact distribution for a "
    "Gaussian matrix of this shape. Formula: its asymptote (√D + √N) / |√D - √N|; marked if over 10 % off. Singular: "
    "numerically singular in float32, or in the narrower type that stores it, so the condition number is a lower bound."
)


def gaussian_prediction(name: str, shape: Sequence[int]) -> dict[str, Any] | None:
    """Return the fields of `theory.Prediction` for a Gaussian matrix of a shape, ready for JSON; None if infinite.

    The result is None for softmax matrices and products of two weight matrices (UNLIKE_GAUSSIAN).
    """
    if name.rpartition(".")[2] in UNLIKE_GAUSSIAN:
        return None
    prediction = dataclasses.asdict(gaussian(*shape))
    ratio = prediction["formula"]
    return prediction | {"formula": None if math.isinf(ratio) else ratio, "shape": list(shape)}


def describe(measured: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray | list[np.ndarray]]]:
    """Return two dicts by measure: an entry of plain numbers, as in `probe.json`, and the singular values (L ... r).

    `measured` is the result of `measures.by_name`: pairs of `spectrum.with_spectrum` for matrices, else `Reading`. If
    layers have matrices of different shapes, `shape` and `theory` of an entry, and the singular values, are lists by
    layer.
    """
    entries, spectra, order = {}, {}, list(ACTIVATIONS | WEIGHTS)
    # A jitted function returns its dictionary sorted by name. Sort by stack, then in the order of the measures.
    for name in sorted(measured, key=lambda name: (name.rpartition(".")[0], order.index(name.rpartition(".")[2]))):
        values = measured[name]
        groups = values if isinstance(values, list) else [values]
        matrices = isinstance(groups[0], tuple)
        layers = digest([group[1] for group in groups] if matrices else values)
        counts = [layer["count"] for layer in layers]
        entries[name] = {
            "what": measure(name).what,
            "figure": "condition number" if matrices else "value",
            **_shapes_and_theory(name, [layer.get("shape") for layer in layers]),
            "matrices_per_layer": counts[0] if len({*counts}) == 1 else counts,
            "singular": sum(layer["singular"] for layer in layers) if matrices else None,
            "layers": layers,
        }
        if matrices:
            singular = [np.asarray(group[0]) for group in groups]
            spectra[name] = singular[0] if len(groups) == 1 else [layer for group in singular for layer in group]
    return entries, spectra


def _shapes_and_theory(name: str, shapes: Sequence[Any]) -> dict[str, Any]:
    """Return shape and Gaussian prediction of all layers, or lists of them by layer if their shapes differ."""
    predictions = {tuple(shape): gaussian_prediction(name, shape) for shape in shapes if shape}
    if len(predictions) <= 1:
        return {"shape": shapes[0], "theory": next(iter(predictions.values()), None)}
    return {"shape": list(shapes), "theory": [predictions[tuple(shape)] for shape in shapes]}


def from_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the measures in a probe's record of metrics.jsonl, {measure: {key: values by layer}}, for `charts`."""
    measures = {}
    for name, figures in values.items():
        layers = [dict(zip(figures, of_layer, strict=True)) for of_layer in zip(*figures.values(), strict=True)]
        measures[name] = {**_shapes_and_theory(name, figures.get("shape", [None])), "layers": layers}
    return measures


def format_table(entries: dict[str, Any]) -> str:
    """Format the entries of `describe` for a terminal: a row per layer, a column per measure and shape, and notes."""
    notes = "\n".join(text.wrap(line) for line in format_notes(entries))
    return f"{text.table(*layer_cells(entries), indent='')}\n\n{notes}\n"


def layer_cells(entries: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of `format_table`, as text; the first cell of a row is its name."""
    depth = max(len(entry["layers"]) for entry in entries.values())
    labels = ["", "quantity", "matrix", "per layer", *(f"layer {i}" for i in range(depth))]
    labels += ["Gaussian", "formula", "singular"]
    columns = [_column(name, part, depth) for name, entry in entries.items() for part in _split_shapes(entry)]
    head, *rows = [[label, *(column[i] for column in columns)] for i, label in enumerate(labels)]
    return head, rows


def format_notes(entries: Mapping[str, Any]) -> list[str]:
    """Return the lines below a table of measures: its legend, a description of each measure, and flags of layers."""
    return [LEGEND, *(f"{name}: {entry['what']}." for name, entry in entries.items()), *_flags(entries)]


def _split_shapes(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entry of a measure, or one for each shape of its matrices, in which layers of other shapes are None."""
    layers, theories = entry["layers"], entry["theory"]
    if not isinstance(theories, list):
        yield entry
        return
    for shape, theory in {tuple(layer["shape"]): x for layer, x in zip(layers, theories, strict=True)}.items():
        shown = [layer if tuple(layer["shape"]) == shape else None for layer in layers]
        counts = {"matrices_per_layer": [layer["count"] for layer in shown if layer]}
        singular = sum(layer["singular"] for layer in shown if layer)
        yield entry | counts | {"shape": shape, "theory": theory, "layers": shown, "singular": singular}


def _column(name: str, entry: dict[str, Any], depth: int) -> list[str]:
    shape, prediction, layers = entry["shape"], entry["theory"], entry["layers"]
    count = sum(layer["count"] for layer in layers if layer)
    several = entry["matrices_per_layer"]
    numbers = sorted({*several}) if isinstance(several, list) else [several]
    per_layer = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    head = [name, entry["figure"], f"{shape[0]} x {shape[1]}" if shape else "-", per_layer]
    cells = [format_quantiles(layer) + ("*" if layer["flags"] else "") if layer else "-" for layer in layers]
    cells += ["-"] * (depth - len(layers))  # stacks of one model may differ in depth
    theory = ["-", "-"]
    if prediction:
        formula = "infinite" if prediction["formula"] is None else f"{prediction['formula']:.3g}"
        theory = [format_quantiles(prediction), formula + " (>10 % off)" * prediction["inaccurate"]]
    return [*head, *cells, *theory, f"{entry['singular']} of {count}" if shape else "-"]


def format_quantiles(values: dict[str, Any]) -> str:
    """Format `median`, `q10` and `q90` as "median [q10, q90]", or the median alone if they round to the same."""
    if values["median"] is None:
        return "none finite"
    low, middle, high = (f"{values[key]:.3g}" for key in ("q10", "median", "q90"))
    return middle if low == high else f"{middle} [{low}, {high}]"


def _flags(entries: Mapping[str, Any]) -> list[str]:
    """Return one line per flag, with the layers that have it."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name, entry in entries.items():
        for i, layer in enumerate(entry["layers"]):
            for flag in layer["flags"]:
                layers.setdefault((name, flag), []).append(str(i))
    return [f"{name}, layer {', '.join(at)}: {flag}" for (name, flag), at in layers.items()]


def format_sweep(sweep: dict[str, Any]) -> str:
    """Format the result of `probing.sweep` for a terminal: a title, a table with one row per point, then flags."""
    points = sweep["points"]
    flags = [f"{p['trade']}, {p['heads']} heads: {flag}" for p in points for flag in p["pooled"]["flags"]]
    title = f"Condition number of {sweep['measure']} at initialisation, all layers, seeds {sweep['seeds']}"
    table = text.table(*sweep_cells(sweep), indent="")
    return "\n".join([text.wrap(title), table, *map(text.wrap, flags)]) + "\n"


def sweep_cells(sweep: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of `format_sweep`, as text."""
    head = ["trade", "heads", "head_dim", "matrix", "median [10 %, 90 %]", "medians of seeds", "effective rank"]
    rows = []
    for p in sweep["points"]:
        medians = " ".join("-" if value is None else f"{value:.3g}" for value in p["by_seed"])
        entry = {"figure": "", "matrices_per_layer": p["pooled"]["count"], "singular": p["pooled"]["singular"]}
        _, _, matrix, _, cell, *rest = _column("", entry | p | {"layers": [p["pooled"]]}, 1)
        rank = "-" if p["pooled"]["effective_rank"] is None else f"{p['pooled']['effective_rank']:.3g}"
        rows.append([p["trade"], str(p["heads"]), str(p["head_dim"]), matrix, cell, medians, rank, *rest])
    return [*head, "Gaussian", "formula", "singular"], rows
