"""A comparison as tables of text and as plain numbers for compare.json."""

import dataclasses
import math
import statistics as middles
from collections.abc import Callable, Sequence
from typing import Any

from leanformer.analysis import frontier
from leanformer.analysis.comparison import SAME, UNKNOWN, Comparison, Pair, Shape
from leanformer.analysis.frontier import CURRENCIES, Conditioning
from leanformer.analysis.statistics import LEVEL, POWER, Interval
from leanformer.costs.count import human


SHOWN = 20  # rows of a table in a terminal
METHODS = (
    "Intervals are Student's over seeds; differences are the first shape's minus the second's: paired by seed, of "
    "independent seeds (Welch), or with one spread for all shapes (pooled), as the table says. Different: p under 0.05 "
    "after Holm's correction for all pairs. Within the margin: two one-sided tests (TOST) at 5 %, corrected likewise. "
    f"Seeds needed: for {POWER:.0%} power, were there no difference and the spread as it is here. "
    "The best mean of many is flattered by having been chosen."
)
Number = Callable[[float], str]


def number(found: Comparison) -> Number:
    """How the metric is printed: with digits enough to tell these shapes apart."""
    halves = [half for shape in found.shapes if math.isfinite(half := shape.interval.high - shape.mean)]
    smallest = min(found.margin, *([middles.median(halves)] if halves else []), math.inf) or 1.0
    decimals = min(8, max(0, 1 - math.floor(math.log10(smallest))))
    return lambda value: f"{value:.{decimals}f}"


def with_interval(shape: Shape, show: Number) -> str:
    """Mean and half the width of its interval."""
    half = (shape.interval.high - shape.interval.low) / 2
    return f"{show(shape.mean)} ± {show(half)}" if math.isfinite(half) else f"{show(shape.mean)} (no interval)"


def between(interval: Interval, show: Number) -> str:
    """From where to where."""
    return f"{show(interval.low)} to {show(interval.high)}" if math.isfinite(interval.high) else "unknown"


def fronts(found: Comparison) -> dict[str, list[str]]:
    """Names of the shapes that nothing beats, by currency; of those currencies that all runs have."""
    all_of = {name: frontier.front(found.shapes, found.score.higher, name) for name in CURRENCIES}
    return {name: names for name, names in all_of.items() if names}


