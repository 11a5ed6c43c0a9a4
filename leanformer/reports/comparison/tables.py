"""Tables and sentences of a comparison, and its numbers for compare.json."""

import dataclasses
import math
import statistics as middles
from collections.abc import Callable, Sequence
from typing import Any

from leanformer.analysis import frontier
from leanformer.analysis.comparison import SAME, Comparison, Configuration, Pair, Trend
from leanformer.analysis.frontier import COST_METRICS, Conditioning
from leanformer.analysis.statistics import LEVEL, POWER, Interval
from leanformer.costs.count import format_count, format_number
from leanformer.quantities import find
from leanformer.runtime import text
from leanformer.training.run_files import to_json


ROWS = 20  # most rows of a table; compare.json has all
METHODS = (
    "Confidence intervals are Student's, over the runs of a configuration. Differences are the first configuration "
    "minus the second: paired by seed and by other differing keys, of independent runs (Welch), or with one variance "
    "for all configurations (pooled), as in the column test. Different: p below 0.05 after Holm's correction for all "
    "pairs; intervals are not corrected. Equivalent: two one-sided tests (TOST) at 5 %, with the same correction. "
    f"Runs needed: for {POWER:.0%} power, with the observed variance, to show the observed difference or, if there is "
    "none, equivalence. Slopes: least squares on the logarithm, with a level for each seed and for all other keys. "
    "The mean of the best of many configurations is optimistic, because it was selected."
)
Number = Callable[[float], str]
Table = tuple[list[str], list[list[str]]]  # head and rows


def number(result: Comparison) -> Number:
    """Return a function that formats the metric with enough digits to distinguish these configurations.

    Fractions whose unit is % are formatted in percent.
    """
    scale = find(result.score.name).scale
    halves = [half for one in result.configurations if math.isfinite(half := one.interval.high - one.mean)]
    smallest = scale * min(result.margin, *([middles.median(halves)] if halves else []), math.inf) or 1.0
    decimals = min(8, max(0, 1 - math.floor(math.log10(smallest))))
    return lambda value: f"{scale * value:.{decimals}f}"


def points(result: Comparison) -> str:
    """Return the unit of a difference of scores, with a space before it; empty if they have none."""
    unit = find(result.score.name).unit
    return {"%": " points", "": ""}.get(unit, f" {unit}")


def with_interval(configuration: Configuration, show: Number) -> str:
    """Format the mean score of a configuration with the half-width of its confidence interval, as "MEAN ± HALF"."""
    half = (configuration.interval.high - configuration.interval.low) / 2
    return f"{show(configuration.mean)} ± {show(half)}" if math.isfinite(half) else show(configuration.mean)


def between(interval: Interval, show: Number) -> str:
    """Format an interval as "LOW to HIGH" with the function `show`, or as "unknown" if it is infinite."""
    return f"{show(interval.low)} to {show(interval.high)}" if math.isfinite(interval.high) else "unknown"


def fronts(result: Comparison) -> dict[str, list[str]]:
    """Return the names of the Pareto-optimal configurations by cost metric."""
    return {name: frontier.pareto_front(result.configurations, result.score.higher, name) for name in COST_METRICS}


def configurations(result: Comparison) -> Table:
    """Return the table of configurations: name, runs, mean with interval, costs, costs for which it is on the front."""
    on, show, rows = fronts(result), number(result), []
    for one in result.configurations:
        costs = [format_number(frontier.median_cost(one, name)) for name in COST_METRICS]
        best_in = [find(name).label for name, names in on.items() if one.name in names]
        front = "all costs" if len(best_in) == len(on) else ", ".join(best_in)
        rows.append([one.name, str(len(one.runs)), with_interval(one, show), *costs, front])
    costs = [find(name).axis for name in COST_METRICS]
    return ["configuration", "runs", find(result.score.name).axis, *costs, "Pareto-optimal in"], rows


