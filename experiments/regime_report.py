"""What `regime` found: a table, the sentences that it supports, and a chart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.regime_poles import POLES, Shape, Trained
from leanformer.analysis.statistics import LEVEL, Interval
from leanformer.reports.plots import INK, SERIES


ALPHA = 1 - LEVEL
Start = Sequence[Mapping[str, Any]]  # of each shape, what `studies.regime.at_start` found, and its `capacity`
ORDERS = {  # of shapes by what is known before training: a key of the figures at the start, and whether more is better
    "conditioning": ("attention_output", False),
    "entropy": ("relative_attention_entropy", True),
    "spectral capacity": ("capacity", True),
}


def table(shapes: Sequence[Shape], trained: Sequence[Trained], start: Start) -> str:
    """A row a shape: errors of the poles with intervals, then what was measured before training."""
    poles = [f"{each.pole} (error)" for each in trained]
    head = ["shape", *poles, "condition number", "Gaussian", "entropy", "largest logit", "NSC"]
    rows = []
    for row, (shape, known) in enumerate(zip(shapes, start, strict=True)):
        errors = [_shown(each.errors[row], each.interval(row)) for each in trained]
        measured = [f"{'at least ' * known['bound']}{known['attention_output']:.3g}", f"{known['gaussian']:.3g}"]
        measured += [f"{known['relative_attention_entropy']:.3f}", f"{known['largest_logit']:.2g}"]
        rows.append([str(shape), *errors, *measured, "-" if known["capacity"] is None else f"{known['capacity']:,.0f}"])
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _shown(errors: np.ndarray, interval: Interval) -> str:
    middle = 10 ** np.log10(errors).mean()
    if not math.isfinite(interval.low):
        return f"{middle:.3g} (no interval)"
    return f"{middle:.3g} ({10**interval.low:.3g} to {10**interval.high:.3g})"


def sentences(
    shapes: Sequence[Shape], asked: int, trained: Sequence[Trained], start: Sequence[Mapping[str, float]]
) -> str:
    """What the evidence supports of the shape number `asked`, pole by pole, and how the theories order the shapes."""
    lines = [f"{each.pole}: {_verdict(each, asked)}" for each in trained]
    orders = {name: _order(shapes, [each[key] for each in start], more) for name, (key, more) in _known(start).items()}
    lines += [f"best first by {name} before training: {order}" for name, order in orders.items()]
    several = len(set(orders.values())) > 1
    lines.append(
        f"These {len(orders)} orders are {'not one: none decides alone' if several else 'one and the same'}; the poles "
        "say which of them your task should follow, if it is like one of the poles."
    )
    return "\n".join(lines)


def _known(start: Start) -> dict[str, tuple[str, bool]]:
    return {name: (key, more) for name, (key, more) in ORDERS.items() if start[0][key] is not None}


def _verdict(found: Trained, asked: int) -> str:
    """Whether other cuts of the same width do better or worse than the shape that was asked about."""
    shape, pole = found.shapes[asked], POLES[found.pole]
    pairs = found.against(asked)
    better = [(i, d) for i, d, p in pairs if p < ALPHA and d.value < 0]
    worse = [i for i, d, p in pairs if p < ALPHA and d.value > 0]
    unknown = [i for i, _, p in pairs if p >= ALPHA]
    said = [f"where the {pole.theory} must show, "]
    if better:
        i, best = min(better, key=lambda pair: pair[1].value)
        low, high = (_less(x) for x in (best.interval().high, best.interval().low))
        kind = "fewer, wider heads" if found.shapes[i].heads < shape.heads else "more, narrower heads"
        said.append(f"{kind} help: {found.shapes[i]} has {_less(best.value)} less error than {shape}")
        said.append(f" ({LEVEL:.0%} interval {low} to {high})")
    elif worse and not unknown:
        said.append(f"{shape} is the best of these")
    else:
        said.append(f"none is shown to be better than {shape}")
    if worse:
        said.append(f"; worse: {', '.join(str(found.shapes[i]) for i in worse)}")
    if unknown:
        names = ", ".join(str(found.shapes[i]) for i in unknown)
        said.append(
            f"; not to be told from it with {found.errors.shape[1]} seeds, which does not make them equal: {names}"
        )
    return "".join(said) + "."


def _less(difference: float) -> str:
    """How much less an error is, by the difference of log10 errors."""
    return f"{100 * (1 - 10**difference):.3g} %"


def _order(shapes: Sequence[Shape], values: Sequence[float], more: bool) -> str:
    order = sorted(range(len(shapes)), key=lambda i: -values[i] if more else values[i])
    return ", ".join(str(shapes[i]) for i in order)


def draw(
    shapes: Sequence[Shape], asked: int, trained: Sequence[Trained], start: Sequence[Mapping[str, float]]
) -> Figure:
    """Errors by number of heads, one panel a pole, with intervals and single seeds; and what was known before."""
    figure = Figure(figsize=(4.2 * (len(trained) + 1), 3.8), dpi=150, layout="constrained")
    panels, heads = figure.subplots(1, len(trained) + 1), [shape.heads for shape in shapes]
    for axes, each, color in zip(panels, trained, SERIES, strict=False):
        logs = np.log10(each.errors)
        for row, n in enumerate(heads):
            axes.plot([n] * logs.shape[1], each.errors[row], ".", color=color, alpha=0.4)
        intervals = [each.interval(row) for row in range(len(shapes))]
        ends = [[10**i.low if math.isfinite(i.low) else np.nan for i in intervals]]
        ends += [[10**i.high if math.isfinite(i.high) else np.nan for i in intervals]]
        middles = 10 ** logs.mean(axis=1)
        axes.errorbar(heads, middles, yerr=np.abs(np.array(ends) - middles), color=color, marker="o", capsize=3)
        axes.set_yscale("log")
        axes.set_title(f"{each.pole}: {POLES[each.pole].what}", fontsize=8, color=INK)
        axes.set_ylabel(f"error, 1 = looking at nothing; {LEVEL:.0%} intervals", fontsize=8, color=INK)
    axes = panels[-1]
    for (name, (key, _)), color in zip(_known(start).items(), SERIES, strict=False):
        values = np.array([known[key] for known in start])
        axes.plot(heads, values / values[asked], marker="o", color=color, label=name)
        bounds = [i for i, known in enumerate(start) if known["bound"] and key == ORDERS["conditioning"][0]]
        axes.plot(
            [heads[i] for i in bounds], values[bounds] / values[asked], "o", color="white", markersize=3, zorder=3
        )
    axes.set_title(f"before training, as a share of {shapes[asked]}'s; hollow: a lower bound", fontsize=8, color=INK)
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(heads, [str(shape) for shape in shapes], fontsize=7)
        axes.axvline(heads[asked], color="#999999", lw=0.8, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def as_numbers(
    shapes: Sequence[Shape],
    trained: Sequence[Trained],
    start: Sequence[Mapping[str, float]],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """For regime.json."""
    errors = {each.pole: each.errors.tolist() for each in trained}
    names = [str(shape) for shape in shapes]
    return {**settings, "shapes": names, "errors": errors, "before_training": [dict(known) for known in start]}
