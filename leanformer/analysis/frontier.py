"""Pareto fronts of score against cost, learning curves, and correlation of score with condition numbers."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.comparison import COST_METRICS, Comparison, Configuration, median_cost
from leanformer.analysis.runs import Run
from leanformer.analysis.statistics import Interval


def pareto_front(configurations: Sequence[Configuration], higher: bool, cost: str) -> list[str]:
    """Return the names of the Pareto-optimal configurations, cheapest first.

    A configuration is Pareto-optimal if no other has at most its median cost and a mean score at least as good. Of
    configurations with equal cost and score, one is listed.

    Args:
        configurations: configurations, such as `Comparison.configurations`.
        higher: True if a higher score is better; otherwise a lower one.
        cost: "params", "flops" (training FLOPs of a run), "seconds" (of training) or "bytes" (peak per device).
    """
    points = [(median_cost(one, cost), -one.mean if higher else one.mean, one.name) for one in configurations]
    names, best = [], math.inf
    for _, score, name in sorted(points, key=lambda point: point[:2]):
        if score < best:
            names.append(name)
            best = score
    return names


def pareto_fronts(comparison: Comparison) -> dict[str, list[str]]:
    """Return the Pareto front of each cost in COST_METRICS."""
    return {cost: pareto_front(comparison.configurations, comparison.score.higher, cost) for cost in COST_METRICS}


@dataclasses.dataclass(frozen=True)
class LearningCurve:
    """Learning curve of a configuration, at the steps at which all of its runs were evaluated."""

    steps: list[int]
    means: list[float]
    intervals: list[Interval]
    runs: list[list[float]]  # values of each run


def learning_curve(configuration: Configuration, metric: str) -> LearningCurve:
    """Return the learning curve for a metric; empty if the runs have no evaluation step in common."""
    by_run = [
        {r["step"]: r[metric] for r in run.records if r["kind"] == "eval" and r.get(metric) is not None}
        for run in configuration.runs
    ]
    steps = sorted(set.intersection(*map(set, by_run)))
    curves = [[values[step] for step in steps] for values in by_run]
    at_step = np.array(curves).T
    means, intervals = [float(s.mean()) for s in at_step], [statistics.mean_interval(s) for s in at_step]
    return LearningCurve(steps, means, intervals, curves)


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """Condition numbers of a matrix at the last probe of each run, and their rank correlation with the score."""

    measure: str  # name of the matrix, such as "attention_output"
    # Condition number of each layer by configuration: median over examples or heads, geometric mean over runs; NaN
    # where it is not known.
    by_layer: Mapping[str, list[float]]
    numbers: Mapping[str, float]  # median over layers by configuration, of those that have one
    singular: list[str]  # configurations with a numerically singular matrix: their number is a lower bound
    rho: float  # Spearman's correlation of `numbers` and mean scores; NaN if it cannot be computed
    interval: Interval  # 95 %; -1 to 1 with fewer than five configurations, infinite if `rho` is NaN


def list_conditioning(comparison: Comparison) -> list[Conditioning]:
    """Return the condition numbers of each measure that the last probes of all runs have in common."""
    last = {one.name: [_last_probe(run) for run in one.runs] for one in comparison.configurations}
    records = [record for group in last.values() for record in group]
    means, result = {one.name: one.mean for one in comparison.configurations}, []
    for name in [name for name in records[0] if all(name in record for record in records)]:
        by_layer = {one: _mean_over_runs([record[name]["median"] for record in group]) for one, group in last.items()}
        numbers = {one: float(np.nanmedian(x)) for one, x in by_layer.items() if not np.isnan(x).all()}
        singular = [one for one, group in last.items() if any(any(record[name]["singular"]) for record in group)]
        rho, interval = statistics.spearman(np.array([*numbers.values()]), np.array([means[one] for one in numbers]))
        result.append(Conditioning(name, by_layer, numbers, singular, rho, interval))
    return result


def _last_probe(run: Run) -> dict[str, Any]:
    """Return the condition numbers of a run's last probe; an empty dict without a probe."""
    last: Mapping[str, Any] = next((record for record in reversed(run.records) if record["kind"] == "probe"), {})
    return {name: values for name, values in last.items() if isinstance(values, dict) and "singular" in values}


def _mean_over_runs(values: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the geometric mean over runs of each layer's number; NaN if a run does not have a positive one."""
    if len({len(layers) for layers in values}) > 1:  # runs of other depths, which --by pools
        return [math.nan]
    layers = [[x if x is not None and x > 0 else math.nan for x in layer] for layer in zip(*values, strict=True)]
    return [float(np.exp(np.mean(np.log(layer)))) for layer in layers]
