"""Comparison of finished runs: runs grouped by configuration, pairwise differences and trends with intervals."""

import dataclasses
import itertools
import math
import re
import statistics as middles
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.runs import ComparableRuns, Run, differing_keys
from leanformer.analysis.statistics import LEVEL, Difference, Interval
from leanformer.config.key_docs import split_values
from leanformer.errors import ConfigError
from leanformer.runtime.timing import training_seconds
from leanformer.tasks import Score
from leanformer.text import lookup


MARGIN = 0.01  # default equivalence margin, as a fraction of the mean over all runs
SAME, OUTSIDE, UNKNOWN = "yes", "no", "inconclusive"  # results of the equivalence test of two configurations
HEADS = "model.num_heads"
# Functions from a run to its cost, by name in `text.QUANTITIES`: parameters, training FLOPs, seconds of training, and
# peak bytes per device.
COST_METRICS: dict[str, Callable[[Run], Any]] = {
    "params": lambda run: run.summary["params"],
    "flops": lambda run: float(run.summary["train_flops"] * run.summary["examples_seen"]),
    "seconds": lambda run: training_seconds(run.summary["seconds"]),
    "bytes": lambda run: run.summary["memory_bytes"],
}
SEED_SUFFIX = re.compile(r"[,_-]?seed=?\d+$")  # end of the name of a run's folder, such as ",seed=0"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Runs that differ only in their seeds, and in keys that `by` of `group` does not list."""

    name: str  # common name of the folders without their seeds, or KEY=VALUE,KEY=VALUE,...
    keys: Mapping[str, Any]  # keys that distinguish the configurations, such as {"model.num_heads": 8}
    runs: list[Run]
    # Score by block: a text of the seed and of the keys that differ within a configuration. Runs of two configurations
    # with the same block are a pair.
    by_block: Mapping[str, float]

    @property
    def scores(self) -> np.ndarray:
        return np.array([run.value for run in self.runs])

    @property
    def mean(self) -> float:
        return float(self.scores.mean())

    @property
    def interval(self) -> Interval:
        return statistics.mean_interval(self.scores)


def median_cost(configuration: Configuration, cost: str) -> float:
    """Return the median over a configuration's runs of a cost, a key of COST_METRICS."""
    return float(middles.median(COST_METRICS[cost](run) for run in configuration.runs))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Comparison of the scores of two configurations: the mean of the first minus the mean of the second."""

    first: str
    second: str
    difference: Difference
    interval: Interval  # 95 %; infinite if it cannot be computed
    p: float  # two-sided, of equal means; 1 if it cannot be computed
    p_holm: float  # with Holm's correction for all pairs
    same: str  # result of the equivalence test: SAME, OUTSIDE (the difference is above the margin) or UNKNOWN
    better: str | None  # name of the better configuration; None if `p_holm` is not below 0.05
    # Approximate runs per configuration to show a difference as large as this one, and to show equivalence if the two
    # are equal; None if it is shown, or cannot be estimated.
    runs_to_differ: int | None
    runs_to_equate: int | None

    @property
    def undecided(self) -> bool:
        """True if neither a difference nor equivalence is shown."""
        return self.better is None and self.same == UNKNOWN

    @property
    def verdict(self) -> str:
        """Results of the tests of difference and of equivalence, such as "A is better, by more than the margin"."""
        if self.undecided:
            return "inconclusive" if self.interval.contains(0) else "differ, but not after correction"
        parts = [f"{self.better} is better"] if self.better else []
        parts += {SAME: ["equivalent within the margin"], OUTSIDE: ["by more than the margin"]}.get(self.same, [])
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Trend:
    """Change of the score per doubling of a config key that has three or more values."""

    key: str
    low: float  # smallest and largest value of configurations that are equal in all else
    high: float
    slope: Difference  # change per doubling, with a level of its own for runs of one seed and of equal other keys
    moving: Mapping[str, tuple[Any, Any]]  # values of the keys that change with this one, at `low` and at `high`
    params: float  # parameters at `high` over those at `low`
    seconds: float  # seconds of training at `high` over those at `low`


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Configurations of finished runs, best first, and the differences of their scores with tests and intervals."""

    score: Score  # compared metric
    margin: float  # largest difference to ignore, in units of the metric
    margin_by: str  # source of the margin as text
    configurations: list[Configuration]  # best first
    pairs: list[Pair]  # first with the best configuration, then all others by p value
    trends: list[Trend]
    left_out: Mapping[str, str]  # reason for each run that is not counted, by its folder
    notes: list[str]  # warnings that limit the conclusions


