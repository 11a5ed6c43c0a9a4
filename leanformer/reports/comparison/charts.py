"""Plots of a comparison, with captions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison, RunGroup
from leanformer.analysis.frontier import COST_METRICS, ScoreCorrelation
from leanformer.analysis.statistics import LEVEL
from leanformer.costs.count import format_number
from leanformer.reports.comparison import tables
from leanformer.reports.plots import SERIES, TEXT_COLOR, style_axes


GREY = "#999999"
LABELS = 5  # maximal number of labels on a Pareto front
TICKS = 4  # ticks of a logarithmic axis
NAMED = 12  # maximal number of coloured curves
ROWS = 40  # maximal number of rows in a plot
Charts = dict[str, tuple[Figure, str]]  # plots with captions, by file name


def draw_all(result: Comparison, conditioning: Sequence[ScoreCorrelation]) -> Charts:
    """Return every plot for which these runs have data, with its caption."""
    caption = f"Mean and {LEVEL:.0%} confidence interval of each configuration. Grey dots: single runs."
    charts = {"scores": (scores(result), caption)}
    if result.pairs:
        caption = f"Differences with {LEVEL:.0%} confidence intervals. Shaded: margin. Filled: significant (Holm)."
        charts["differences"] = (differences(result), caption)
    priced = tables.fronts(result)
    if len(result.shapes) > 1 and priced:
        costs = "; ".join(f"{name}: {COST_METRICS[name].what}" for name in priced)
        charts["fronts"] = (fronts(result, priced), f"Score against cost. Line: Pareto front. {costs}.")
    if (figure := curves(result)) is not None:
        best = f" Coloured: the {NAMED} best." if len(result.shapes) > NAMED else ""
        caption = f"Means over runs with {LEVEL:.0%} confidence bands, at the steps common to all runs.{best}"
        charts["curves"] = (figure, caption)
    shown = [measure for measure in conditioning if len(measure.numbers) > 1]
    if shown:
        caption = "Score against median condition number over layers at the last probe, one dot per configuration. "
        charts["conditioning"] = (conditioned(result, shown), caption + "Hollow: lower bound.")
    return charts


def scores(result: Comparison) -> Figure:
    """Plot the scores, one row per configuration, the best on top."""
    shown = result.shapes[:ROWS]
    figure, axes = _rows(len(shown))
    for row, shape in enumerate(shown):
        axes.plot(shape.scores, [row] * len(shape.scores), "o", color=GREY, markersize=3, zorder=1)
        _bar(axes, row, shape.mean, (shape.interval.low, shape.interval.high), SERIES[0], filled=True)
    axes.set_yticks(range(len(shown)), [_shorten(shape.name) for shape in shown], fontsize=8)
    axes.set_xlabel(result.score.name, color=TEXT_COLOR)
    return figure


def differences(result: Comparison) -> Figure:
    """Plot the differences, one row per pair, those with the best configuration on top."""
    shown = result.pairs[: ROWS // 2]
    figure, axes = _rows(len(shown))
    axes.axvspan(-result.margin, result.margin, color=SERIES[2], alpha=0.15, lw=0)
    axes.axvline(0, color=TEXT_COLOR, lw=0.8)
    for row, pair in enumerate(shown):
        ends = (pair.interval.low, pair.interval.high)
        _bar(axes, row, pair.difference.value, ends, SERIES[1], filled=pair.better is not None)
    names = [f"{_shorten(pair.first, 28)} - {_shorten(pair.second, 28)}" for pair in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlabel(f"difference in {result.score.name}", color=TEXT_COLOR)
    return figure


def fronts(result: Comparison, priced: dict[str, list[str]]) -> Figure:
    """Plot score against cost with the Pareto front, a panel per cost metric; `priced` is from `tables.fronts`."""
    figure, panels = _grid(len(priced))
    for axes, (name, on) in zip(panels, priced.items(), strict=True):
        prices: dict[str, Any] = {shape.name: frontier.median_cost(shape, name) for shape in result.shapes}
        for shape in result.shapes:
            color = SERIES[0] if shape.name in on else GREY
            _point(axes, shape, prices[shape.name], color)
        steps = [shape for name in on for shape in result.shapes if shape.name == name]
        axes.step([prices[s.name] for s in steps], [s.mean for s in steps], where="post", color=SERIES[0], lw=1.2)
        for i, shape in enumerate(steps[:: math.ceil(len(steps) / LABELS)]):
            place: dict[str, Any] = {"xytext": (4, -10 if i % 2 else 6), "textcoords": "offset points"}
            axes.annotate(
                _shorten(shape.name, 24), (prices[shape.name], shape.mean), **place, fontsize=6.5, color=TEXT_COLOR
            )
        axes.margins(x=0.15, y=0.12)
        _logarithmic(axes, [*prices.values()])
        axes.set_xlabel(f"{name}: {COST_METRICS[name].unit}", color=TEXT_COLOR)
        axes.set_ylabel(result.score.name, color=TEXT_COLOR)
    return figure


def curves(result: Comparison) -> Figure | None:
    """Plot the learning curves of all configurations; None if no curve has two points."""
    drawn = {shape.name: frontier.learning_curve(shape, result.score.name) for shape in result.shapes}
    drawn = {name: curve for name, curve in drawn.items() if len(curve.steps) > 1}
    if not drawn:
        return None
    figure = Figure(figsize=(8.6, 4.4), dpi=150, layout="constrained")
    axes = style_axes(figure.subplots(), "step", result.score.name)
    palette = [*SERIES, "#b8860b", "#c06c9c"]
    for i, (name, curve) in enumerate(drawn.items()):
        best = i < NAMED
        color = palette[i % len(palette)] if best else GREY
        style = "--" if len(palette) <= i < NAMED else "-"
        lines: dict[str, Any] = (
            {"lw": 1.6, "label": _shorten(name), "zorder": 3} if best else {"lw": 0.7, "alpha": 0.5, "zorder": 1}
        )
        axes.plot(curve.steps, curve.means, color=color, ls=style, **lines)
        low, high = np.array([(interval.low, interval.high) for interval in curve.intervals]).T
        if best and np.isfinite(low).all():
            axes.fill_between(curve.steps, low, high, color=color, alpha=0.12, lw=0, zorder=2)
    means = [mean for curve in drawn.values() for mean in curve.means]
    margin = 0.1 * (max(means) - min(means)) or 1.0
    axes.set_ylim(min(means) - margin, max(means) + margin)  # bands of two seeds are far wider than the curves
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def conditioned(result: Comparison, shown: Sequence[ScoreCorrelation]) -> Figure:
    """Plot the score against condition numbers, one panel per matrix."""
    by_name = {shape.name: shape for shape in result.shapes}
    figure, panels = _grid(len(shown))
    for axes, measure in zip(panels, shown, strict=True):
        for name, value in measure.numbers.items():
            _point(axes, by_name[name], value, SERIES[3], filled=name not in measure.singular)
        bounded = measure.interval.high - measure.interval.low < 2
        interval = f" [{measure.interval.low:+.2f}, {measure.interval.high:+.2f}]" if bounded else ""
        rho = "" if math.isnan(measure.rho) else f"   ρ {measure.rho:+.2f}{interval}"
        axes.set_title(f"{measure.measure}{rho}", fontsize=8, color=TEXT_COLOR)
        _logarithmic(axes, [*measure.numbers.values()])
        axes.set_xlabel("condition number", color=TEXT_COLOR)
        axes.set_ylabel(result.score.name, color=TEXT_COLOR)
    return figure


def _point(axes: Axes, shape: RunGroup, at: float, color: str, filled: bool = True) -> None:
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
    """Set a logarithmic x axis with few ticks of two digits, even if the values differ little or not at all."""
    low, high = min(values), max(values)
    horizontal, _ = axes.margins() or (0.0, 0.0)
    margin = max((high / low) ** horizontal, 1.1)  # wide enough for a tick rounded to two digits
    axes.set_xlim(low / margin, high * margin)  # without limits Matplotlib warns of values equal up to rounding
    axes.set_xscale("log")
    ticks = dict.fromkeys(float(f"{tick:.2g}") for tick in np.geomspace(low, high, TICKS))
    axes.xaxis.set_major_locator(FixedLocator([*ticks]))
    axes.xaxis.set_major_formatter(lambda tick, _: format_number(float(tick)))
    axes.xaxis.set_minor_locator(NullLocator())


def _rows(count: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.6, 1.1 + 0.26 * count), dpi=150, layout="constrained")
    axes = style_axes(figure.subplots())
    axes.set_ylim(count - 0.4, -0.6)
    return figure, axes


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2 if count in (2, 4) else 3)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1.0 + 3.9 * columns, 0.3 + 3.0 * rows), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.remove()
    return figure, [style_axes(axes) for axes in panels[:count]]


def _shorten(name: str, most: int = 44) -> str:
    """Return a name, shortened to its end, which distinguishes configurations."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
