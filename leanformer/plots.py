"""PNG plots of a run's records: loss, accuracy, learning rate."""

from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")  # a cluster node has no screen
from matplotlib import pyplot as plt


INK, SERIES = "#333333", ("#1f6f8b", "#d1603d", "#6a994e", "#7b5ea7")


def plot_run(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws loss.png, accuracy.png and lr.png into `folder`; a plot without data is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    accuracy = {"top1": "top-1", "top5": "top-5", "ema_top1": "top-1, averaged weights"}
    plans = [
        ("loss", "loss", {("train", "loss"): "training, augmented, smoothed targets", ("eval", "loss"): "evaluation"}),
        ("accuracy", "accuracy", {("eval", key): label for key, label in accuracy.items()}),
        ("lr", "learning rate", {("train", "lr"): "learning rate"}),
    ]
    return [path for name, label, keys in plans if (path := _draw(records, folder / f"{name}.png", label, keys))]


def _draw(records: list[dict[str, Any]], path: Path, label: str, keys: dict[tuple[str, str], str]) -> Path | None:
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    drawn = 0
    for color, ((kind, key), series) in zip(SERIES, keys.items(), strict=False):
        points = [(r["step"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
        if points:
            marker = "o" if kind == "eval" else None
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, lw=1.5, label=series)
            drawn += 1
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    if drawn > 1:
        axes.legend(frameon=False)
    if drawn:
        figure.savefig(path)
    plt.close(figure)
    return path if drawn else None
