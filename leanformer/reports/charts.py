"""Plots of a comparison, with captions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison, median_cost
from leanformer.analysis.frontier import Conditioning
from leanformer.analysis.statistics import LEVEL
from leanformer.costs.count import format_number
from leanformer.reports.plots import SERIES, TEXT_COLOR, literal, make_axes
from leanformer.text import lookup


GREY = "#767676"
NAMED = 12  # most curves with a colour, and most points with a name
ROWS = 40  # most rows in a plot
Charts = dict[str, tuple[list[Figure], str]]  # plots with a caption, by name


def draw_all(result: Comparison, measures: Sequence[Conditioning]) -> Charts:
    """Return the plots for which the runs have data: scores, differences, fronts, curves and conditioning."""
    side = "right" if result.score.higher else "left"
    caption = f"Mean and {LEVEL:.0%} confidence interval of each configuration. Grey: single runs. Better: {side}."
    charts: Charts = {"scores": ([_plot_scores(result)], caption)}
    if result.pairs:
        caption = (
            f"Differences with {LEVEL:.0%} confidence intervals. Shaded: the margin, differences too small to matter. "
            "Filled: significant after correction."
        )
        charts["differences"] = ([_plot_differences(result)], caption)
        caption = "Blue, joined by the line: no cheaper configuration is better (Pareto front)."
        figures = [_plot_front(result, cost, names) for cost, names in frontier.pareto_fronts(result).items()]
        charts["fronts"] = (figures, caption)
    if drawn := _plot_curves(result):
        caption = f"Thick: means over runs, with {LEVEL:.0%} confidence bands. Thin: single runs."
        charts["curves"] = (drawn, caption)
    if measures:
        caption = (
            "Condition number κ (1 or more) by layer at the last probe: median over examples or heads, geometric "
            "mean over runs. Score against κ, median over layers: hollow dots are lower bounds."
        )
        figures = [_plot_layers(measure) for measure in measures]
        figures += [_plot_correlation(result, measure) for measure in measures if len(measure.numbers) > 1]
        charts["conditioning"] = (figures, caption)
    return charts


def _plot_scores(result: Comparison) -> Figure:
    """Plot mean scores with intervals and the scores of single runs, one row per configuration, the best on top."""
    shown, quantity = result.configurations[:ROWS], lookup(result.score.name)
    figure, axes = _make_rows([one.name for one in shown], quantity.axis)
    for row, one in enumerate(shown):
        axes.plot(quantity.scale * one.scores, [row - 0.28] * len(one.runs), "o", color=GREY, markersize=3)
        _plot_interval(axes, row, quantity.scale, one.mean, (one.interval.low, one.interval.high), SERIES[0], True)
    return figure


def _plot_differences(result: Comparison) -> Figure:
    """Plot differences with intervals and the margin, one row per pair, those with the best configuration on top."""
    shown, quantity = result.pairs[: ROWS // 2], lookup(result.score.name)
    label = f"difference in {quantity.label}{quantity.points}"
    figure, axes = _make_rows([f"{pair.first} - {pair.second}" for pair in shown], label)
    axes.axvspan(-quantity.scale * result.margin, quantity.scale * result.margin, color=SERIES[2], alpha=0.15, lw=0)
    axes.axvline(0, color=TEXT_COLOR, lw=0.8)
    for row, pair in enumerate(shown):
        ends = (pair.interval.low, pair.interval.high)
        _plot_interval(axes, row, quantity.scale, pair.difference.value, ends, SERIES[1], pair.better is not None)
    return figure


def _make_rows(names: Sequence[str], label: str) -> tuple[Figure, Axes]:
    figure, axes = make_axes(8.6, 1.1 + 0.26 * len(names), label)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), [_shorten(name, 50) for name in names], fontsize=8)
    return figure, axes


def _plot_interval(
    axes: Axes, row: int, scale: float, middle: float, ends: tuple[float, float], color: str, filled: bool
) -> None:
    if math.isfinite(ends[1]):
        axes.plot([scale * end for end in ends], [row, row], color=color, lw=1.6, solid_capstyle="butt")
    axes.plot(scale * middle, row, "o", color=color, markerfacecolor=color if filled else "white", markersize=5)


def _plot_front(result: Comparison, cost: str, on: Sequence[str]) -> Figure:
    """Plot score against cost, with the Pareto front of the configurations `on`."""
    costs = {one.name: median_cost(one, cost) for one in result.configurations}
    figure, axes = _plot_points(result, costs, lookup(cost).axis, SERIES[0], grey=[n for n in costs if n not in on])
    means = {one.name: lookup(result.score.name).scale * one.mean for one in result.configurations}
    axes.step([costs[n] for n in on], [means[n] for n in on], where="post", color=SERIES[0], lw=1.2, ls=":", zorder=1)
    return figure


def _plot_correlation(result: Comparison, measure: Conditioning) -> Figure:
    """Plot the mean score of each configuration against its condition number."""
    label = f"{lookup('condition').label} of {measure.measure.replace('_', ' ')}"
    return _plot_points(result, measure.numbers, label, SERIES[3], hollow=measure.singular)[0]


def _plot_points(
    result: Comparison,
    places: Mapping[str, float],
    label: str,
    color: str,
    grey: Sequence[str] = (),
    hollow: Sequence[str] = (),
) -> tuple[Figure, Axes]:
    """Plot mean scores with their intervals against positive numbers, `places`, on a logarithmic axis."""
    quantity = lookup(result.score.name)
    figure, axes = make_axes(4.6, 3.3, label, quantity.axis)
    shown = [one for one in result.configurations if one.name in places]
    for i, one in enumerate(sorted(shown, key=lambda one: places[one.name])):
        own, mean = GREY if one.name in grey else color, quantity.scale * one.mean
        face = "none" if one.name in hollow else own
        axes.plot(places[one.name], mean, "o", color=own, markerfacecolor=face, markersize=5)
        bottom = top = mean
        if math.isfinite(one.interval.high):
            bottom, top = quantity.scale * one.interval.low, quantity.scale * one.interval.high
            axes.plot([places[one.name]] * 2, [bottom, top], color=own, lw=1.2)
        if len(shown) <= NAMED:  # in turn above and below, so that neighbours do not overlap
            at, shift, side = (bottom, -5, "top") if i % 2 else (top, 5, "bottom")
            place: dict[str, Any] = {"xytext": (0, shift), "textcoords": "offset points", "ha": "center", "va": side}
            axes.annotate(_shorten(one.name, 24), (places[one.name], at), **place, fontsize=7, color=TEXT_COLOR)
    low, high = min(places.values()), max(places.values())
    margin = max((high / low) ** 0.3, 1.3)
    axes.set_xlim(low / margin, high * margin)  # without limits Matplotlib warns of values that are equal
    axes.set_xscale("log")
    axes.margins(y=0.2)
    digits = (1, 2, 5) if high > 4 * low else (1, 2, 3, 5, 7) if high > 1.5 * low else range(1, 10)
    axes.xaxis.set_major_locator(LogLocator(subs=digits, numticks=6))
    axes.xaxis.set_major_formatter(lambda tick, _: format_number(float(tick)))
    axes.xaxis.set_minor_locator(NullLocator())
    return figure, axes


def _plot_curves(result: Comparison) -> list[Figure]:
    """Plot the learning curves of score and loss of all configurations, the best ones in colour."""
    figures = []
    for name in dict.fromkeys((result.score.name, "loss")):
        quantity = lookup(name)
        curves = {one.name: frontier.learning_curve(one, name) for one in result.configurations}
        curves = {one: curve for one, curve in curves.items() if len(curve.steps) > 1}
        if not curves:
            continue
        figure, axes = make_axes(8.6, 4.0, lookup("step").label, quantity.axis)
        for i, (one, curve) in enumerate(curves.items()):
            style = _line_style(i)
            for values in curve.runs if len(curve.runs) > 1 else ():
                axes.plot(curve.steps, quantity.scale * np.array(values), **style, lw=0.6, alpha=0.6)
            label = _shorten(one) if i < NAMED else None
            axes.plot(curve.steps, quantity.scale * np.array(curve.means), **style, lw=1.8, label=label)
        shown = quantity.scale * np.concatenate([values for curve in curves.values() for values in curve.runs])
        margin = 0.05 * float(np.ptp(shown)) + 1e-3 * float(np.abs(shown).max()) or 1.0
        axes.set_ylim(shown.min() - margin, shown.max() + margin)  # bands of two seeds are far wider than the curves
        for i, curve in enumerate([*curves.values()][:NAMED]):
            low, high = quantity.scale * np.array([(x.low, x.high) for x in curve.intervals]).T
            if np.isfinite(low).all():
                axes.fill_between(curve.steps, low, high, color=SERIES[i % len(SERIES)], alpha=0.12, lw=0)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figures.append(figure)
    return figures


def _plot_layers(measure: Conditioning) -> Figure:
    """Plot the condition number of each layer, one line per configuration."""
    figure, axes = make_axes(4.6, 3.3, "layer", lookup("condition").label)
    axes.set_title(measure.measure.replace("_", " "), fontsize=8, color=TEXT_COLOR)
    axes.set_yscale("log")
    known = [value for values in measure.by_layer.values() for value in values if not math.isnan(value)]
    if known:  # before the lines, since Matplotlib warns of values that are equal
        axes.set_ylim(min(known) / 1.5, max(known) * 1.5)
    for i, (name, values) in enumerate(measure.by_layer.items()):
        if not np.isnan(values).all():
            label = _shorten(name, 24) if i < NAMED else None
            layers = range(len(values))
            axes.plot(layers, values, marker="o", markersize=3, label=label, lw=1.2, **_line_style(i))
    axes.set_xlim(-0.5, max(map(len, measure.by_layer.values())) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(measure.by_layer) > 1:
        axes.legend(frameon=False, fontsize=6)
    return figure


def _line_style(i: int) -> dict[str, Any]:
    """Return the style of the line of configuration i: a colour for the first NAMED, dashed when colours repeat."""
    color = SERIES[i % len(SERIES)] if i < NAMED else GREY
    return {"color": color, "ls": "--" if len(SERIES) <= i < NAMED else "-"}


def _shorten(name: str, most: int = 44) -> str:
    """Return a name, shortened to its end, which distinguishes configurations."""
    return literal(name if len(name) <= most else f"…{name[1 - most :]}")
