"""PNG plots of a run: loss, accuracy, learning rate, other metrics, and confusion matrices. No display is needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leanformer.conditioning import charts, tables
from leanformer.quantities import find


NAMED_CLASSES, NUMBERED_CLASSES = 60, 20  # largest numbers of classes for names, and for numbers, in a matrix
TEXT_COLOR = "#333333"
# At least 3:1 on white; pages replace them in dark mode (style.css) by lighter ones, at least 3:1 on black.
SERIES = ("#1f6f8b", "#c2512f", "#4f7a37", "#7b5ea7", "#946c00", "#b0507f")


def plot_run(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the plots of a run to a folder, each as NAME.png, and return their paths.

    Args:
        records: lines of metrics.jsonl.
        folder: folder of the files, which is created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in make_run_plots(records).items():
        drawn.append(folder / f"{name}.png")
        figure.savefig(drawn[-1])
    return drawn


def make_run_plots(records: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Return the plots of a run by name; those without data are left out.

    The names are loss, accuracy, lr, the name of every other metric of evaluations, and conditioning (from probes).

    Args:
        records: lines of metrics.jsonl.
    """
    accuracy = {key: find(key).label for key in ("top1", "top5", "ema_top1")}
    train_loss = "training (augmented examples, smoothed targets)"
    plans = [
        ("loss", "loss", {("train", "loss"): train_loss, ("eval", "loss"): "evaluation"}),
        ("accuracy", "accuracy (%)", {("eval", key): label for key, label in accuracy.items()}),
        ("lr", "learning rate", {("train", "lr"): "learning rate"}),
    ]
    shown = {"step", "examples", "loss", "ema_loss", "ema_top5", *accuracy}
    numbers = (name for r in records if r["kind"] == "eval" for name, x in r.items() if isinstance(x, int | float))
    others = [name for name in dict.fromkeys(numbers) if name not in shown and not name.startswith("ema_")]
    series = {name: {("eval", key): find(key).label for key in (name, f"ema_{name}")} for name in others}
    plans += [(name, find(name).axis, keys) for name, keys in series.items()]
    figures = {name: _draw(records, label, keys) for name, label, keys in plans}
    figures["conditioning"] = _conditioning(records)
    return {name: figure for name, figure in figures.items() if figure is not None}


def probe_snapshots(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return {step: measures} of the probes of a run, in the format of `conditioning.tables.from_record`.

    Probes that lack a measure of the last probe are left out.

    Args:
        records: lines of metrics.jsonl.
    """
    measures = {record["step"]: measured_values(record) for record in records if record["kind"] == "probe"}
    return {
        step: tables.from_record(values)
        for step, values in measures.items()
        if values.keys() >= measures[max(measures)].keys()
    }


def measured_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measures in a probe's record (those entries that are dicts) by name, without step, kind and others."""
    return {name: values for name, values in record.items() if isinstance(values, dict)}


def _conditioning(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot condition numbers over training steps, one panel per measure that the last probe has."""
    snapshots = probe_snapshots(records)
    return charts.plot_over_steps([*snapshots], [*snapshots.values()]) if snapshots else None


def _draw(records: Sequence[Mapping[str, Any]], label: str, keys: dict[tuple[str, str], str]) -> Figure | None:
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes, drawn = style_axes(figure.subplots(), find("step").label, label), 0
    for color, ((kind, key), series) in zip(SERIES, keys.items(), strict=False):
        scale = find(key).scale
        points = [(r["step"], scale * r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
        if points:
            marker = "o" if kind == "eval" else None
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, lw=1.5, label=series)

            drawn += 1
    if drawn > 1:
        axes.legend(frameon=False)
    return figure if drawn else None


def literal(text: str) -> str:
    """Return a name such that Matplotlib draws it as it is: neither as a formula, nor hidden if it begins with "_"."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def style_axes(axes: Axes, x: str = "", y: str = "") -> Axes:
    """Label axes with `x` and `y`, draw a light grid, hide the frame at the top and right, and return the axes."""
    axes.set_xlabel(x, color=TEXT_COLOR)
    axes.set_ylabel(y, color=TEXT_COLOR)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    return axes


def plot_confusion(matrix: np.ndarray, classes: Sequence[str], path: Path, title: str) -> None:
    """Write a plot of a confusion matrix to a PNG file, whose folder must exist.

    Args:
        matrix: counts V V: rows are labels, columns predictions.
        classes: names of the V classes.
        path: path of the file.
        title: title of the plot.
    """
    make_confusion_plot(matrix, classes, title).savefig(path)


def make_confusion_plot(matrix: np.ndarray, classes: Sequence[str], title: str) -> Figure:
    """Return a plot of a confusion matrix, counts V V (labels x predictions), in percent of each label's examples.

    Names are drawn for up to NAMED_CLASSES classes, and numbers for up to NUMBERED_CLASSES.
    """
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
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=6)
            axes.texts[-1].set_color("white" if share > 50 else TEXT_COLOR)
    return figure
