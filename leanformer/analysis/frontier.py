"""Pareto fronts of score against cost, learning curves, and correlation of score with condition numbers."""

import dataclasses
import math
import statistics as middles
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.comparison import Comparison, RunGroup
from leanformer.analysis.runs import Run
from leanformer.analysis.statistics import Interval


def _total_flops(run: Run) -> float | None:
    flops, steps, examples = (run.cost(name) for name in ("train_flops", "steps", "examples_seen"))
    if examples is None and steps is not None:  # runs of earlier versions did not record the examples
        examples = steps * run.keys["batch_size"]
    return None if flops is None or examples is None else float(flops * examples)


def _step_seconds(run: Run) -> float | None:
    return (run.cost("seconds") or {}).get("steps")


def _peak_memory(run: Run) -> int | None:
    return run.cost("memory_bytes")


# Functions from a run to its cost, by key of `quantities.COSTS`. They return None if the run did not record it.
COST_METRICS: dict[str, Callable[[Run], Any]] = {
    "params": lambda run: run.cost("params"),
    "flops": _total_flops,
    "seconds": _step_seconds,
    "bytes": _peak_memory,
}


def median_cost(shape: RunGroup, currency: str) -> float | None:
    """Return the median of a cost over a configuration's runs; None if it is not known for any run.

    Args:
        shape: configuration.
        currency: key of COST_METRICS: "params", "flops" (training FLOPs of a run), "seconds" (in training steps) or
            "bytes" (peak memory per device).
    """
    costs = [cost for run in shape.runs if (cost := COST_METRICS[currency](run)) is not None]
    return float(middles.median(costs)) if costs else None


def pareto_front(shapes: Sequence[RunGroup], higher: bool, currency: str) -> list[str]:
    """Return the names of the Pareto-optimal configurations, cheapest first; [] if a configuration's cost is not known.

    A configuration is Pareto-optimal if no other has at most its median cost and a mean score at least as good. Of
    configurations with equal cost and score, one is listed.

    Args:
        shapes: configurations.
        higher: True if a higher score is better; otherwise a lower one.
        currency: key of COST_METRICS, as in `median_cost`.
    """
    prices = {shape.name: median_cost(shape, currency) for shape in shapes}
    if None in prices.values():
        return []
    names, best = [], -math.inf
    for shape in sorted(shapes, key=lambda shape: (prices[shape.name], -shape.mean if higher else shape.mean)):
        good = shape.mean if higher else -shape.mean
        if good > best:
            names.append(shape.name)
            best = good
    return names


@dataclasses.dataclass(frozen=True)
class LearningCurve:
    """Learning curve of a configuration: means over its runs at the steps at which all of them were evaluated.

    Attributes:
        steps: training steps in ascending order; empty if the runs have no evaluation step in common.
        means: mean of the metric at each step.
        intervals: 95 % confidence interval of each mean.
    """

    steps: list[int]
    means: list[float]
    intervals: list[Interval]


def learning_curve(shape: RunGroup, metric: str) -> LearningCurve:
    """Return the learning curve of a configuration for `metric`, a name in its evaluation records.

    The curve is empty if the runs have no evaluation step in common.
    """
    by_run = [
        {r["step"]: r[metric] for r in run.records if r["kind"] == "eval" and r.get(metric) is not None}
        for run in shape.runs
    ]
    steps = sorted(set.intersection(*map(set, by_run)))
    scores = [np.array([values[step] for values in by_run]) for step in steps]
    return LearningCurve(steps, [float(s.mean()) for s in scores], [statistics.mean_interval(s) for s in scores])


@dataclasses.dataclass(frozen=True)
class ScoreCorrelation:
    """Rank correlation of the score with a condition number at the last probe of each run, over configurations.

    Attributes:
        measure: name of the measured matrix, such as "attention_output".
        numbers: condition number of each configuration by name: median over layers, geometric mean over runs. Those
            without a condition number are left out.
        singular: names of the configurations with a numerically singular matrix; their number is a lower bound.
        rho: Spearman's correlation of `numbers` and mean scores; NaN if it cannot be computed.
        interval: 95 % confidence interval of `rho`; -1 to 1 with fewer than five configurations, infinite if `rho` is
            NaN.
    """

    measure: str
    numbers: Mapping[str, float]
    singular: list[str]
    rho: float
    interval: Interval


def score_correlations(comparison: Comparison) -> list[ScoreCorrelation]:
    """Return the correlation of the score with each condition number that the last probe of every run has recorded.

    The list is empty if a run has no probe, or if the runs have no measure in common.
    """
    last = {shape.name: [_last_probe(run) for run in shape.runs] for shape in comparison.shapes}
    records = [record for group in last.values() for record in group]
    common = [name for name in records[0] if all(name in record for record in records)]
    means, result = {shape.name: shape.mean for shape in comparison.shapes}, []
    for name in common:
        medians = {shape: [_median_over_layers(record[name]) for record in group] for shape, group in last.items()}
        numbers = {shape: _geometric_mean(values) for shape, values in medians.items()}
        numbers = {shape: number for shape, number in numbers.items() if number is not None}
        singular = [shape for shape, group in last.items() if any(any(record[name]["singular"]) for record in group)]
        rho, interval = statistics.spearman(
            np.array([*numbers.values()]), np.array([means[shape] for shape in numbers])
        )
        result.append(ScoreCorrelation(name, numbers, singular, rho, interval))
    return result


def _last_probe(run: Run) -> dict[str, Any]:
    """Return the condition numbers of a run's last probe; an empty dict without a probe."""
    probes = [record for record in run.records if record["kind"] == "probe"]
    last = probes[-1] if probes else {}
    return {name: values for name, values in last.items() if isinstance(values, dict) and "singular" in values}


def _median_over_layers(record: Mapping[str, Any]) -> float | None:
    values = [value for value in record["median"] if value is not None]
    return middles.median(values) if values else None


def _geometric_mean(values: Any) -> float | None:
    valid = [value for value in values if value is not None and value > 0]
    return middles.geometric_mean(valid) if valid else None