def shapes(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """A head and a row a shape: its name, seeds, prices, mean with interval, and the fronts that it is on."""
    on, show = fronts(found), number(found)
    rows = []
    for shape in found.shapes:
        prices = [frontier.price(shape, name) for name in CURRENCIES]
        shown = ["-" if price is None else human(float(price)) for price in prices]
        fronts_of = ", ".join(name for name, names in on.items() if shape.name in names)
        rows.append([shape.name, str(len(shape.runs)), *shown, with_interval(shape, show), fronts_of])
    return ["shape", "seeds", *CURRENCIES, found.score.name, "on the front of"], rows


def pairs(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """A head and a row a pair."""
    show = number(found)
    rows = [
        [
            f"{pair.first} - {pair.second}",
            f"{'+' if pair.found.value > 0 else ''}{show(pair.found.value)}",
            between(pair.interval, show),
            f"{pair.p_holm:.3g}",
            pair.found.method,
            pair.same,
            pair.verdict,
        ]
        for pair in found.pairs
    ]
    within = f"within ±{show(found.margin)}"
    return ["difference of", "mean", f"{LEVEL:.0%} interval", "p (Holm)", "by", within, "verdict"], rows


def correlations(found: Sequence[Conditioning]) -> tuple[list[str], list[list[str]]]:
    """A head and a row a condition number: its rank correlation with the score over shapes."""
    rows = []
    for each in found:
        unsure = each.interval.high - each.interval.low >= 2
        shown = "too few shapes" if unsure else between(each.interval, lambda value: f"{value:+.2f}")
        rho = "-" if math.isnan(each.rho) else f"{each.rho:+.2f}"
        bounds = f"{len(each.singular)} of {len(each.numbers)}" if each.singular else ""
        rows.append([each.measure, str(len(each.numbers)), rho, shown, bounds])
    return ["condition number of", "shapes", "Spearman's ρ", f"{LEVEL:.0%} interval", "bounds only"], rows


def headline(found: Comparison) -> str:
    """The answer in a sentence or two."""
    show, best = number(found), found.shapes[0]
    said = f"Best mean: {best.name}, {found.score.name} {with_interval(best, show)}."
    if not found.pairs:
        return said
    differ = sum(pair.better is not None for pair in found.pairs)
    same = sum(pair.same == SAME for pair in found.pairs)
    open_ = sum(pair.same == UNKNOWN and pair.better is None for pair in found.pairs)
    return (
        f"{said} Of {len(found.pairs)} pairs {differ} differ, {same} are within ±{show(found.margin)} of one another, "
        f"and of {open_} the seeds are too few to tell."
    )


def text(found: Comparison, conditioning: Sequence[Conditioning]) -> str:
    """All of it for a terminal."""
    direction = "higher" if found.score.higher else "lower"
    runs = sum(len(shape.runs) for shape in found.shapes)
    blocks = [
        f"{found.score.name} ({direction} is better) of {runs} runs of {len(found.shapes)} shapes\n{headline(found)}",
        aligned(*shapes(found)),
    ]
    if found.pairs:
        blocks += [f"Margin ±{number(found)(found.margin)}: {found.margin_by}.\n{aligned(*pairs(found))}"]
    if conditioning:
        blocks += [aligned(*correlations(conditioning))]
    blocks += [f"*** NOT COUNTED: {name}: {reason}." for name, reason in found.left_out.items()]
    blocks += [f"*** {note}" for note in found.notes]
    return "\n\n".join(blocks) + "\n"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal; of many rows the first ones."""
    shown = [head, *rows[:SHOWN]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    more = [f"  ... and {len(rows) - SHOWN} more in compare.json"] if len(rows) > SHOWN else []
    return "\n".join([line.rstrip() for line in lines] + more)


def plain(found: Comparison, conditioning: Sequence[Conditioning]) -> dict[str, Any]:
    """All of it as numbers, ready for JSON; what is unknown is None."""
    content = {
        "metric": found.score.name,
        "higher_is_better": found.score.higher,
        "level": LEVEL,
        "margin": found.margin,
        "margin_by": found.margin_by,
        "correction": "Holm for p values, Bonferroni for intervals together",
        "currencies": {currency.name: currency.what for currency in CURRENCIES.values()},
        "shapes": [
            {
                "name": shape.name,
                "keys": dict(shape.keys),
                "mean": shape.mean,
                "interval": dataclasses.astuple(shape.interval),
                "seeds": [run.seed for run in shape.runs],
                "scores": [run.value for run in shape.runs],
                "prices": {name: frontier.price(shape, name) for name in CURRENCIES},
                "runs": [str(run.workdir) for run in shape.runs],
            }
            for shape in found.shapes
        ],
        "pairs": [_pair(pair) for pair in found.pairs],
        "fronts": fronts(found),
        "conditioning": [
            dataclasses.asdict(each) | {"interval": dataclasses.astuple(each.interval)} for each in conditioning
        ],
        "left_out": dict(found.left_out),
        "notes": found.notes,
    }
    return finite(content)


def _pair(pair: Pair) -> dict[str, Any]:
    d = pair.found
    return {
        "first": pair.first,
        "second": pair.second,
        "difference": d.value,
        "method": d.method,
        "standard_error": d.error,
        "degrees_of_freedom": d.df,
        "interval": dataclasses.astuple(pair.interval),
        "interval_together": dataclasses.astuple(pair.together),
        "p": pair.p,
        "p_holm": pair.p_holm,
        "within_margin": pair.same,
        "seeds_needed": pair.needed,
        "better": pair.better,
        "verdict": pair.verdict,
    }


def finite(tree: Any) -> Any:
    """A tree of plain values with None where a number is not finite, as JSON has it."""
    if isinstance(tree, dict):
        return {name: finite(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(item) for item in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
