"""The picture on the front page, from the data in experiments/evidence.

Question: do more heads help, and does conditioning tell?
Command: python -m experiments.front_picture
2026-11-24: more heads condition the attention output better in both trades, where theory predicts it for one (left). At
equal parameters the error falls with heads (middle). The two diagnostic tasks disagree on the number of heads (right).
"""

import collections
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from experiments.published import read
from leanformer import conditioning


DOCS = Path(__file__).parents[1] / "docs"
TOKENS = 17  # of the quickstart, with the class token
DARK = {"figure.facecolor": "#131416", "axes.facecolor": "#131416", "savefig.facecolor": "#131416"}
DARK |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#d0d3d9")
FIRST, SECOND = "#2b8cbe", "#e6802c"  # readable on white and on black


def draw_conditioning(axes: Axes) -> None:
    """Plot the condition number after training against heads, for both trades, with the Gaussian predictions."""
    values: dict[str, dict[tuple[int, int], list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for row in read("heads"):
        shape = int(row["num_heads"]), int(row["head_dim"])
        values[row["trade"]][shape].append(np.log10(float(row["condition_end"])))
    places = {"fixed head dimension": (FIRST, (4, 9000)), "fixed total width": (SECOND, (2.1, 900))}
    for trade, (color, place) in places.items():
        shapes = sorted(values[trade])
        heads, means = [n for n, _ in shapes], [10 ** np.mean(values[trade][shape]) for shape in shapes]
        axes.plot(heads, means, "o-", color=color, markersize=4)
        axes.annotate(trade, place, color=color)
        expected = [conditioning.gaussian(TOKENS, n * h).median for n, h in shapes]
        axes.plot(heads, expected, "--", color=color, linewidth=1)
    axes.annotate("Gaussian prediction (dashed)", (4, 6))
    axes.set(xscale="log", yscale="log", xlabel="heads", ylabel="condition number of the head outputs")
    axes.set_title("Conditioning after training", fontsize=10)
    axes.set_xticks(heads, [str(n) for n in heads])
    axes.minorticks_off()


def draw_budgets(axes: Axes) -> None:
    """Plot the test error of ViTs of equal parameters against heads: a dot per model, a line of means per budget."""
    models: dict[tuple[float, int, int, int], list[float]] = collections.defaultdict(list)
    for row in read("quickstart"):
        key = float(row["budget"]), int(row["num_heads"]), int(row["depth"]), int(row["head_dim"])
        models[key].append(100 * (1 - float(row["top1"])))
    for budget, color, place in ((120_000.0, FIRST, (5, 25.5)), (270_000.0, SECOND, (1, 19.5))):
        by_heads: dict[int, list[float]] = collections.defaultdict(list)
        for (other, heads, *_), errors in models.items():
            if other == budget:
                by_heads[heads].append(float(np.mean(errors)))
        heads = sorted(by_heads)
        for n in heads:
            axes.plot([n] * len(by_heads[n]), by_heads[n], "o", color=color, markersize=3, alpha=0.5)
        means = [np.mean(by_heads[n]) for n in heads]
        axes.plot(heads, means, "-", color=color)
        axes.annotate(f"{budget:,.0f} parameters", place, color=color)
    axes.set(xlabel="heads", ylabel="test error, %")
    axes.set_xscale("log", base=2)
    axes.set_title("40 ViTs at equal parameters", fontsize=10)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])


def draw_tasks(axes: Axes) -> None:
    """Plot the errors on two diagnostic tasks against heads at one total width."""
    for task, color, place in (("nearest neighbour", FIRST, (3, 0.83)), ("retrieval", SECOND, (3.4, 0.64))):
        rows = [row for row in read("diagnostic_tasks") if row["task"] == task]
        heads = [int(row["num_heads"]) for row in rows]
        error, low, high = (np.array([float(row[name]) for row in rows]) for name in ("error", "low", "high"))
        axes.errorbar(heads, error, yerr=(error - low, high - error), fmt="o-", color=color, markersize=4, capsize=2)
        axes.annotate(task, place, color=color)
    axes.set(xscale="log", xlabel="heads at total width 48", ylabel="error (predicting zero = 1)", ylim=(0, 1))
    axes.set_title("Two diagnostic tasks", fontsize=10)
    axes.set_xticks(heads, [str(n) for n in heads])
    axes.minorticks_off()


def main() -> None:
    """Write docs/front.png and docs/front_dark.png."""
    for name, style in (("front", {}), ("front_dark", DARK)):
        with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, **style}):
            figure, panels = plt.subplots(1, 3, figsize=(10.67, 3.2), layout="constrained")
            for axes, draw in zip(panels, (draw_conditioning, draw_budgets, draw_tasks), strict=True):
                draw(axes)
            figure.savefig(DOCS / f"{name}.png", dpi=150)
            plt.close(figure)


if __name__ == "__main__":
    main()
