"""What a score costs, and which shapes nothing beats; learning curves; condition numbers beside the score."""

import dataclasses
import math
import statistics as middles
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.comparison import Comparison, Shape
from leanformer.analysis.runs import Run
from leanformer.analysis.statistics import Interval


@dataclasses.dataclass(frozen=True)
class Currency:
    """What a shape can be charged in. `of` gives None of a run from before it was written down, and, where the machine
    was shared, of one of several trained together."""

    name: str
    unit: str
    what: str
    of: Callable[[Run], Any]


def _whole_run(run: Run) -> float | None:
    each, steps, examples = (run.cost(name) for name in ("train_flops", "steps", "examples_seen"))
    if examples is None and steps is not None:  # of a run from before that was written down
        examples = steps * run.keys["batch_size"]
    return None if each is None or examples is None else float(each * examples)


def _stepping(run: Run) -> float | None:
    return (run.cost("seconds") or {}).get("steps") if run.together == 1 else None


def _memory(run: Run) -> int | None:
    return run.cost("memory_bytes") if run.together == 1 else None


CURRENCIES = {
    currency.name: currency
    for currency in (
        Currency("params", "parameters", "parameters, embeddings and head too", lambda run: run.cost("params")),
        Currency("flops", "FLOP", "training FLOPs of the whole run, attention's T² products counted", _whole_run),
        Currency("seconds", "s", "seconds in training steps, on the machine the runs were made on", _stepping),
        Currency("bytes", "B", "peak memory of a device, by the compiled step", _memory),
    )
}


def price(shape: Shape, currency: str) -> float | None:
    """The median over a shape's runs."""
    found = [cost for run in shape.runs if (cost := CURRENCIES[currency].of(run)) is not None]
    return float(middles.median(found)) if found else None


def front(shapes: Sequence[Shape], higher: bool, currency: str) -> list[str]:
    """Names, cheapest first, of shapes whose mean no shape at the same or a lower price reaches; none where a shape
    has no price."""
    prices = {shape.name: price(shape, currency) for shape in shapes}
    if None in prices.values():
        return []
    kept, best = [], -math.inf
    for shape in sorted(shapes, key=lambda shape: (prices[shape.name], -shape.mean if higher else shape.mean)):
        good = shape.mean if higher else -shape.mean
        if good > best:
            kept.append(shape.name)
            best = good
    return kept


@dataclasses.dataclass(frozen=True)
class Curve:
    """Means over the seeds of a shape at the steps where all of them were evaluated."""

    steps: list[int]
    means: list[float]
    intervals: list[Interval]


def curve(shape: Shape, metric: str) -> Curve:
    """The learning curve of a shape; without points where its runs have no evaluation in common."""
    each = [
        {r["step"]: r[metric] for r in run.records if r["kind"] == "eval" and r.get(metric) is not None}
        for run in shape.runs
    ]
    steps = sorted(set.intersection(*map(set, each)))
    scores = [np.array([of_run[step] for of_run in each]) for step in steps]
    return Curve(steps, [float(s.mean()) for s in scores], [statistics.mean_interval(s) for s in scores])


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """A condition number, at the last probe of each run, beside the score.

    Attributes:
        numbers: of each shape by name: the median over layers, and of its runs the geometric mean.
        singular: shapes with a matrix singular in float32, whose number is a bound.
        rho: Spearman's rank correlation with the mean score over the shapes, with its interval.
    """

    measure: str
    numbers: Mapping[str, float]
    singular: list[str]
    rho: float
    interval: Interval


def conditioning(found: Comparison) -> list[Conditioning]:
    """One for each condition number that every run has recorded."""
    last = {shape.name: [_last_probe(run) for run in shape.runs] for shape in found.shapes}
    records = [record for each in last.values() for record in each]
    common = [name for name in records[0] if all(name in record for record in records)]
    means, result = {shape.name: shape.mean for shape in found.shapes}, []
    for name in common:
        numbers = {shape: _geometric(_over_layers(record[name]) for record in each) for shape, each in last.items()}
        numbers = {shape: number for shape, number in numbers.items() if number is not None}
        singular = [shape for shape, each in last.items() if any(any(record[name]["singular"]) for record in each)]
        rho, interval = statistics.spearman(
            np.array([*numbers.values()]), np.array([means[shape] for shape in numbers])
        )
        result.append(Conditioning(name, numbers, singular, rho, interval))
    return result


def _last_probe(run: Run) -> dict[str, Any]:
    """The condition numbers of the last probe of a run; none without one."""
    probes = [record for record in run.records if record["kind"] == "probe"]
    found = probes[-1] if probes else {}
    return {name: figures for name, figures in found.items() if isinstance(figures, dict) and "singular" in figures}


def _over_layers(figures: Mapping[str, Any]) -> float | None:
    known = [value for value in figures["median"] if value is not None]
    return middles.median(known) if known else None


def _geometric(values: Any) -> float | None:
    known = [value for value in values if value is not None and value > 0]
    return middles.geometric_mean(known) if known else None
