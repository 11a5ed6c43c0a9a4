"""Plot for the front page, from experiments/evidence/quickstart.csv.

Question: does accuracy change with the number of heads at equal parameters?
Command: python -m experiments.front_picture
2026-11-23: at both budgets the test error falls with the number of heads, and is lowest at 16 or 32.
"""

import collections
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


HERE = Path(__file__).parent
DATA, OUT = HERE / "evidence" / "quickstart.csv", HERE.parent / "docs" / "heads.png"


def read_errors(budget: float) -> dict[int, dict[int, list[float]]]:
    """Return the top-1 errors in percent of the models of a parameter budget, by depth and number of heads."""
    result: dict[int, dict[int, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    with DATA.open() as file:
        for row in csv.DictReader(file):
            if float(row["budget"]) == budget:
                result[int(row["depth"])][int(row["num_heads"])].append(100 * (1 - float(row["top1"])))
    return result


def draw() -> None:
    """Write the plot."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    for axes, budget in zip(panels, (120_000.0, 270_000.0), strict=True):
        by_depth = read_errors(budget)
        colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(by_depth)))
        for (depth, by_heads), colour in zip(sorted(by_depth.items()), colours, strict=True):
            heads = sorted(by_heads)
            means = [np.mean(by_heads[n]) for n in heads]
            spread = [np.std(by_heads[n]) for n in heads]
            axes.errorbar(heads, means, yerr=spread, color=colour, marker="o", markersize=4, linestyle="none")
            axes.plot([], [], color=colour, marker="o", linestyle="none", label=f"{depth} layers")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axes.set_xlabel("heads")
        axes.set_title(f"{budget:,.0f} parameters", fontsize=11)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, frameon=False)
    panels[0].set_ylabel("test error, %")
    figure.savefig(OUT, dpi=150)


if __name__ == "__main__":
    draw()
