"""The picture on the front page, and one per claim of the findings, from the data in study/data.

Question: do more heads help, and does conditioning tell?
Command: python -m study.figures.front_picture
2026-11-28: narrow heads learn later and catch up (left). More heads condition the attention output better in both
trades, where theory predicts it for one (middle). The two diagnostic tasks disagree on the number of heads (right).
Bars and bands are 95 % intervals.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from leanformer import conditioning
from leanformer.analysis import statistics
from study import tables
from study.figures import conditioning as figures
from study.figures import heads as head_figures
from study.figures import language, published, shapes, trained
from study.figures.heads import DIMENSIONS
from study.heads import curves, families, verdicts, vision
from study.heads.causes import HEADS, INTERVENTIONS
from study.heads.heads import TOKENS
from study.heads.language import read_rows
from study.shapes import surface
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
    axes.annotate("theory (dashed)", (4, 7))
    axes.set(xscale="log", yscale="log", xlabel="heads", ylabel="condition number", ylim=(1, 1e5))
    axes.set_title("Conditioning after training", fontsize=FONT)
    axes.set_xticks([*by_heads], [str(n) for n in by_heads])
    axes.minorticks_off()


def draw_budgets(axes: Axes) -> None:
    """Plot the test error of ViTs of equal parameters against heads: a dot per model, and the fit with its band."""
    rows = surface.read_table(tables.EVIDENCE / "quickstart.csv")
    budgets = {"120,000": (120e3, FIRST, (4.4, 28.5)), "270,000": (270e3, SECOND, (1, 15.2))}
    for name, (budget, color, place) in budgets.items():
        part = [row for row in rows if row["budget"] == budget]
        models = {tuple(row[axis] for axis in surface.AXES): row["num_heads"] for row in part}
        errors = [
            100 * np.mean([1 - row["top1"] for row in part if tuple(row[axis] for axis in surface.AXES) == shape])
            for shape in models
        ]
        axes.plot([*models.values()], errors, "o", color=color, markersize=4, alpha=0.5)
        heads, low, middle, high = surface.predict_by_heads(part)
        axes.plot(heads, 100 * middle, color=color)
        axes.fill_between(heads, 100 * low, 100 * high, color=color, alpha=0.2, linewidth=0)
        axes.annotate(f"{name} parameters", place, color=color)
    axes.set(xlabel="heads", ylabel="test error, %", ylim=(14, 33))
    axes.set_xscale("log", base=2)
    axes.set_yticks([15, 20, 25, 30])
    axes.set_title("40 ViTs, equal parameters", fontsize=FONT)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])


def draw_tasks(axes: Axes) -> None:
    """Plot the errors on two diagnostic tasks against heads at one total width."""
    places = {"nearest neighbour": (FIRST, (2, 0.97)), "retrieval": (SECOND, (3.7, 0.61))}
    for task, rows in tables.group(tables.read("diagnostic_tasks"), "task").items():
        color, place = places[task]
        heads = [int(row["num_heads"]) for row in rows]
        error, low, high = (np.array([float(row[name]) for row in rows]) for name in ("error", "low", "high"))
        axes.errorbar(heads, error, yerr=(error - low, high - error), fmt="o-", color=color, markersize=5, capsize=3)
        axes.annotate(task, place, color=color)
    axes.set(xscale="log", xlabel="heads at total width 48", ylabel="error; retrieval: 1 - R²", ylim=(0, 1.08))
    axes.set_title("Two diagnostic tasks", fontsize=FONT)
    axes.set_xticks(heads, [str(n) for n in heads])
    axes.minorticks_off()


def draw_estimates(axes: Axes, rows: Mapping[str, Estimate], color: str, shift: float = 0.0, label: str = "") -> None:
    """Plot estimates with their intervals, a row each from the top, around a line at 0; `shift` moves them down."""
    places = [row + shift for row in range(len(rows))]
    values, low, high = np.array([tuple(estimate) for estimate in rows.values()]).T
    axes.errorbar(values, places, xerr=(values - low, high - values), fmt="o", color=color, capsize=3, label=label)
    axes.axvline(0, color=axes.xaxis.label.get_color(), linewidth=0.8)
    axes.set_yticks(range(len(rows)), [*rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def draw_sizes(axes: Axes) -> None:
    """Plot the change of the error per doubling of each size, at both budgets."""
    for i, (budget, effects) in enumerate(zip(("120,000", "270,000"), shapes.values()["params"], strict=True)):
        rows = {name.replace(", ", ",\n"): effects[key] for name, key in shapes.CHANGES.items()}
        draw_estimates(axes, rows, (FIRST, SECOND)[i], 0.24 * i - 0.12, f"{budget} parameters")
    axes.set(xlabel="change of the error per doubling, %\n(left is better)")
    axes.figure.legend(loc="outside upper right", frameon=False)


def draw_interventions(axes: Axes) -> None:
    """Plot the change of accuracy by heads and by interventions on conditioning."""
    draw_estimates(axes, _changes("score"), FIRST)
    axes.set(xlabel="change of top-1 accuracy, points\n(right is better)")


def draw_kappa(axes: Axes) -> None:
    """Plot how much heads and interventions lower the condition number."""
    draw_estimates(axes, _changes("kappa"), SECOND)
    axes.set(xlabel="change of log10 κ\n(left: better conditioned)")


def _changes(what: str) -> dict[str, Estimate]:
    """Return the changes of a quantity of the mediation study by heads, interventions and control."""
    values = figures.mediation_values()[what]
    rows = {"8 heads\ninstead of 2": values["heads"]}
    rows |= {SHORT.get(words, words): values[f"{name} beside base"] for name, words in figures.LEVERS.items()}
    return rows | {"control": values["control"]}


def draw_listops(axes: Axes) -> None:
    """Plot the accuracy on ListOps of two layers with two heads each, and of one layer with four heads."""
    rows = {}
    for (depth, heads), group in tables.group(tables.read("listops"), "depth", "num_heads").items():
        layers = "1 layer" if depth == "1" else f"{depth} layers"
        rows[f"{layers}\nx {heads} heads"] = Estimate.mean(row["top1"] for row in group)
    draw_estimates(axes, rows, FIRST)
    axes.set(xlabel="top-1 accuracy on ListOps, %\n(right is better)", xlim=(35, 50))


def draw_language(axes: Axes) -> None:
    """Plot differences of held-out loss between small decoders."""
    by_layer, depth = language.heads_by_layer(), language.language()["difference"]
    rows = {"twice as deep\nagainst lean": depth}
    rows |= {"more heads later\nagainst uniform": by_layer["later"], "earlier\nagainst uniform": by_layer["earlier"]}
    draw_estimates(axes, rows | {"later\nagainst earlier": by_layer["against"]}, FIRST)
    axes.set(xlabel="difference in nats per token\n(left is better)")


WIDTHS = {"F": SECOND, "A": FIRST, "G": THIRD}  # blocks of the study by their colours, in order of total width
LONGER = {"I": SECOND, "D": FIRST}  # blocks of 4,000 steps


def draw_fixed_width(axes: Axes) -> None:
    """Plot the loss of small GPTs relative to the widest head, and κ below it, by head dimension at fixed total width.

    A width is drawn once it has three arms.
    """
    rows = read_rows()
    below = axes.figure.add_subplot(2, 1, 2)
    axes.set_subplotspec(below.get_subplotspec().get_gridspec()[0])
    for i, (block, color) in enumerate(WIDTHS.items()):
        loss, kappa = (verdicts.read_values(rows, block, key) for key in ("loss", "log10_condition"))
        if len(loss) < 3:
            continue
        fewest, *more = sorted(loss)
        changes = [Estimate.of(statistics.paired(loss[n], loss[fewest])) for n in more]
        y, low, high = np.array([(0.0, 0.0, 0.0), *map(tuple, changes)]).T
        width = verdicts.BLOCKS[block].width
        x, style = [width / n * 1.04 ** (i - 1) for n in loss], {"color": color, "markersize": 4}
        axes.errorbar(x, y, yerr=(y - low, high - y), fmt="o-", capsize=3, label=f"width {width}", **style)
        below.plot(x, [10 ** values.mean() for values in kappa.values()], "o-", **style)
    axes.axhline(0, color=axes.xaxis.label.get_color(), linewidth=0.8)
    axes.set_title("Held-out loss minus that of the widest head, nats", fontsize=FONT - 2)
    below.set_title("Condition number of the head outputs", fontsize=FONT - 2)
    below.set(xscale="log", yscale="log", xlabel="head dimension in a small GPT (3 seeds, bars: 95 %)")
    axes.set(xscale="log")
    below.set_yticks([30, 100, 300, 1000], ["30", "100", "300", "1,000"])
    for panel in (axes, below):
        panel.minorticks_off()
        panel.set_xticks(DIMENSIONS, [str(n) for n in DIMENSIONS])
        panel.invert_xaxis()
    axes.legend(frameon=False, fontsize=FONT - 3)


def draw_stop_paying(axes: Axes) -> None:
    """Plot the change of the loss per doubling of heads by the resulting head dimension: small GPTs and two tables."""
    rows, lines = read_rows(), {}
    for block, color in WIDTHS.items():
        width, loss = verdicts.BLOCKS[block].width, verdicts.read_values(rows, block, "loss")
        steps = {width / many: Estimate.of(d) for (_, many), (d, _) in verdicts.doublings(loss).items()}
        lines[f"our GPTs, width {width}"] = (steps, {"color": color, "fmt": "o-"})
    values, grey = published.values(), axes.xaxis.label.get_color()
    for name, label, style in (("openlm", "open_lm", "s--"), ("archai", "archai", "^:")):
        steps = {(values["low"][high] * high) ** 0.5: estimate for high, estimate in values[name].items()}
        lines[label] = (steps, {"color": grey, "fmt": style})
    for i, (label, (steps, style)) in enumerate(lines.items()):
        if steps:
            y, low, high = np.array([tuple(estimate) for estimate in steps.values()]).T
            x = [dim * 1.03 ** (i - 2) for dim in steps]
            axes.errorbar(x, y, yerr=(y - low, high - y), label=label, capsize=2, markersize=4, linewidth=1, **style)
    for block, color in LONGER.items():
        about, loss = verdicts.BLOCKS[block], verdicts.read_values(rows, block, "loss")
        style = {"color": color, "fmt": "D", "markerfacecolor": "none", "markersize": 5, "linewidth": 1, "capsize": 2}
        style["label"] = f"width {about.width}, {about.steps:,} steps"
        for few, many in itertools.pairwise(sorted(loss)):  # a mean over the doublings between two arms
            y, low, high = (x / np.log2(many / few) for x in Estimate.of(statistics.paired(loss[many], loss[few])))
            first, last = about.width / few / 2, about.width / many  # dimensions that the doublings lead to
            x = (first * last) ** 0.5
            axes.errorbar([x], [y], xerr=[[x - last], [first - x]], yerr=[[y - low], [high - y]], **style)
            style["label"] = None
    axes.axhline(0, color=grey, linewidth=0.8)
    axes.set(xscale="log", xlabel="head dimension after doubling the heads", ylim=(-0.21, 0.21))
    axes.set_title("Change of the loss, nats per token (below 0: heads pay)", fontsize=FONT - 2)
    axes.minorticks_off()
    axes.set_xticks(DIMENSIONS[1:], [str(n) for n in DIMENSIONS[1:]])
    axes.invert_xaxis()
    axes.legend(loc="lower left", frameon=False, fontsize=FONT - 4)


def draw_delay(axes: Axes) -> None:
    """Plot the training loss of narrow heads minus that of the fewest, by step, at one learning rate."""
    width = verdicts.BLOCKS[curves.BLOCK].width
    differences = curves.behind(read_rows(curves.ROWS))
    for (heads, by_step), color in zip(differences.items(), (SECOND, FIRST, THIRD), strict=False):
        y, low, high = np.array([tuple(Estimate.of(d)) for d in by_step.values()]).T
        axes.plot(list(by_step), y, color=color, label=f"{heads} heads of {width // heads}")
        axes.fill_between(list(by_step), low, high, color=color, alpha=0.15, linewidth=0)
    axes.axhline(0, color=axes.xaxis.label.get_color(), linewidth=0.8)
    axes.set(xscale="log", xlabel="step")
    axes.set_title("Loss minus that of one head, nats", fontsize=FONT - 2)
    axes.minorticks_off()
    axes.set_xticks([100, 300, 1000, 4000], ["100", "300", "1,000", "4,000"])
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
    """Plot the change of top-1 against that of log10 κ, for heads with their line, and for interventions."""
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
    axes.set(
        xlabel="change of log10 κ\n(left: better conditioned; line: that of heads)", ylabel="change of top-1, points"
    )
    axes.legend(frameon=False, fontsize=FONT - 3)


def draw_narrow_heads(axes: Axes) -> None:
    """Plot what changes the held-out loss of a small decoder with 32 heads of dimension 4."""
    values = head_figures.narrow_heads()
    names = {"E": "queries, keys\nof dimension 32", "E2": "as many parameters\nin the MLP", "B": "QK-norm"}
    rows = {"8 heads of 16": values["eight"]} | {text: values["change"][block] for block, text in names.items()}
    draw_estimates(axes, rows, FIRST)
    axes.set(xlabel="change of the loss of 32 heads of 4\n(nats per token, left is better)")


def draw_families(axes: Axes) -> None:
    """Plot lean minus original of the small pairs of shapes, of those whose score is an accuracy."""
    accuracies = [r for r in families.summarise(families.read_rows()) if r.unit == "%"]
    changes = {r.family.replace("Nyströmformer, ", "Nyström,\n"): Estimate.of(r.difference) for r in accuracies}
    changes = {name: change for name, change in changes.items() if np.isfinite(change.high)}  # scores that vary
    draw_estimates(axes, changes, FIRST)
    axes.tick_params("y", labelsize=FONT - 3)
    axes.set(xlabel="lean minus original, points of top-1\n(right: lean is better)")


def draw_trained(axes: Axes) -> None:
    """Plot κ of the heads' outputs side by side, by layer, of two trained models and of fresh ones."""
    values = trained.trained_values()
    for name, color, label in (("bert", FIRST, "MiniLM"), ("vit", SECOND, "ViT-S")):
        for key, style, state in ((name, "o-", "trained"), (f"{name}_fresh", "o--", "fresh")):
            median, low, high = np.array(values[key]["attention_output"]).T
            axes.plot(median, style, color=color, markersize=4, label=f"{label}, {state}")
            axes.fill_between(range(len(median)), low, high, color=color, alpha=0.15, linewidth=0)
    axes.annotate("upper edge: singular in float32, at least this", (0, 2.6e6), fontsize=FONT - 3)
    axes.set(yscale="log", xlabel="layer", ylabel="condition number", ylim=(20, 6e6))
    axes.figure.legend(loc="outside upper center", ncols=2, frameon=False)


