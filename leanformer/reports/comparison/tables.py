"""Tables of a comparison as text, and its numbers for compare.json."""

import dataclasses
import math
import statistics as middles
from collections.abc import Callable, Sequence
from typing import Any

from leanformer.analysis import frontier
from leanformer.analysis.comparison import SAME, UNKNOWN, Comparison, Pair, RunGroup
from leanformer.analysis.frontier import COST_METRICS, ScoreCorrelation
from leanformer.analysis.statistics import LEVEL, POWER, Interval
from leanformer.costs.count import format_count, format_number
from leanformer.quantities import Quantity, find
from leanformer.runtime import text
from leanformer.training.metrics_log import to_json


SHOWN = 20  # maximal number of rows of a table in a terminal
METHODS = (
    "Confidence intervals are Student's, over the runs of a configuration. Differences are the first configuration "
    "minus the second: paired by seed and by other differing keys, of independent runs (Welch), or with one variance "
    "for all configurations (pooled), as in the column test. Different: p below 0.05 after Holm's correction for all "
    "pairs; intervals are not corrected, so that one may exclude 0 beside an undecided verdict. Equivalent: two "
    "one-sided tests (TOST) at 5 %, with the same correction. "
    f"Runs needed: for {POWER:.0%} power, if there is no difference and the variance is as observed. "
    "The mean of the best of many configurations is optimistic, because it was selected."
)
Number = Callable[[float], str]
RIVALS = 3  # maximal number of names in a sentence


def number(result: Comparison) -> Number:
    """Return a function that formats the metric with enough digits to distinguish these configurations.

    Fractions whose unit is % are formatted in percent.
    """
    scale = find(result.score.name).scale
    halves = [half for shape in result.shapes if math.isfinite(half := shape.interval.high - shape.mean)]
    smallest = scale * min(result.margin, *([middles.median(halves)] if halves else []), math.inf) or 1.0
    decimals = min(8, max(0, 1 - math.floor(math.log10(smallest))))
    return lambda value: f"{scale * value:.{decimals}f}"


def score_words(result: Comparison) -> Quantity:
    """Return name, unit and description of the compared score; whether higher is better is that of the comparison."""
    return dataclasses.replace(find(result.score.name), higher=result.score.higher)


def points(result: Comparison) -> str:
    """Return the unit of a difference of scores, with a space before it; empty if they have none."""
    unit = find(result.score.name).unit
    return {"%": " points", "": ""}.get(unit, f" {unit}")


def with_interval(shape: RunGroup, show: Number) -> str:
    """Format the mean score of a configuration with the half-width of its confidence interval, as "MEAN ± HALF".

    Args:
        shape: configuration.
        show: function that formats a score, from `number`.
    """
    half = (shape.interval.high - shape.interval.low) / 2
    return f"{show(shape.mean)} ± {show(half)}" if math.isfinite(half) else f"{show(shape.mean)} (no interval)"


def between(interval: Interval, show: Number) -> str:
    """Format an interval as "LOW to HIGH" with the function `show`, or as "unknown" if it is infinite."""
    return f"{show(interval.low)} to {show(interval.high)}" if math.isfinite(interval.high) else "unknown"


def fronts(result: Comparison) -> dict[str, list[str]]:
    """Return the names of the Pareto-optimal configurations by cost metric, for the metrics that all runs have."""
    all_of = {name: frontier.pareto_front(result.shapes, result.score.higher, name) for name in COST_METRICS}
    return {name: names for name, names in all_of.items() if names}