def compare(
    data: ComparableRuns,
    *,
    by: Sequence[str] = (),
    margin: float | None = None,
    against: str | None = None,
    test: str = "paired",
) -> Comparison:
    """Group runs by configuration, compare the configurations in pairs, and return the comparison.

    Args:
        data: finished runs.
        by: config keys that define a configuration; by default all keys that differ, without the seed.
        margin: equivalence margin, in units of the metric; by default 1 % of the absolute mean score of all runs.
        against: name of the configuration that the others are compared with; all pairs are compared if None.
        test: "paired" by seed (Welch's test if seeds do not match), "welch" or "pooled" (one variance for all).

    Raises:
        ConfigError: a key of `by` is in no run, or changes no result like the seed; or no configuration has the name
            `against`.
    """
    found = sorted(group(data.runs, by), key=lambda one: -one.mean if data.score.higher else one.mean)
    names = [one.name for one in found]
    if against is not None and against not in names:
        raise ConfigError(f"--against={against}: no such configuration. Choose one of: {'; '.join(names)}.")
    limit = math.inf if lookup(data.score.name).scale == 1 else 1
    if margin is not None and not 0 < margin < limit:
        raise ConfigError(
            f"--margin={margin:g}: must be above 0 and below {limit:g}. Give the largest difference to ignore, such as "
            "0.01 for one point of accuracy."
        )
    chosen, source = margin, "--margin"
    if chosen is None:
        chosen = MARGIN * abs(float(np.mean([run.value for run in data.runs])))
        source = f"{MARGIN:.0%} of the mean over all runs; --margin sets it"
    couples = [(a, b) for a, b in itertools.combinations(found, 2) if against is None or against in (a.name, b.name)]
    pairs = judge(couples, data.score.higher, chosen, test)
    pairs.sort(key=lambda pair: (0, 0) if names[0] == pair.first else (1, pair.p))
    trends = [] if by else find_trends(found)
    left_out = {f"{path.parent.name}/{path.name}": reason for path, reason in data.left_out.items()}
    return Comparison(data.score, chosen, source, found, pairs, trends, left_out, _list_warnings(found))


def group(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Configuration]:
    """Group runs into configurations by the values of the keys `by`, by default all keys that differ."""
    if unknown := [key for key in by if not any(key in run.keys for run in runs)]:
        raise ConfigError(f"--by={unknown[0]}: no run has this key, or it changes no result like the seed.")
    defining = list(by) or differing_keys(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr([run.keys.get(key) for key in defining]), []).append(run)
    pooled = _list_pooled_keys([*groups.values()])
    names = _make_names([*groups.values()], defining, folders=not by)
    return [
        Configuration(
            name,
            {key: members[0].keys.get(key) for key in defining},
            members,
            {repr([run.seed, *(run.keys.get(key) for key in pooled)]): run.value for run in members},
        )
        for name, members in zip(names, groups.values(), strict=True)
    ]


