"""Plots of a comparison, with captions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison, RunGroup
from leanformer.analysis.frontier import ScoreCorrelation
from leanformer.analysis.statistics import LEVEL
from leanformer.costs.count import format_number
from leanformer.quantities import CONDITION, find
from leanformer.reports.comparison import tables
from leanformer.reports.plots import SERIES, TEXT_COLOR, TIP, literal, style_axes


GREY = "#767676"
LABELS = 5  # maximal number of labels on a Pareto front
TICKS = 4  # ticks of a logarithmic axis, about
NAMED = 12  # maximal number of coloured curves
MARKED = 20  # maximal number of points of a curve that are marked
ROWS = 40  # maximal number of rows in a plot
Charts = dict[str, tuple[Figure, str]]  # plots with captions, by file name


def draw_all(result: Comparison, conditioning: Sequence[ScoreCorrelation]) -> Charts:
    """Return the plots of a comparison for which its runs have data, each with its caption, by name.

    The names are scores, differences, fronts, curves and conditioning.

    Args:
        result: comparison.
        conditioning: correlations of the score with condition numbers; empty for none.
    """
    words = tables.score_words(result)
    better = "Further to the right is better." if result.score.higher else "Further to the left is better."
    caption = f"Mean and {LEVEL:.0%} confidence interval of each configuration. Grey: single runs. {better}"
    charts = {"scores": (scores(result), caption)}
    if result.pairs:
        caption = (
            f"Differences with {LEVEL:.0%} confidence intervals. Shaded: margin, differences too small to matter. "
            "Filled: significant (Holm). Right of 0 the first has the higher score."
        )
        charts["differences"] = (differences(result), caption)
    priced = tables.fronts(result)
    if len(result.shapes) > 1 and priced:
        caption = (
            f"{words.label[0].upper()}{words.label[1:]} against cost; {words.direction}, and cheaper is further left. "
        )
        caption += "Coloured, joined by the line: no cheaper configuration is better (Pareto front). Grey: all others."
        charts["fronts"] = (fronts(result, priced), caption)
    if (figure := curves(result)) is not None:
        best = f" Coloured: the {NAMED} best." if len(result.shapes) > NAMED else ""
        caption = f"Means over runs with {LEVEL:.0%} confidence bands, at the steps common to all runs.{best}"
        charts["curves"] = (figure, caption)
    shown = [measure for measure in conditioning if len(measure.numbers) > 1]
    if shown:
        caption = (
            "Score against the condition number κ (1 is the best), median over layers at the last probe; a dot is a "
            "configuration. ρ: Spearman's rank correlation with its interval; negative if lower κ goes with higher "
            "scores. Hollow: lower bound of κ."
        )
        charts["conditioning"] = (conditioned(result, shown), caption)
    return charts


def scores(result: Comparison) -> Figure:
    """Plot mean scores with intervals and the scores of single runs, one row per configuration, the best on top.

    Only the ROWS best configurations are shown.
    """
    shown = result.shapes[:ROWS]
    figure, axes = _rows(len(shown))
    scale, show = find(result.score.name).scale, tables.number(result)
    for row, shape in enumerate(shown):
        for run in shape.runs:  # above their bar, which would hide them
            (dot,) = axes.plot(scale * run.value, row - 0.28, "o", color=GREY, markersize=3, zorder=1)
            dot.set_gid(f"{TIP}{run.workdir.name}: {show(run.value)}")
        ends = (scale * shape.interval.low, scale * shape.interval.high)
        _bar(axes, row, scale * shape.mean, ends, SERIES[0], f"{shape.name}: {tables.with_interval(shape, show)}")
    axes.set_yticks(range(len(shown)), [_shorten(shape.name) for shape in shown], fontsize=8)
    axes.set_xlabel(find(result.score.name).axis, color=TEXT_COLOR)
    return figure


def differences(result: Comparison) -> Figure:
    """Plot differences with intervals and the margin, one row per pair, those with the best configuration on top.

    Only the first ROWS / 2 pairs are shown.
    """
    shown = result.pairs[: ROWS // 2]
    figure, axes = _rows(len(shown))
    scale, show, unit = find(result.score.name).scale, tables.number(result), tables.points(result)
    axes.axvspan(-scale * result.margin, scale * result.margin, color=SERIES[2], alpha=0.15, lw=0)
    axes.axvline(0, color=TEXT_COLOR, lw=0.8)
    for row, pair in enumerate(shown):
        ends = (scale * pair.interval.low, scale * pair.interval.high)
        tip = f"{pair.first} - {pair.second}: {show(pair.difference.value)} ({tables.between(pair.interval, show)})"
        _bar(axes, row, scale * pair.difference.value, ends, SERIES[1], tip, filled=pair.better is not None)
    names = [f"{_shorten(pair.first, 28)} - {_shorten(pair.second, 28)}" for pair in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlabel(f"difference in {find(result.score.name).label}{unit and f',{unit}'}", color=TEXT_COLOR)
    return figure


def fronts(result: Comparison, priced: dict[str, list[str]], *, wide: bool = True) -> Figure:
    """Plot score against cost with the Pareto front, one panel per cost metric.

    Args:
        result: comparison.
        priced: names of the Pareto-optimal configurations by cost metric, from `tables.fronts`.
        wide: True for a single panel as wide as the other plots, False for one to stand beside others.
    """
    figure, panels = _grid(len(priced), wide)
    scale = find(result.score.name).scale
    for axes, (name, on) in zip(panels, priced.items(), strict=True):
        prices: dict[str, Any] = {shape.name: frontier.median_cost(shape, name) for shape in result.shapes}
        for shape in result.shapes:
            color = SERIES[0] if shape.name in on else GREY
            price = f"{find(name).label} {format_number(float(prices[shape.name]))}"
            _point(axes, result, shape, prices[shape.name], price, color)
        steps = [shape for name in on for shape in result.shapes if shape.name == name]
        across, up = [prices[shape.name] for shape in steps], [scale * shape.mean for shape in steps]
        axes.step(across, up, where="post", color=SERIES[0], lw=1.2, ls=":", zorder=1)  # not taken for an interval
        others = [shape for shape in result.shapes if shape not in steps] if len(result.shapes) <= 2 * LABELS else []
        axes.margins(x=0.3, y=0.2)
        _logarithmic(axes, [*prices.values()])
        _label(axes, result, {s.name: prices[s.name] for s in [*steps[:: math.ceil(len(steps) / LABELS)], *others]})
        axes.set_xlabel(find(name).axis, color=TEXT_COLOR)
        axes.set_ylabel(find(result.score.name).axis, color=TEXT_COLOR)
    return figure


def curves(result: Comparison) -> Figure | None:
    """Plot the learning curves of all configurations, the best ones in colour; None if no curve has two points."""
    words = find(result.score.name)
    drawn = {shape.name: frontier.learning_curve(shape, result.score.name) for shape in result.shapes}
    drawn = {name: curve for name, curve in drawn.items() if len(curve.steps) > 1}
    if not drawn:
        return None
    figure = Figure(figsize=(8.6, 4.4), dpi=150, layout="constrained")
    axes = style_axes(figure.subplots(), find("step").label, words.axis)
    for i, (name, curve) in enumerate(drawn.items()):
        best = i < NAMED
        color = SERIES[i % len(SERIES)] if best else GREY
        style = "--" if len(SERIES) <= i < NAMED else "-"
        lines: dict[str, Any] = (
            {"lw": 1.6, "label": _shorten(name), "zorder": 3} if best else {"lw": 0.7, "alpha": 0.5, "zorder": 1}
        )
        if len(curve.steps) <= MARKED:
            lines |= {"marker": "o", "markersize": 3}
        means = words.scale * np.array(curve.means)
        (line,) = axes.plot(curve.steps, means, color=color, ls=style, **lines)
        line.set_gid(f"{TIP}{name}: {means[-1]:.4g} at step {curve.steps[-1]:,}")
        low, high = words.scale * np.array([(interval.low, interval.high) for interval in curve.intervals]).T
        if best and np.isfinite(low).all():
            axes.fill_between(curve.steps, low, high, color=color, alpha=0.12, lw=0, zorder=2)
    means = [words.scale * mean for curve in drawn.values() for mean in curve.means]
    margin = 0.1 * (max(means) - min(means)) or 1.0
    axes.set_ylim(min(means) - margin, max(means) + margin)  # bands of two seeds are far wider than the curves
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def conditioned(result: Comparison, shown: Sequence[ScoreCorrelation], *, wide: bool = True) -> Figure:
    """Plot the mean score of each configuration against condition numbers, one panel per correlation in `shown`.

    `wide` is as in `fronts`.
    """
    by_name = {shape.name: shape for shape in result.shapes}
    figure, panels = _grid(len(shown), wide)
    for axes, measure in zip(panels, shown, strict=True):
        for name, value in measure.numbers.items():
            condition = f"κ {'at least ' if name in measure.singular else ''}{format_number(float(value))}"
            _point(axes, result, by_name[name], value, condition, SERIES[3], filled=name not in measure.singular)
        bounded = measure.interval.high - measure.interval.low < 2
        interval = f"[{measure.interval.low:+.2f}, {measure.interval.high:+.2f}]"
        rho = f"   ρ {measure.rho:+.2f} {interval}" if bounded and not math.isnan(measure.rho) else ""
        axes.set_title(f"{measure.measure.replace('_', ' ')}{rho}", fontsize=8, color=TEXT_COLOR)
        axes.margins(x=0.3, y=0.2)
        _logarithmic(axes, [*measure.numbers.values()])
        if len(measure.numbers) <= 2 * LABELS:
            _label(axes, result, measure.numbers)
        axes.set_xlabel(CONDITION.label, color=TEXT_COLOR)
        axes.set_ylabel(find(result.score.name).axis, color=TEXT_COLOR)
    return figure


def _point(
    axes: Axes, result: Comparison, shape: RunGroup, at: float, cost: str, color: str, filled: bool = True
) -> None:
    """Plot the mean score of a configuration at a cost, with its interval; both are shown on hover."""
    scale, show = find(result.score.name).scale, tables.number(result)
    low, high = scale * shape.interval.low, scale * shape.interval.high
    if math.isfinite(high):
        axes.plot([at, at], [low, high], color=color, lw=1.2)
    (dot,) = axes.plot(
        at, scale * shape.mean, "o", color=color, markerfacecolor=color if filled else "none", markersize=5
    )
    dot.set_gid(f"{TIP}{shape.name}: {tables.with_interval(shape, show)}; {cost}")


def _label(axes: Axes, result: Comparison, positions: Mapping[str, float]) -> None:
    """Write names of configurations at their x, in turn above and below their intervals, so that neighbours differ."""
    scale, by_name = find(result.score.name).scale, {shape.name: shape for shape in result.shapes}
    for i, (name, x) in enumerate(sorted(positions.items(), key=lambda item: item[1])):
        mean, interval = by_name[name].mean, by_name[name].interval
        end = (interval.high, interval.low)[i % 2] if math.isfinite(interval.high) else mean
        place: dict[str, Any] = {"xytext": (0, -5 if i % 2 else 5), "textcoords": "offset points", "ha": "center"}
        place["va"] = "top" if i % 2 else "bottom"
        axes.annotate(_shorten(name, 24), (x, scale * end), **place, fontsize=7, color=TEXT_COLOR)


def _bar(
    axes: Axes, row: int, middle: float, ends: tuple[float, float], color: str, tip: str, *, filled: bool = True
) -> None:
    """Plot a mean and its interval in a row; `tip` is shown on hover."""
    if math.isfinite(ends[1]):
        axes.plot(ends, [row, row], color=color, lw=1.6, solid_capstyle="butt", zorder=2)
    (dot,) = axes.plot(
        middle, row, "o", color=color, markerfacecolor=color if filled else "white", markersize=5, zorder=3
    )
    dot.set_gid(f"{TIP}{tip}")


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Set a logarithmic x axis with few round ticks, even if the values differ little or not at all."""
    low, high = min(values), max(values)
    horizontal, _ = axes.margins() or (0.0, 0.0)
    margin = max((high / low) ** horizontal, 1.1)  # wide enough for a tick rounded to two digits
    axes.set_xlim(low / margin, high * margin)  # without limits Matplotlib warns of values equal up to rounding
    axes.set_xscale("log")
    inner = margin**0.7 if high < 1.5 * low else 1.0  # between the values alone, labels would overlap
    ticks = _round_ticks(low / margin, high * margin)
    if not ticks:
        ticks = [*dict.fromkeys(float(f"{tick:.2g}") for tick in np.geomspace(low / inner, high * inner, TICKS))]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(lambda tick, _: format_number(float(tick)))
    axes.xaxis.set_minor_locator(NullLocator())


def _round_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between two values, none if they are too close."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= TICKS - 1:
            return ticks[:: math.ceil(len(ticks) / (2 * TICKS))]
    return []


def _rows(count: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.6, 1.1 + 0.26 * count), dpi=150, layout="constrained")
    axes = style_axes(figure.subplots())
    axes.set_ylim(count - 0.4, -0.6)
    return figure, axes


def _grid(count: int, wide: bool) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2 if count in (2, 4) else 3)
    rows = math.ceil(count / columns)
    one = (8.6, 3.6) if wide else (5.2, 3.4)  # alone on a page as wide as the other plots, or beside another one
    size = (1.0 + 3.9 * columns, 0.3 + 3.0 * rows) if count > 1 else one
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.remove()
    return figure, [style_axes(axes) for axes in panels[:count]]


def _shorten(name: str, most: int = 44) -> str:
    """Return a name, shortened to its end, which distinguishes configurations."""
    return literal(name if len(name) <= most else f"…{name[1 - most :]}")
