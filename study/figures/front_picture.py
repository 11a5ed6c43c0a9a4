"""The picture on the front page, and the plots of index, findings and results, from the data in study/data.

Question: do more heads help, and does conditioning tell?
Command: python -m study.figures.front_picture
2026-11-28: narrow heads learn later and catch up (left). More heads condition the attention output better in both
trades, where theory predicts it for one (middle). The two diagnostic tasks disagree on the number of heads (right).
Bars and bands are 95 % intervals.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from leanformer import conditioning
from leanformer.analysis import statistics
from study import tables
from study.figures import conditioning as figures
from study.heads import curves, mechanism, verdicts
from study.heads.causes import HEADS, INTERVENTIONS
from study.heads.heads import TOKENS
from study.heads.language import read_rows
from study.heads.trainer import WINDOW
from study.tables import Estimate


DOCS = Path(__file__).parents[2] / "docs"
DARK = {"figure.facecolor": "#131416", "axes.facecolor": "#131416", "savefig.facecolor": "#131416"}
DARK |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#d0d3d9")
FIRST, SECOND, THIRD = "#2b8cbe", "#cf6a1e", "#b25fc4"  # contrast of at least 3:1 to white and the dark background
FONT = 13  # legible at the 390 pixels of a telephone


def draw_points(axes: Axes, logs: dict[int, list[float]], color: str) -> None:
    """Plot geometric means with 95 % intervals over seeds, from log10 of the values by number of heads."""
    heads, means = sorted(logs), [float(np.mean(logs[n])) for n in sorted(logs)]
    ends = [statistics.mean_interval(np.array(logs[n])) for n in heads]
    bars = [[10**m - 10**e.low for m, e in zip(means, ends, strict=True)]]
    bars += [[10**e.high - 10**m for m, e in zip(means, ends, strict=True)]]
    axes.errorbar(heads, [10**m for m in means], yerr=bars, fmt="o-", color=color, markersize=5, capsize=3)


def draw_conditioning(axes: Axes) -> None:
    """Plot the condition number after training against heads, for both trades, with the Gaussian predictions."""
    places = {"fixed head dimension": (FIRST, (3.2, 12000)), "fixed total width": (SECOND, (2, 250))}
    for trade, rows in tables.group(tables.read("heads"), "trade").items():
        color, place = places[trade]
        by_heads = {int(n): group for n, group in tables.group(rows, "num_heads").items()}
        draw_points(axes, {n: [np.log10(float(r["condition_end"])) for r in g] for n, g in by_heads.items()}, color)
        axes.annotate(trade, place, color=color)
        widths = {n: n * int(group[0]["head_dim"]) for n, group in by_heads.items()}
        axes.plot([*widths], [conditioning.gaussian(TOKENS, w).median for w in widths.values()], "--", color=color)
    axes.annotate("Gaussian (dashed)", (4, 7))
    axes.set(xscale="log", yscale="log", xlabel="heads", ylabel="condition number", ylim=(1, 1e5))
    axes.set_title("Conditioning after training", fontsize=FONT)
    axes.set_xticks([*by_heads], [str(n) for n in by_heads])
    axes.minorticks_off()


def draw_tasks(axes: Axes) -> None:
    """Plot the errors on two diagnostic tasks against heads, each at a total width at which it is learned."""
    nearest = tables.group(tables.read("rank_nn"), "num_heads")
    lines = {"nearest neighbour": {int(n): Estimate.mean(row["error"] for row in nearest[n]) for n in nearest}}
    rows = [row for row in tables.read("diagnostic_tasks") if row["task"] == "retrieval"]
    lines["retrieval"] = {int(r["num_heads"]): Estimate(*(float(r[n]) for n in ("error", "low", "high"))) for r in rows}
    for (task, line), color, place in zip(lines.items(), (FIRST, SECOND), ((1.5, 0.87), (14, 0.12)), strict=True):
        heads = sorted(line)
        error, low, high = np.array([tuple(line[n]) for n in heads]).T
        axes.errorbar(heads, error, yerr=(error - low, high - error), fmt="o-", color=color, markersize=5, capsize=3)
        axes.annotate(task, place, color=color)
    axes.set(xscale="log", xlabel="heads at fixed total width", ylabel="error; retrieval: 1 - R²", ylim=(0, 1))
    axes.set_title("Two diagnostic tasks", fontsize=FONT)
    axes.set_xticks([1, 2, 4, 8, 16, 48], ["1", "2", "4", "8", "16", "48"])
    axes.minorticks_off()


def draw_delay(axes: Axes) -> None:
    """Plot the training loss of narrow heads minus the fewest heads', by step, at one learning rate."""
    width = verdicts.BLOCKS[curves.BLOCK].width
    differences = curves.behind(read_rows(curves.ROWS))
    for (heads, by_step), color in zip(differences.items(), (SECOND, FIRST, THIRD), strict=False):
        y, low, high = np.array([tuple(Estimate.of(d)) for d in by_step.values()]).T
        axes.plot(list(by_step), y, color=color, label=f"{heads} heads of {width // heads}")
        axes.fill_between(list(by_step), low, high, color=color, alpha=0.15, linewidth=0)
    axes.axhline(0, color=axes.xaxis.label.get_color(), linewidth=0.8)
    axes.set(xscale="log", xlabel="step", ylabel="nats, width 128")
    axes.set_title("Training loss minus one head's", fontsize=FONT)
    axes.minorticks_off()
    axes.set_xticks([100, 300, 1000, 4000], ["100", "300", "1,000", "4,000"])
    axes.legend(frameon=False, fontsize=FONT - 3)