def shapes(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of configurations.

    The columns are name, number of runs, mean score with interval, costs, and the costs for which it is Pareto-optimal.
    """
    on, show = fronts(result), number(result)
    rows = []
    for shape in result.shapes:
        prices = [frontier.median_cost(shape, name) for name in COST_METRICS]
        shown = ["-" if price is None else format_number(float(price)) for price in prices]
        fronts_of = [find(name).label for name, names in on.items() if shape.name in names]
        best_in = "all costs" if len(fronts_of) == len(on) > 0 else ", ".join(fronts_of)
        rows.append([shape.name, str(len(shape.runs)), with_interval(shape, show), *shown, best_in])
    costs = [find(name).axis for name in COST_METRICS]
    return ["configuration", "runs", find(result.score.name).axis, *costs, "Pareto-optimal in"], rows


def pairs(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of pairs: difference, interval, p value, test and verdict."""
    show = number(result)
    rows = [
        [
            f"{pair.first} - {pair.second}",
            f"{'+' if pair.difference.value > 0 else ''}{show(pair.difference.value)}",
            between(pair.interval, show),
            f"{pair.p_holm:.3g}",
            pair.difference.method,
            pair.verdict,
        ]
        for pair in result.pairs
    ]
    unit = points(result)
    difference = f"difference,{unit}" if unit else "difference"
    return ["pair", difference, f"{LEVEL:.0%} interval", "p (Holm)", "test", "verdict"], rows


def correlations(result: Sequence[ScoreCorrelation]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of condition numbers, with their rank correlation with the score.

    The columns are matrix, number of configurations, Spearman's ρ, its interval ("too few" if it is -1 to 1 or wider),
    and the number of configurations whose condition number is a lower bound.
    """
    rows = []
    for measure in result:
        unbounded = measure.interval.high - measure.interval.low >= 2
        interval = "too few" if unbounded else between(measure.interval, lambda value: f"{value:+.2f}")
        rho = "-" if math.isnan(measure.rho) else f"{measure.rho:+.2f}"
        bounds = f"{len(measure.singular)} of {len(measure.numbers)}" if measure.singular else ""
        rows.append([measure.measure.replace("_", " "), str(len(measure.numbers)), rho, interval, bounds])
    return ["condition number of", "configurations", "Spearman's ρ", f"{LEVEL:.0%} interval", "lower bounds"], rows


def headline(result: Comparison) -> str:
    """Return the result in a few sentences: the best configuration, its difference from another, and pairs decided."""
    show, best, unit = number(result), result.shapes[0], find(result.score.name).unit
    sentences = [
        f"Best mean: {best.name}, {find(result.score.name).label} {with_interval(best, show)}{unit and f' {unit}'}."
    ]
    if result.pairs:
        telling = _most_telling(result)
        sentences += [_describe_rivals(result, telling), describe_pair(result, telling)]
    if len(result.pairs) > 1:
        differ = sum(pair.better is not None for pair in result.pairs)
        same = sum(pair.same == SAME for pair in result.pairs)
        open_ = sum(pair.same == UNKNOWN and pair.better is None for pair in result.pairs)
        sentences.append(
            f"Of {len(result.pairs)} pairs {differ} differ, {same} are equivalent within "
            f"±{show(result.margin)}{points(result)}, {open_} are undecided."
        )
    return " ".join(filter(None, sentences))


def _describe_rivals(result: Comparison, but: Pair) -> str:
    """Return the sentence on configurations that are not shown to be worse than the best, apart from the pair `but`."""
    best, rivals = result.shapes[0], []
    for pair in result.pairs:
        if best.name not in (pair.first, pair.second) or pair.better is not None or pair is but:
            continue
        other = next(s for s in result.shapes if s.name in (pair.first, pair.second) and s is not best)
        prices = [frontier.median_cost(shape, "params") for shape in (other, best)]
        ratio = f" ({_times(prices[0] / prices[1])} parameters)" if prices[0] and prices[1] else ""
        rivals.append(f"{other.name}{ratio}")
    more = f" and {len(rivals) - RIVALS} more" if len(rivals) > RIVALS else ""
    return f"Not shown to be worse: {', '.join(rivals[:RIVALS])}{more}." if rivals else ""


def _most_telling(result: Comparison) -> Pair:
    """Return the pair of the best configuration with the cheapest other one; the first pair without costs."""
    best = result.shapes[0].name
    others = {p.second if p.first == best else p.first: p for p in result.pairs if best in (p.first, p.second)}
    prices = {s.name: frontier.median_cost(s, "params") for s in result.shapes if s.name in others}
    known = {name: price for name, price in prices.items() if price is not None}
    return others[min(known, key=lambda name: known[name])] if known else result.pairs[0]


def describe_pair(result: Comparison, pair: Pair) -> str:
    """Return the difference of two configurations in one sentence, with its interval and its cost in parameters."""
    show, unit, ends = number(result), points(result), (pair.interval.low, pair.interval.high)
    gain = (pair.difference.value > 0) == result.score.higher
    better, other = (pair.first, pair.second) if gain else (pair.second, pair.first)
    low, high = sorted(ends if pair.difference.value > 0 else [-end for end in ends])
    interval = f"{LEVEL:.0%} interval {show(low)} to {show(high)}" if math.isfinite(high) else "no interval"
    costs = {s.name: frontier.median_cost(s, "params") for s in result.shapes}
    price, cheaper = costs[better], costs[other]
    ratio = f", with {_times(price / cheaper)} parameters" if price and cheaper else ""
    amount = f"{show(abs(pair.difference.value))}{unit} ({interval}){ratio}"
    if pair.better:
        return f"{better} beats {other} by {amount}."
    if pair.same == SAME:
        return f"{better} and {other} are equivalent within ±{show(result.margin)}{unit}: they differ by {amount}."
    needed = f"; if they are equal, about {pair.needed} runs each would show it" if pair.needed else ""
    return f"No difference is shown between {better} and {other}: the first is ahead by {amount}{needed}."


def _times(ratio: float) -> str:
    return "the same number of" if abs(ratio - 1) < 0.005 else f"{round(ratio, 2):g} times the"


def format_text(result: Comparison, conditioning: Sequence[ScoreCorrelation]) -> str:
    """Return a comparison as text for a terminal: result, tables, and warnings.

    Args:
        result: comparison.
        conditioning: correlations of the score with condition numbers; empty for none.
    """
    runs = format_count(sum(len(shape.runs) for shape in result.shapes), "run")
    title = f"{runs} of {format_count(len(result.shapes), 'configuration')}. {score_words(result).sentence}"
    blocks = [text.wrap(f"{title}\n{headline(result)}"), align_columns(*shapes(result))]
    if result.pairs:
        margin = text.wrap(f"Margin ±{number(result)(result.margin)}{points(result)}: {result.margin_by}.")
        blocks += [f"{margin}\n{align_columns(*pairs(result))}"]
    if conditioning:
        blocks += [align_columns(*correlations(conditioning))]
    blocks += [text.wrap(f"WARNING: not counted: {name}: {reason}.") for name, reason in result.left_out.items()]
    blocks += [text.wrap(f"WARNING: {note}") for note in result.notes]
    return "\n\n".join(blocks) + "\n"


def align_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal, with at most SHOWN rows and a line about the others."""
    more = [f"  ... and {len(rows) - SHOWN} more in compare.json"] if len(rows) > SHOWN else []
    return "\n".join([text.table(head, rows[:SHOWN]), *more])


def to_plain(result: Comparison, conditioning: Sequence[ScoreCorrelation]) -> dict[str, Any]:
    """Return the content of compare.json: a comparison as plain values; unknown and infinite ones are None.

    Args:
        result: comparison.
        conditioning: correlations of the score with condition numbers; empty for none.
    """
    content = {
        "metric": result.score.name,
        "higher_is_better": result.score.higher,
        "level": LEVEL,
        "margin": result.margin,
        "margin_by": result.margin_by,
        "correction": "Holm for p values, Bonferroni for simultaneous intervals",
        "currencies": {name: find(name).what for name in COST_METRICS},
        "shapes": [
            {
                "name": shape.name,
                "keys": dict(shape.keys),
                "mean": shape.mean,
                "interval": dataclasses.astuple(shape.interval),
                "seeds": [run.seed for run in shape.runs],
                "scores": [run.value for run in shape.runs],
                "prices": {name: frontier.median_cost(shape, name) for name in COST_METRICS},
                "runs": [str(run.workdir) for run in shape.runs],
            }
            for shape in result.shapes
        ],
        "pairs": [_pair(pair) for pair in result.pairs],
        "fronts": fronts(result),
        "conditioning": [
            dataclasses.asdict(measure) | {"interval": dataclasses.astuple(measure.interval)}
            for measure in conditioning
        ],
        "left_out": dict(result.left_out),
        "notes": result.notes,
    }
    return to_json(content)


def _pair(pair: Pair) -> dict[str, Any]:
    d = pair.difference
    return {
        "first": pair.first,
        "second": pair.second,
        "difference": d.value,
        "method": d.method,
        "standard_error": d.error,
        "degrees_of_freedom": d.df,
        "interval": dataclasses.astuple(pair.interval),
        "simultaneous_interval": dataclasses.astuple(pair.simultaneous_interval),
        "p": pair.p,
        "p_holm": pair.p_holm,
        "within_margin": pair.same,
        "seeds_needed": pair.needed,
        "better": pair.better,
        "verdict": pair.verdict,
    }
