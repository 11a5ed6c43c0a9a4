"""Comparison of finished runs: runs grouped by configuration, and pairwise differences with intervals and tests."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.runs import SEED, ComparableRuns, Run, differing_keys
from leanformer.analysis.statistics import LEVEL, Difference, Interval
from leanformer.config.per_layer import split_values
from leanformer.costs.count import format_count
from leanformer.errors import ConfigError
from leanformer.tasks import artifacts
from leanformer.tasks.scores import Score


MARGIN = 0.01  # default equivalence margin, as a fraction of the mean over all runs
SAME, OUTSIDE, UNKNOWN = "yes", "no", "inconclusive"  # results of the equivalence test of two configurations
OF_SEED = re.compile(r"[,_-]?seed=?\d+$")  # end of the name of a run's folder, such as ",seed=0"


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """Configuration: runs that differ only in their seeds, and in keys that `by` of `group` does not list.

    Attributes:
        name: name in reports: the common name of the folders without their seeds, or KEY=VALUE,KEY=VALUE,...
        keys: value of each config key that distinguishes the configurations, such as {"model.num_heads": 8}.
        runs: runs of the configuration.
        by_block: score of each block, for paired tests. A block is a text of the seed and of the values of the keys
            that differ within a configuration. Runs of two configurations with the same block are a pair.
    """

    name: str
    keys: Mapping[str, Any]
    runs: list[Run]
    by_block: Mapping[str, float]

    @property
    def scores(self) -> np.ndarray:
        """Score of each run in the order of `runs`: an array with one number per run."""
        return np.array([run.value for run in self.runs])

    @property
    def mean(self) -> float:
        """Mean score over the runs."""
        return float(self.scores.mean())

    @property
    def interval(self) -> Interval:
        """Student's 95 % confidence interval of the mean score; infinite for one run, or if all scores are equal."""
        return statistics.mean_interval(self.scores)

    def costs(self, name: str) -> list[float]:
        """Return the values of the key `name` in the runs' summary.json, without the runs that do not have it."""
        return [cost for run in self.runs if (cost := run.cost(name)) is not None]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Comparison of the scores of two configurations: the mean of the first minus the mean of the second.

    Attributes:
        first, second: names of the configurations.
        difference: difference of the means in units of the metric, with its standard error.
        interval: 95 % confidence interval of the difference; infinite if it cannot be computed.
        simultaneous_interval: confidence interval of the difference that holds for all pairs at once with at least 95 %
            confidence (Bonferroni).
        p: two-sided p value of equal means; 1 if it cannot be computed.
        p_holm: `p` with Holm's correction for all pairs.
        same: result of the equivalence test: "yes" (SAME), "no" (OUTSIDE: the absolute difference is above the margin)
            or "inconclusive" (UNKNOWN).
        needed: approximate number of runs per configuration for an equivalence test to succeed if the two are equal;
            None if the test has a result, or if the number cannot be estimated.
        better: name of the better configuration; None if `p_holm` is not below 0.05.
    """

    first: str
    second: str
    difference: Difference
    interval: Interval
    simultaneous_interval: Interval
    p: float
    p_holm: float
    same: str
    needed: int | None
    better: str | None

    @property
    def verdict(self) -> str:
        """Results of the tests of difference and of equivalence, such as "A is better, by more than the margin".

        If neither test has a result, the text begins with "inconclusive", and gives the number `needed` if it is known.
        """
        parts = [f"{self.better} is better"] if self.better else []
        if self.same == UNKNOWN:
            more = f" (if equal, about {self.needed} runs each show it)" if self.needed else ""
            return parts[0] if parts else f"inconclusive{more}"
        return ", ".join([*parts, "equivalent within the margin" if self.same == SAME else "by more than the margin"])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Configurations of finished runs, best first, and the differences of their scores with tests and intervals.

    Attributes:
        score: compared metric.
        margin: equivalence margin, in units of the metric: the largest difference to ignore.
        margin_by: source of the margin as text: "--margin", or the default rule.
        shapes: configurations, best first.
        pairs: compared pairs: first those with the best configuration, then all others by p value.
        left_out: reason for each run that is not counted, by the name of its folder, or by its path if several have it.
        notes: warnings that limit the conclusions, one sentence or more each.
    """

    score: Score
    margin: float
    margin_by: str
    shapes: list[RunGroup]
    pairs: list[Pair]
    left_out: Mapping[str, str]
    notes: list[str]


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
        by: config keys that define a configuration; by default all keys of `Run.keys` that differ, so not the seed.
        margin: equivalence margin, in units of the metric; by default 1 % (MARGIN) of the absolute mean score of all
            runs.
        against: name of the configuration that the others are compared with; all pairs are compared if None.
        test: key of TESTS: "paired" by seed (Welch's test if seeds do not match), "welch" or "pooled".

    Raises:
        ConfigError: a key of `by` is in no run or is the seed, the margin is not positive and finite, or no
            configuration has the name `against`.
    """
    if margin is not None and not 0 < margin < math.inf:
        raise ConfigError(f"--margin={margin:g}: must be above 0 and finite. Give the largest difference to ignore.")
    shapes = sorted(group(data.runs, by), key=lambda shape: -shape.mean if data.score.higher else shape.mean)
    names = [shape.name for shape in shapes]
    if against is not None and against not in names:
        raise ConfigError(f"--against={against}: no such configuration. Choose one of: {'; '.join(names)}.")
    chosen = margin or MARGIN * abs(float(np.mean([run.value for run in data.runs])))
    source = "--margin" if margin else f"{MARGIN:.0%} of the mean over all runs; --margin sets it"
    couples = [(a, b) for a, b in itertools.combinations(shapes, 2) if against is None or against in (a.name, b.name)]
    names = [path.name for path in data.left_out]
    left_out = {
        path.name if names.count(path.name) == 1 else str(path): reason for path, reason in data.left_out.items()
    }
    pairs = judge(couples, data.score.higher, chosen, test)
    pairs.sort(key=lambda pair: (0, 0) if shapes[0].name == pair.first else (1, pair.p))
    notes = _list_warnings(shapes) + _suggest_pooled_test(
        pairs, statistics.pooled_std([shape.scores for shape in shapes])[1]
    )
    return Comparison(data.score, chosen, source, shapes, pairs, left_out, notes)


def group(runs: Sequence[Run], by: Sequence[str] = ()) -> list[RunGroup]:
    """Group runs into configurations by the values of the keys `by`, by default all keys that differ.

    The groups are in the order of their first runs, and a run without a key has the value None.

    Raises ConfigError if a key of `by` is the seed, or in no run's `keys`.
    """
    keys = {key for run in runs for key in run.keys}
    for key in by:
        if key == SEED:
            raise ConfigError(
                f"--by={SEED}: results are averaged over seeds, so the seed does not define a configuration. Leave it "
                "out."
            )
        if key not in keys:
            similar = [name for name in keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise ConfigError(f"--by={key}: no run has this key, or it changes no result.{hint}")
    vary = differing_keys(runs)
    defining = list(by) or vary
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr([run.keys.get(key) for key in defining]), []).append(run)
    rest = _list_pooled_keys([*groups.values()])
    names = _make_names([*groups.values()], defining, folders=not by)
    return [
        RunGroup(
            name,
            {key: members[0].keys.get(key) for key in defining},
            members,
            {repr([run.seed, *(run.keys.get(key) for key in rest)]): run.value for run in members},
        )
        for name, members in zip(names, groups.values(), strict=True)
    ]


def _list_pooled_keys(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the keys that differ within a configuration.

    A key that only differs between configurations, such as value_dim if heads are varied at fixed total width, does not
    separate the runs of a pair.
    """
    return list(dict.fromkeys(key for runs in groups for key in differing_keys(runs)))


def _make_names(groups: Sequence[Sequence[Run]], keys: Sequence[str], folders: bool) -> list[str]:
    """Return the names of configurations: their folders without seeds if unique, otherwise KEY=VALUE lists."""
    names = [{OF_SEED.sub("", run.workdir.name) for run in members} for members in groups]
    unique = [next(iter(group)) for group in names if len(group) == 1]
    if folders and len(set(unique) - {""}) == len(groups):
        return _strip_common_words(unique)
    short = [key.rpartition(".")[2] for key in keys]
    labels = short if len(set(short)) == len(short) else keys
    values = [[(label, m[0].keys.get(key)) for label, key in zip(labels, keys, strict=True)] for m in groups]
    return [",".join(f"{label}={value}" for label, value in pairs) or "all runs" for pairs in values]


def _strip_common_words(names: Sequence[str]) -> list[str]:
    """Return names without their common leading words, unless nothing is left of one."""
    words = [split_values(name) for name in names]
    while len({parts[0] for parts in words}) == 1 and all(parts[1:] for parts in words):
        words = [parts[1:] for parts in words]
    return [",".join(parts) for parts in words]


def judge(couples: Sequence[tuple[RunGroup, RunGroup]], higher: bool, margin: float, test: str) -> list[Pair]:
    """Return the comparison of each pair of configurations, in the same order.

    Holm's correction for the number of pairs is applied separately to the p values of three tests: difference,
    equivalence, and difference above the margin. `p_holm`, `better` and `same` of a result are corrected, `p` is not.

    Args:
        couples: pairs of configurations.
        higher: True if a higher score is better.
        margin: equivalence margin, in units of the metric.
        test: "paired", "welch" or "pooled", as in `compare`; "pooled" uses the variance of all these configurations.
    """
    shapes = {shape.name: shape for couple in couples for shape in couple}
    common = statistics.pooled_std([shape.scores for shape in shapes.values()])
    differences = [TESTS[test](a, b, common) for a, b in couples]
    p = [d.p_differs() for d in differences]
    p_within = [d.p_within(margin) for d in differences]
    p_beyond = [d.p_beyond(margin) for d in differences]
    p_holm, within, beyond = (statistics.holm(values) for values in (p, p_within, p_beyond))
    alpha = 1 - LEVEL
    pairs = []
    for i, (a, b) in enumerate(couples):
        same = SAME if within[i] < alpha else OUTSIDE if beyond[i] < alpha else UNKNOWN
        pairs.append(
            Pair(
                first=a.name,
                second=b.name,
                difference=differences[i],
                interval=differences[i].interval(),
                simultaneous_interval=differences[i].interval(1 - alpha / len(couples)),
                p=p[i],
                p_holm=p_holm[i],
                same=same,
                needed=(
                    statistics.seeds_needed(differences[i], margin, alpha / len(couples)) if same == UNKNOWN else None
                ),
                better=(a.name if (differences[i].value > 0) == higher else b.name) if p_holm[i] < alpha else None,
            )
        )
    return pairs


def _compare_paired(a: RunGroup, b: RunGroup, _: tuple[float, int]) -> Difference:
    """Return the paired difference if both have the same seeds, each once; otherwise Welch's."""
    if a.by_block.keys() == b.by_block.keys() and len(a.by_block) == len(a.runs) == len(b.runs) > 1:
        return statistics.paired(np.array([*a.by_block.values()]), np.array([b.by_block[key] for key in a.by_block]))
    return statistics.welch(a.scores, b.scores)


TESTS = {
    "paired": _compare_paired,
    "welch": lambda a, b, _: statistics.welch(a.scores, b.scores),
    "pooled": lambda a, b, common: statistics.pooled_difference(a.scores, b.scores, common),
}


def _suggest_pooled_test(pairs: Sequence[Pair], df: int) -> list[str]:
    """Return a hint at the pooled test if most pairs are inconclusive and it has many more degrees of freedom."""
    open_ = [pair for pair in pairs if pair.same == UNKNOWN and pair.better is None and pair.difference.testable]
    least = min((pair.difference.df for pair in open_), default=df)
    if len(open_) * 2 <= len(pairs) or df <= 3 * least:
        return []
    return [
        f"{format_count(len(open_), 'pair')} inconclusive, with as few as {least:.0f} degrees of freedom. If all "
        f"configurations can be assumed to have the same variance, use --test=pooled with {df} degrees of freedom."
    ]


def _list_changed_data(runs: Sequence[Run]) -> list[str]:
    """Return a warning for runs whose evaluation split had another number of examples; one per tokenizer."""
    first: dict[Any, tuple[Run, int]] = {}
    notes: dict[Any, str] = {}
    for run in runs:
        split, tokenizer = run.keys.get("data.eval_split", ""), run.keys.get("data.tokenizer")
        if (examples := artifacts.count_examples(run.workdir, split)) is not None:
            other, before = first.setdefault(tokenizer, (run, examples))
            if before != examples:
                notes.setdefault(
                    tokenizer,
                    f"Evaluation data differ in {split}, {other.workdir.name} against {run.workdir.name}: {before} and "
                    f"{examples} examples. Their scores may not be comparable.",
                )
    return [*notes.values()]


def _list_warnings(shapes: Sequence[RunGroup]) -> list[str]:
    """Return warnings that limit the conclusions from the numbers."""
    notes = []
    made_by = {run.made_by for shape in shapes for run in shape.runs}
    if len(made_by) > 1:
        notes.append(f"Runs differ in commit or devices ({'; '.join(sorted(made_by))}): seconds may not be comparable.")
    if pooled := _list_pooled_keys([shape.runs for shape in shapes]):
        notes.append(
            f"--by pools runs that differ in {', '.join(pooled)}: means and intervals are over these runs, not only "
            "over seeds. Add these keys to --by to separate them."
        )
    notes += _list_changed_data([run for shape in shapes for run in shape.runs])
    alone = [shape.name for shape in shapes if len(shape.runs) == 1]
    if alone:
        notes.append(
            f"Configurations with only one run: {len(alone)} of {len(shapes)}. No interval can be computed for them, "
            "and no difference shown or ruled out. Add seeds."
        )
    return notes