def draw_given(axes: Axes) -> None:
    """Plot the training loss of 4 and 32 heads by step, as usual and with half of the heads given a pattern."""
    rows = [row for row in read_rows(mechanism.ROWS) if row["seed"] in mechanism.SEEDS]  # at each arm's best rate
    arms = (
        ("32", "32 heads of 4", SECOND, "-"),
        ("4", "4 heads of 32", FIRST, "-"),
        ("32 given itself", "32, given the token itself", SECOND, ":"),
        ("32 given", "32, given the previous token", SECOND, "--"),
        ("4 given", "4, given the previous token", FIRST, "--"),
    )
    for arm, label, color, line in arms:
        losses = np.transpose([row["curve"] for row in rows if row["arm"] == arm])
        mean, low, high = np.array([tuple(Estimate.mean(x)) for x in losses]).T
        steps = WINDOW * (np.arange(len(mean)) + 0.5)
        axes.plot(steps, mean, line, color=color, label=label)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(xlim=(0, 1000), ylim=(2.4, 4.6), xlabel="step of 1,000", ylabel="nats, width 128")
    axes.set_title("Training loss", fontsize=FONT)
    axes.legend(frameon=False, fontsize=FONT - 3)


DOSES = {  # words of the picture, at places in data coordinates
    "4 heads": (-1.15, 4.4),
    "8 heads": (-2.06, 5.8),
    "QK-norm": (-1.46, 6.3),
    "σReparam": (-0.55, 6.3),
    "orthogonal": (-0.3, -2.6),
    "graying 0.75": (-0.46, -4.8),
    "graying 0.5": (-0.94, -7.8),
    "graying 0.25": (-1.3, -11.7),
    "λI, λ = 2": (-1.73, -18.8),
    "λ = 1": (-2.29, -1.8),
    "λ = 0.5": (-1.68, 0.7),
}


def draw_dose(axes: Axes) -> None:
    """Plot the change of top-1 against the change of log10 κ, for heads with their line, and for interventions."""
    values = figures.causes_values()
    for color, names, label in ((FIRST, HEADS, "more heads"), (SECOND, INTERVENTIONS, "interventions")):
        points = np.array([(values["kappa"][n], values["score"][n]) for n in names])  # name, axis, (value, low, high)
        (x, x_low, x_high), (y, y_low, y_high) = points.transpose(1, 2, 0)
        bars = {"xerr": (x - x_low, x_high - x), "yerr": (y - y_low, y_high - y)}
        axes.errorbar(x, y, **bars, fmt="o", color=color, markersize=4, linewidth=1, label=label)
    for words, (x, y) in DOSES.items():
        axes.annotate(words, (x, y), fontsize=FONT - 4)
    slope, left = values["slope"]["heads"].value, min(e.value for e in values["kappa"].values())
    axes.plot([0, left], [0, -slope * left], color=FIRST, linewidth=1)
    axes.axhline(0, color=axes.xaxis.label.get_color(), linewidth=0.8)
    axes.set(xlabel="change of log10 κ\n(left: better conditioned; line: heads)", ylabel="change of top-1, points")
    axes.legend(frameon=False, fontsize=FONT - 3)


CLAIMS = {  # names of the pictures in docs/claims, with the panels
    "delay": draw_delay,
    "dose": draw_dose,
    "given": draw_given,
}


def main() -> None:
    """Write docs/front.png, docs/claims/NAME.png, and NAME_dark.png of each."""
    (DOCS / "claims").mkdir(exist_ok=True)
    for suffix, style in (("", {}), ("_dark", DARK)):
        with plt.rc_context({"font.size": FONT, "axes.spines.top": False, "axes.spines.right": False, **style}):
            figure, panels = plt.subplots(1, 3, figsize=(10.67, 4), layout="constrained")
            for axes, draw in zip(panels, (draw_delay, draw_conditioning, draw_tasks), strict=True):
                draw(axes)
            figure.savefig(DOCS / f"front{suffix}.png", dpi=150)
            plt.close(figure)
            for name, draw in CLAIMS.items():
                figure, axes = plt.subplots(figsize=(5.6, 4), layout="constrained")
                draw(axes)
                figure.savefig(DOCS / "claims" / f"{name}{suffix}.png", dpi=130)
                plt.close(figure)


if __name__ == "__main__":
    main()