def pairs(result: Comparison) -> Table:
    """Return the table of pairs: difference, interval, p value, test, verdict, and the runs that would decide."""
    show = number(result)
    rows = [
        [
            f"{pair.first} - {pair.second}",
            f"{'+' if pair.difference.value > 0 else ''}{show(pair.difference.value)}",
            between(pair.interval, show),
            f"{pair.p_holm:.3g}",
            pair.difference.method,
            pair.verdict,
            f"{pair.runs_to_differ or '-'} / {pair.runs_to_equate or '-'}",
        ]
        for pair in result.pairs
    ]
    unit = points(result)
    difference = f"difference,{unit}" if unit else "difference"
    head = ["pair", difference, f"{LEVEL:.0%} interval", "p (Holm)", "test", "verdict", "runs to differ / equal"]
    return head, rows


def conditioning(measures: Sequence[Conditioning]) -> Table:
    """Return the table of condition numbers, with their rank correlation with the score.

    The columns are matrix, number of configurations, Spearman's ρ, its interval ("too few" if it is -1 to 1 or wider),
    and the number of configurations whose condition number is a lower bound.
    """
    rows = []
    for measure in measures:
        unbounded = measure.interval.high - measure.interval.low >= 2
        interval = "too few" if unbounded else between(measure.interval, lambda value: f"{value:+.2f}")
        rho = "-" if math.isnan(measure.rho) else f"{measure.rho:+.2f}"
        bounds = f"{len(measure.singular)} of {len(measure.numbers)}" if measure.singular else ""
        rows.append([measure.measure.replace("_", " "), str(len(measure.numbers)), rho, interval, bounds])
    return ["condition number of", "configurations", "Spearman's ρ", f"{LEVEL:.0%} interval", "lower bounds"], rows


def headline(result: Comparison) -> list[str]:
    """Return the result in a few sentences: trends, the best configuration, and its difference from the cheapest."""
    show, best, quantity = number(result), result.configurations[0], find(result.score.name)
    better = "higher" if result.score.higher else "lower"
    lines = [_describe_trend(result, trend) for trend in result.trends]
    unit = f" {quantity.unit}" * bool(quantity.unit)
    lines.append(f"Best {quantity.label} ({better} is better): {best.name}, {with_interval(best, show)}{unit}.")
    if result.pairs:
        cheapest = min(result.configurations, key=lambda one: (one is best, frontier.median_cost(one, "params")))
        names = {best.name, cheapest.name}
        told = next((pair for pair in result.pairs if {pair.first, pair.second} == names), result.pairs[0])
        lines.append(describe_pair(result, told))
    if len(result.pairs) > 1:
        differ = sum(pair.better is not None for pair in result.pairs)
        same = sum(pair.same == SAME for pair in result.pairs)
        undecided = sum(pair.undecided for pair in result.pairs)
        lines.append(
            f"Of {len(result.pairs)} pairs {differ} differ, {same} are equivalent within "
            f"±{show(result.margin)}{points(result)}, {undecided} are undecided."
        )
    return lines


def _describe_trend(result: Comparison, trend: Trend) -> str:
    show, name = number(result), trend.key.rpartition(".")[2]
    interval = trend.slope.interval()
    known = f"{LEVEL:.0%} interval {between(interval, show)}" if math.isfinite(interval.high) else "no interval"
    changes = [f"{key.rpartition('.')[2]} goes from {low} to {high}" for key, (low, high) in trend.moving.items()]
    while_ = f", while {' and '.join(changes)}" if changes else ""
    sign = "+" if trend.slope.value > 0 else ""
    return (
        f"Per doubling of {name} ({trend.low:g} to {trend.high:g}) the {find(result.score.name).label} changes by "
        f"{sign}{show(trend.slope.value)}{points(result)} ({known}){while_}. {name}={trend.high:g} has "
        f"{_times(trend.params)} parameters of {name}={trend.low:g}."
    )