def _list_pooled_keys(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the keys that differ within a configuration, and so separate the runs of a pair."""
    return list(dict.fromkeys(key for runs in groups for key in differing_keys(runs)))


def _make_names(groups: Sequence[Sequence[Run]], keys: Sequence[str], folders: bool) -> list[str]:
    """Return the names of configurations: their folders without seeds if unique, otherwise KEY=VALUE lists."""
    names = [{SEED_SUFFIX.sub("", run.workdir.name) for run in members} for members in groups]
    unique = [next(iter(group)) for group in names if len(group) == 1]
    if folders and len(set(unique) - {""}) == len(groups):
        words = [split_values(name) for name in unique]
        while len({parts[0] for parts in words}) == 1 and all(parts[1:] for parts in words):
            words = [parts[1:] for parts in words]
        return [",".join(parts) for parts in words]
    short = [key.rpartition(".")[2] for key in keys]
    labels = short if len(set(short)) == len(short) else keys
    values = [[(label, m[0].keys.get(key)) for label, key in zip(labels, keys, strict=True)] for m in groups]
    return [",".join(f"{label}={value}" for label, value in pairs) or "all runs" for pairs in values]


def judge(couples: Sequence[tuple[Configuration, Configuration]], higher: bool, margin: float, test: str) -> list[Pair]:
    """Return the comparison of each pair of configurations.

    `p_holm`, `better` and `same` have Holm's correction for the number of pairs, separately for the tests of a
    difference, of equivalence, and of a difference above the margin; `p` has none.
    """
    involved = {one.name: one for couple in couples for one in couple}
    common = statistics.pooled_std([one.scores for one in involved.values()])
    differences = [TESTS[test](a, b, common) for a, b in couples]
    p = [d.p_differs() for d in differences]
    p_holm = statistics.holm(p)
    within, beyond = (
        statistics.holm([getattr(d, name)(margin) for d in differences]) for name in ("p_within", "p_beyond")
    )
    alpha, pairs = 1 - LEVEL, []
    for i, (a, b) in enumerate(couples):
        difference, each = differences[i], alpha / len(couples)
        same = SAME if within[i] < alpha else OUTSIDE if beyond[i] < alpha else UNKNOWN
        better = (a.name if (difference.value > 0) == higher else b.name) if p_holm[i] < alpha else None
        to_differ = None if better else statistics.seeds_to_differ(difference, each)
        to_equate = statistics.seeds_needed(difference, margin, each) if same == UNKNOWN else None
        interval = difference.interval()
        pairs.append(Pair(a.name, b.name, difference, interval, p[i], p_holm[i], same, better, to_differ, to_equate))
    return pairs


def _compare_paired(a: Configuration, b: Configuration, _: tuple[float, int]) -> Difference:
    """Return the paired difference if both have the same seeds, each once; otherwise Welch's."""
    if a.by_block.keys() == b.by_block.keys() and len(a.by_block) == len(a.runs) == len(b.runs) > 1:
        return statistics.paired(np.array([*a.by_block.values()]), np.array([b.by_block[key] for key in a.by_block]))
    return statistics.welch(a.scores, b.scores)


TESTS = {
    "paired": _compare_paired,
    "welch": lambda a, b, _: statistics.welch(a.scores, b.scores),
    "pooled": lambda a, b, common: statistics.pooled_difference(a.scores, b.scores, common),
}


def find_trends(configurations: Sequence[Configuration]) -> list[Trend]:
    """Return the trend of each key with three or more positive values; of keys that move together, of the first."""
    keys = sorted(configurations[0].keys, key=lambda key: key != HEADS)  # heads before what moves with them
    columns = {key: [one.keys[key] for one in configurations] for key in keys}
    trends, seen = [], set()
    for key, values in columns.items():
        if key in seen or not all(type(value) in (int, float) and value > 0 for value in values):
            continue
        moving = [other for other in columns if other != key and _move_together(values, columns[other])]
        seen.update(moving)
        trends.append(_find_trend(key, moving, configurations))
    return [*filter(None, trends)]


def _find_trend(key: str, moving: Sequence[str], configurations: Sequence[Configuration]) -> Trend | None:
    """Return the trend of a key over configurations that differ in it and `moving` alone; None below three values."""
    fixed = [other for other in configurations[0].keys if other not in (key, *moving)]
    groups: dict[str, dict[Any, Configuration]] = {}  # by value of the key, of those that differ in nothing else
    for one in configurations:
        groups.setdefault(repr([one.keys[other] for other in fixed]), {})[one.keys[key]] = one
    groups = {name: group for name, group in groups.items() if len(group) > 1}
    found = {value for group in groups.values() for value in group}
    if len(found) < 3:
        return None
    rows = [
        (math.log2(value), run.value, (run.seed, name))
        for name, group in groups.items()
        for value, one in group.items()
        for run in one.runs
    ]
    x, y, blocks = zip(*rows, strict=True)
    slope = statistics.slope(np.array(x), np.array(y), blocks)
    if math.isnan(slope.value):
        return None
    widest = max(groups.values(), key=lambda group: max(group) / min(group))  # costs of runs equal in all else
    low, high = min(widest), max(widest)
    first, last = widest[low], widest[high]
    params, seconds = (median_cost(last, cost) / median_cost(first, cost) for cost in ("params", "seconds"))
    changes = {other: (first.keys[other], last.keys[other]) for other in moving}
    return Trend(key, low, high, slope, changes, params, seconds)


def _move_together(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether values and others determine each other."""
    pairs = [*zip(values, others, strict=True)]
    return len({len(set(map(repr, column))) for column in (values, others, pairs)}) == 1


def _list_warnings(configurations: Sequence[Configuration]) -> list[str]:
    notes = []
    runs = [run for one in configurations for run in one.runs]
    made_by = {run.made_by for run in runs}
    if len(made_by) > 1:
        notes.append(f"Runs differ in commit or devices ({'; '.join(sorted(made_by))}): seconds may not be comparable.")
    if changed := [f"{', '.join(run.changed)} of {run.workdir.name}" for run in runs if run.changed]:
        listed = "; ".join(changed)
        notes.append(f"Changed after the start, so a run may differ from one that had the value throughout: {listed}.")
    if pooled := _list_pooled_keys([one.runs for one in configurations]):
        notes.append(
            f"--by pools runs that differ in {', '.join(pooled)}: means and intervals are over these runs, not only "
            "over seeds. Add these keys to --by to separate them."
        )
    if len({frozenset(one.by_block) for one in configurations}) > 1:
        notes.append("Configurations with other seeds are compared as independent runs, by Welch's test.")
    sizes: dict[Any, set[Any]] = {}  # with these the same text has another number of examples
    for run in runs:
        cut = tuple(run.keys.get(key) for key in ("data.tokenizer", "model.max_length", "model.packed"))
        sizes.setdefault(cut, set()).add(run.summary["final"].get("examples"))
    for numbers in sizes.values():
        if len(numbers) > 1:
            notes.append(f"Runs were evaluated on different data: {' and '.join(map(str, numbers))} examples.")
    if alone := sum(len(one.runs) == 1 for one in configurations):
        notes.append(
            f"Configurations with only one run: {alone} of {len(configurations)}. No interval can be computed for "
            "them, and no difference shown or ruled out. Add seeds."
        )
    return notes
