"""Charts of a comparison: figures to save, with what they show in words."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison, Shape
from leanformer.analysis.frontier import CURRENCIES, Conditioning
from leanformer.analysis.statistics import LEVEL
from leanformer.costs.count import human
from leanformer.reports.comparison import tables
from leanformer.reports.plots import INK, SERIES


GREY = "#999999"
LABELS = 5  # of shapes on a front
TICKS = 4  # of a logarithmic axis
NAMED = 12  # curves in colour
ROWS = 40  # of a chart with a row a shape or a pair
Charts = dict[str, tuple[Figure, str]]  # by file name, with a caption


def all_of(found: Comparison, conditioning: Sequence[Conditioning]) -> Charts:
    """Every chart that these runs have data for."""
    charts = {"scores": (scores(found), f"Mean and {LEVEL:.0%} interval of each shape; dots are single seeds.")}
    if found.pairs:
        caption = f"Differences with {LEVEL:.0%} intervals; shaded is the margin. Filled: they differ (Holm)."
        charts["differences"] = (differences(found), caption)
    priced = tables.fronts(found)
    if len(found.shapes) > 1 and priced:
        what = "; ".join(f"{name}: {CURRENCIES[name].what}" for name in priced)
        charts["fronts"] = (fronts(found, priced), f"What a score costs. The line joins what nothing beats. {what}.")
    if (figure := curves(found)) is not None:
        grey = f" The {NAMED} best in colour." if len(found.shapes) > NAMED else ""
        charts["curves"] = (figure, f"Means over seeds with {LEVEL:.0%} bands, at the steps all have in common.{grey}")
    shown = [each for each in conditioning if len(each.numbers) > 1]
    if shown:
        caption = "Median condition number over layers at the last probe, a dot a shape; hollow: a lower bound."
        charts["conditioning"] = (conditioned(found, shown), caption)
    return charts


def scores(found: Comparison) -> Figure:
    """A row a shape, the best on top."""
    shown = found.shapes[:ROWS]
    figure, axes = _rows(len(shown))
    for row, shape in enumerate(shown):
        axes.plot(shape.scores, [row] * len(shape.scores), "o", color=GREY, markersize=3, zorder=1)
        _bar(axes, row, shape.mean, (shape.interval.low, shape.interval.high), SERIES[0], filled=True)
    axes.set_yticks(range(len(shown)), [_short(shape.name) for shape in shown], fontsize=8)
    axes.set_xlabel(found.score.name, color=INK)
    return figure


def differences(found: Comparison) -> Figure:
    """A row a pair, those of the best shape on top."""
    shown = found.pairs[: ROWS // 2]
    figure, axes = _rows(len(shown))
    axes.axvspan(-found.margin, found.margin, color=SERIES[2], alpha=0.15, lw=0)
    axes.axvline(0, color=INK, lw=0.8)
    for row, pair in enumerate(shown):
        ends = (pair.interval.low, pair.interval.high)
        _bar(axes, row, pair.found.value, ends, SERIES[1], filled=pair.better is not None)
    names = [f"{_short(pair.first, 28)} - {_short(pair.second, 28)}" for pair in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlabel(f"difference in {found.score.name}", color=INK)
    return figure


def fronts(found: Comparison, priced: dict[str, list[str]]) -> Figure:
    """A panel a currency: score against price, the front drawn through."""
    figure, panels = _grid(len(priced))
    for axes, (name, on) in zip(panels, priced.items(), strict=True):
        prices = {shape.name: frontier.price(shape, name) for shape in found.shapes}
        for shape in found.shapes:
            color = SERIES[0] if shape.name in on else GREY
            _point(axes, shape, prices[shape.name], color)
        steps = [shape for name in on for shape in found.shapes if shape.name == name]
        axes.step([prices[s.name] for s in steps], [s.mean for s in steps], where="post", color=SERIES[0], lw=1.2)
        for i, shape in enumerate(steps[:: math.ceil(len(steps) / LABELS)]):
            place = {"xytext": (4, -10 if i % 2 else 6), "textcoords": "offset points"}
            axes.annotate(_short(shape.name, 24), (prices[shape.name], shape.mean), **place, fontsize=6.5, color=INK)
        axes.margins(x=0.15, y=0.12)
        _logarithmic(axes, [*prices.values()])
        axes.set_xlabel(f"{name}: {CURRENCIES[name].unit}", color=INK)
        axes.set_ylabel(found.score.name, color=INK)
    return figure


def curves(found: Comparison) -> Figure | None:
    """Learning curves of all shapes; None where fewer than two steps can be drawn of any."""
    drawn = {shape.name: frontier.curve(shape, found.score.name) for shape in found.shapes}
    drawn = {name: curve for name, curve in drawn.items() if len(curve.steps) > 1}
    if not drawn:
        return None
    figure = Figure(figsize=(8.6, 4.4), dpi=150, layout="constrained")
    axes = _dressed(figure.subplots())
    palette = [*SERIES, "#b8860b", "#c06c9c"]
    for i, (name, curve) in enumerate(drawn.items()):
        best = i < NAMED
        color = palette[i % len(palette)] if best else GREY
        style = "--" if len(palette) <= i < NAMED else "-"
        lines = {"lw": 1.6, "label": _short(name), "zorder": 3} if best else {"lw": 0.7, "alpha": 0.5, "zorder": 1}
        axes.plot(curve.steps, curve.means, color=color, ls=style, **lines)
        low, high = np.array([(each.low, each.high) for each in curve.intervals]).T
        if best and np.isfinite(low).all():
            axes.fill_between(curve.steps, low, high, color=color, alpha=0.12, lw=0, zorder=2)
    means = [mean for curve in drawn.values() for mean in curve.means]
    room = 0.1 * (max(means) - min(means)) or 1.0
    axes.set_ylim(min(means) - room, max(means) + room)  # bands of two seeds are wider than any curve
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(found.score.name, color=INK)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def conditioned(found: Comparison, shown: Sequence[Conditioning]) -> Figure:
    """A panel a condition number: the score against it."""
    by_name = {shape.name: shape for shape in found.shapes}
    figure, panels = _grid(len(shown))
    for axes, each in zip(panels, shown, strict=True):
        for name, value in each.numbers.items():
            _point(axes, by_name[name], value, SERIES[3], filled=name not in each.singular)
        sure = each.interval.high - each.interval.low < 2
        interval = f" [{each.interval.low:+.2f}, {each.interval.high:+.2f}]" if sure else ""
        rho = "" if math.isnan(each.rho) else f"   ρ {each.rho:+.2f}{interval}"
        axes.set_title(f"{each.measure}{rho}", fontsize=8, color=INK)
        _logarithmic(axes, [*each.numbers.values()])
        axes.set_xlabel("condition number", color=INK)
        axes.set_ylabel(found.score.name, color=INK)
    return figure


def _point(axes: Axes, shape: Shape, at: float, color: str, filled: bool = True) -> None:
    face = color if filled else "none"
    low, high = shape.interval.low, shape.interval.high
    if math.isfinite(high):
        axes.plot([at, at], [low, high], color=color, lw=1, alpha=0.5)
    axes.plot(at, shape.mean, "o", color=color, markerfacecolor=face, markersize=4.5)


def _bar(axes: Axes, row: int, middle: float, ends: tuple[float, float], color: str, *, filled: bool) -> None:
    if math.isfinite(ends[1]):
        axes.plot(ends, [row, row], color=color, lw=1.6, solid_capstyle="butt", zorder=2)
    axes.plot(middle, row, "o", color=color, markerfacecolor=color if filled else "white", markersize=5, zorder=3)


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Few ticks, with two digits, however little the values differ."""
    axes.set_xscale("log")
    ticks = dict.fromkeys(float(f"{tick:.2g}") for tick in np.geomspace(min(values), max(values), TICKS))
    axes.xaxis.set_major_locator(FixedLocator([*ticks]))
    axes.xaxis.set_major_formatter(lambda tick, _: human(float(tick)))
    axes.xaxis.set_minor_locator(NullLocator())


def _rows(count: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.6, 1.1 + 0.26 * count), dpi=150, layout="constrained")
    axes = _dressed(figure.subplots())
    axes.set_ylim(count - 0.4, -0.6)
    return figure, axes


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2 if count in (2, 4) else 3)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1.0 + 3.9 * columns, 0.3 + 3.0 * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.remove()
    return figure, [_dressed(axes) for axes in panels[:count]]


def _dressed(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    return axes


def _short(name: str, most: int = 44) -> str:
    """A name that leaves room for the chart: its end, which tells shapes apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
