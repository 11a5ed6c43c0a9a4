"""PNG plots of a run: loss, accuracy, learning rate, other metrics, and confusion matrices. No display is needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leanformer.text import lookup


NAMED_CLASSES, NUMBERED_CLASSES = 60, 20  # largest numbers of classes for names, and for numbers, in a matrix
TEXT_COLOR = "#333333"
# At least 3:1 on white; page.html replaces them in dark mode by lighter ones, at least 3:1 on black.
SERIES = ("#1f6f8b", "#c2512f", "#4f7a37", "#7b5ea7", "#946c00", "#b0507f")


def plot_run(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the plots for which the lines of metrics.jsonl have data to a folder, and return their paths."""
    accuracy = {key: lookup(key).label for key in ("top1", "top5", "ema_top1")}
    train_loss = "training (augmented examples, smoothed targets)"
    plans = {
        "loss": ("loss", {("train", "loss"): train_loss, ("eval", "loss"): "evaluation"}),
        "accuracy": ("accuracy (%)", {("eval", key): label for key, label in accuracy.items()}),
        "lr": ("learning rate", {("train", "lr"): "learning rate"}),
    }
    shown = {"step", "examples", "loss", *accuracy}
    metrics = (name for r in records if r["kind"] == "eval" for name, x in r.items() if isinstance(x, int | float))
    for name in dict.fromkeys(metrics):
        if name not in shown and not name.startswith("ema_"):
            plans[name] = (lookup(name).axis, {("eval", key): lookup(key).label for key in (name, f"ema_{name}")})
    figures = {name: _draw(records, label, keys) for name, (label, keys) in plans.items()}
    figures["conditioning"] = _conditioning(records)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {folder / f"{name}.png": figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        figure.savefig(path)
    return [*drawn]


def _conditioning(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot condition numbers over training steps, of the probes that have all measures of the last one."""
    probes = {
        record["step"]: {name: values for name, values in record.items() if isinstance(values, dict)}
        for record in records
        if record["kind"] == "probe"
    }
    if not probes:
        return None
    from leanformer.conditioning import charts, tables  # a run without probes does not need them

    last = probes[max(probes)].keys()
    snapshots = {step: tables.from_record(values) for step, values in probes.items() if values.keys() >= last}
    return charts.plot_over_steps([*snapshots], [*snapshots.values()])


def _draw(records: Sequence[Mapping[str, Any]], label: str, keys: Mapping[tuple[str, str], str]) -> Figure | None:
    figure, axes = make_axes(6.4, 4.0, lookup("step").label, label)
    for color, ((kind, key), series) in zip(SERIES, keys.items(), strict=False):
        scale = lookup(key).scale
        points = [(r["step"], scale * r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
        if points:
            marker = "o" if kind == "eval" else None
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, lw=1.5, label=series)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    return figure if axes.lines else None


def literal(text: str) -> str:
    """Return a name such that Matplotlib draws it as it is: neither as a formula, nor hidden if it begins with "_"."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def make_axes(width: float, height: float, x: str, y: str = "") -> tuple[Figure, Axes]:
    """Return a new figure of this size in inches, and its axes, labelled and with a light grid."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x, color=TEXT_COLOR)
    axes.set_ylabel(y, color=TEXT_COLOR)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    return figure, axes


def plot_confusion(matrix: np.ndarray, classes: Sequence[str], path: Path, title: str) -> None:
    """Write a PNG of a confusion matrix, counts V V (labels x predictions), in percent of each label's examples."""
    totals = matrix.sum(axis=1, keepdims=True)
    shares = 100 * np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)
    number = len(classes)
    side = min(12.0, 3.0 + 0.36 * number)
    figure = Figure(figsize=(side + 1, side), dpi=150, layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(shares, vmin=0, vmax=100, cmap="Blues", interpolation="nearest")
    figure.colorbar(picture, ax=axes, shrink=0.8, label="% of the label's examples")
    axes.set(xlabel="prediction", ylabel="label")
    axes.set_title(literal(title), fontsize=10, color=TEXT_COLOR)
    if number <= NAMED_CLASSES:
        names = [*map(literal, classes)]
        axes.set_xticks(range(number), names, rotation=90, fontsize=7)
        axes.set_yticks(range(number), names, fontsize=7)
    for (row, column), share in np.ndenumerate(shares) if number <= NUMBERED_CLASSES else ():
        if matrix[row, column]:
            color = "white" if share > 50 else TEXT_COLOR
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=6, color=color)
    figure.savefig(path)