def draw_trade(axes: Axes) -> None:
    """Plot the change of the error of small ViTs with half the layers to the original, after 5 and 15 epochs."""
    unknown = Estimate(np.nan, np.nan, np.nan)
    for i, (epochs, color) in enumerate({5: FIRST, 15: SECOND}.items()):
        change = shapes.read_trade(epochs)["change"]
        rows = {words: change.get(name, unknown) for name, words in HALVED.items()}
        draw_estimates(axes, rows, color, 0.24 * i - 0.12, f"{epochs} epochs")
    axes.axvline(vision.MARGIN, color=axes.xaxis.label.get_color(), linestyle="--", linewidth=0.8)
    axes.set(xlabel="change of the error to 8 layers of 3 heads, %\n(left is better; dashed: margin)")
    axes.tick_params("y", labelsize=FONT - 3)
    axes.figure.legend(loc="outside upper right", ncols=2, frameon=False)


HALVED = {  # arms of the study's trade
    "layers halved": "4 layers,\n3 heads of 16",
    "lean, MLP kept": "4 layers,\n4 heads of 16",
    "layers and MLP halved": "halved MLP too,\n3 heads of 16",
    "lean, MLP halved": "halved MLP too,\n4 heads of 16",
    "lean, fixed width": "halved MLP too,\n6 heads of 8",
}
SHORT = {
    "λI added to the matrices of queries, keys and values": "λI added",
    "initialisation by shifted singular values": "shifted singular\nvalues",
}
CLAIMS = {  # names of the pictures in docs/claims, with the panels
    "conditioning": draw_conditioning,
    "sizes": draw_sizes,
    "interventions": draw_interventions,
    "kappa": draw_kappa,
    "budgets": draw_budgets,
    "tasks": draw_tasks,
    "listops": draw_listops,
    "language": draw_language,
    "fixed_width": draw_fixed_width,
    "stop_paying": draw_stop_paying,
    "delay": draw_delay,
    "dose": draw_dose,
    "narrow_heads": draw_narrow_heads,
    "families": draw_families,
    "trade": draw_trade,
    "trained": draw_trained,
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