def describe_pair(result: Comparison, pair: Pair) -> str:
    """Return the difference of two configurations in one sentence, with its interval and its cost in parameters."""
    show, unit, ends = number(result), points(result), (pair.interval.low, pair.interval.high)
    gain = (pair.difference.value > 0) == result.score.higher
    better, other = (pair.first, pair.second) if gain else (pair.second, pair.first)
    low, high = sorted(ends if pair.difference.value > 0 else [-end for end in ends])
    interval = f"{LEVEL:.0%} interval {show(low)} to {show(high)}" if math.isfinite(high) else "no interval"
    costs = {one.name: frontier.median_cost(one, "params") for one in result.configurations}
    ratio = f"with {_times(costs[better] / costs[other])} parameters"
    amount = f"{show(abs(pair.difference.value))}{unit} ({interval}), {ratio}"
    if pair.better:
        return f"{better} beats {other} by {amount}."
    if pair.same == SAME:
        return f"{better} and {other} are equivalent within ±{show(result.margin)}{unit}: they differ by {amount}."
    number_of = pair.runs_to_differ
    needed = f" About {number_of} runs of each would show a difference of this size." if number_of else ""
    if pair.interval.contains(0):
        return f"No difference is shown between {better} and {other}: the first is ahead by {amount}.{needed}"
    correction = f"significant, but not after correction for {len(result.pairs)} pairs"
    return f"{better} is ahead of {other} by {amount}: {correction}.{needed}"


def _times(ratio: float) -> str:
    return "the same number of" if abs(ratio - 1) < 0.005 else f"{round(ratio, 2):g} times the"


def describe_runs(result: Comparison) -> str:
    """Return what was compared: number of runs, models, data and length."""
    runs = [run for one in result.configurations for run in one.runs]
    keys, steps = runs[0].keys, sorted({run.summary["steps"] for run in runs})
    models = " and ".join(sorted({str(run.keys.get("model.name")) for run in runs}))
    length = " to ".join(f"{end:,}" for end in dict.fromkeys((steps[0], steps[-1])))
    return (
        f"{format_count(len(runs), 'run')} of {format_count(len(result.configurations), 'configuration')} of {models} "
        f"on {keys.get('data.name')}, {keys.get('data.eval_split')}, {length} steps each."
    )


def list_warnings(result: Comparison) -> list[str]:
    """Return the runs that are not counted, and other limits of the conclusions."""
    return [*(f"Not counted: {name}: {reason}." for name, reason in result.left_out.items()), *result.notes]


def format_text(result: Comparison, measures: Sequence[Conditioning]) -> str:
    """Return a comparison as text for a terminal: result, tables, and warnings."""
    margin = f"Margin ±{number(result)(result.margin)}{points(result)}: {result.margin_by}."
    blocks = [text.wrap("\n".join([describe_runs(result), *headline(result)])), align_columns(*configurations(result))]
    blocks += [f"{text.wrap(margin)}\n{align_columns(*pairs(result))}"] if result.pairs else []
    blocks += [align_columns(*conditioning(measures))] if measures and len(result.configurations) > 1 else []
    blocks += [text.wrap(f"WARNING: {note}") for note in list_warnings(result)]
    return "\n\n".join(blocks) + "\n"


def align_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal, with at most ROWS rows and a line about the others."""
    more = [f"  ... and {len(rows) - ROWS} more in compare.json"] if len(rows) > ROWS else []
    return "\n".join([text.table(head, rows[:ROWS]), *more])


def to_plain(result: Comparison, measures: Sequence[Conditioning]) -> dict[str, Any]:
    """Return the content of compare.json: a comparison as plain values; unknown and infinite ones are None."""
    return to_json(
        {
            "metric": result.score.name,
            "higher_is_better": result.score.higher,
            "level": LEVEL,
            "margin": result.margin,
            "correction": "Holm",
            "configurations": [
                {
                    "name": one.name,
                    "keys": dict(one.keys),
                    "mean": one.mean,
                    "interval": dataclasses.astuple(one.interval),
                    "seeds": [run.seed for run in one.runs],
                    "scores": [run.value for run in one.runs],
                    "costs": {name: frontier.median_cost(one, name) for name in COST_METRICS},
                    "runs": [str(run.workdir) for run in one.runs],
                }
                for one in result.configurations
            ],
            "pairs": [dataclasses.asdict(pair) | {"verdict": pair.verdict} for pair in result.pairs],
            "trends": [
                dataclasses.asdict(trend) | {"interval": dataclasses.astuple(trend.slope.interval())}
                for trend in result.trends
            ],
            "fronts": fronts(result),
            "conditioning": [dataclasses.asdict(measure) for measure in measures],
            "warnings": list_warnings(result),
        }
    )
