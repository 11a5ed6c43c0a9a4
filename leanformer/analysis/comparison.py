"""Are these shapes different? Runs grouped by shape, and every pair with its interval and its answer."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.runs import SEED, Found, Run, differing
from leanformer.analysis.statistics import LEVEL, Difference, Interval
from leanformer.errors import ConfigError
from leanformer.tasks.scores import Score


MARGIN = 0.01  # of the mean over all runs, where none is asked for
SAME, OUTSIDE, UNKNOWN = "yes", "no", "too few seeds"  # whether two shapes are within the margin of one another
OF_SEED = re.compile(r"[,_]?seed=?\d+$")  # in the name of a member's folder


@dataclasses.dataclass(frozen=True)
class Shape:
    """Runs that are alike but for their seeds, and for what `by` leaves out.

    Attributes:
        keys: config keys that tell the shapes apart, with this one's values.
        by_block: the score of each seed (and of each value of what else differs): what pairs are made of.
    """

    name: str
    keys: Mapping[str, Any]
    runs: list[Run]
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

    def costs(self, name: str) -> list[float]:
        """A figure of the summaries of its runs, where they have it."""
        return [cost for run in self.runs if (cost := run.cost(name)) is not None]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two shapes: the first minus the second.

    Attributes:
        together: the interval as wide as it must be for all pairs to be right at once (Bonferroni).
        p, p_holm: of no difference; the latter among all pairs.
        same: SAME, OUTSIDE or UNKNOWN.
        needed: seeds with which SAME could be said, about; None where that cannot be known.
    """

    first: str
    second: str
    found: Difference
    interval: Interval
    together: Interval
    p: float
    p_holm: float
    same: str
    needed: int | None
    better: str | None  # of the two, where they differ

    @property
    def verdict(self) -> str:
        """In words. That nothing was shown is never said as that there is nothing."""
        parts = [f"{self.better} is better"] if self.better else []
        if self.same == UNKNOWN:
            more = f" ({self.needed} each, were they equal)" if self.needed else ""
            return parts[0] if parts else f"too few seeds to tell{more}"
        return ", ".join([*parts, "within the margin" if self.same == SAME else "by more than the margin"])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that was found."""

    score: Score
    margin: float
    margin_by: str  # where the margin comes from
    shapes: list[Shape]  # best first
    pairs: list[Pair]  # those of the best shape first, then those that say most
    left_out: Mapping[str, str]
    notes: list[str]


def compare(
    found: Found,
    *,
    by: Sequence[str] = (),
    margin: float | None = None,
    against: str | None = None,
    test: str = "paired",
) -> Comparison:
    """Groups runs by shape and compares every two of them, or all with one.

    Args:
        by: config keys that make a shape; all that differ if none is given.
        margin: the largest difference that does not matter, in the metric's unit.
        against: name of the shape that the others are compared with.
        test: one of TESTS.

    Raises:
        ConfigError: a key that no run has, a margin that is none, or no shape of that name.
    """
    if margin is not None and not 0 < margin < math.inf:
        raise ConfigError(f"--margin={margin}: give the largest difference that does not matter, above 0.")
    shapes = sorted(group(found.runs, by), key=lambda shape: -shape.mean if found.score.higher else shape.mean)
    names = [shape.name for shape in shapes]
    if against is not None and against not in names:
        raise ConfigError(f"--against={against} is none of the shapes: {'; '.join(names)}.")
    chosen = margin or MARGIN * abs(float(np.mean([run.value for run in found.runs])))
    asked = "--margin" if margin else f"{MARGIN:.0%} of the mean over all runs; --margin sets it"
    couples = [(a, b) for a, b in itertools.combinations(shapes, 2) if against is None or against in (a.name, b.name)]
    left_out = {path.name: reason for path, reason in found.left_out.items()}
    pairs = judge(couples, found.score.higher, chosen, test)
    pairs.sort(key=lambda pair: (0, 0) if shapes[0].name == pair.first else (1, pair.p))
    notes = _notes(shapes) + _hint(pairs, statistics.spread([shape.scores for shape in shapes])[1])
    return Comparison(found.score, chosen, asked, shapes, pairs, left_out, notes)


def group(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Shape]:
    """Runs by the values of the keys `by`, all that differ if there are none. Raises ConfigError for an unknown key."""
    known = {key for run in runs for key in run.keys}
    for key in by:
        if key not in known:
            alike = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
            raise ConfigError(f"--by={key}: no run has that key." + (f" Did you mean {alike[0]}?" if alike else ""))
    vary = differing(runs)
    makes = list(by) or vary
    rest = [key for key in vary if key not in makes]
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(repr([run.keys.get(key) for key in makes]), []).append(run)
    names = _names([*grouped.values()], makes, folders=not by)
    return [
        Shape(
            name,
            {key: members[0].keys.get(key) for key in makes},
            members,
            {repr([run.seed, *(run.keys.get(key) for key in rest)]): run.value for run in members},
        )
        for name, members in zip(names, grouped.values(), strict=True)
    ]


def _names(groups: Sequence[Sequence[Run]], makes: Sequence[str], folders: bool) -> list[str]:
    """Of shapes: what their folders are called without a seed where that tells them apart, otherwise their keys."""
    called = [{OF_SEED.sub("", run.workdir.name) for run in members} for members in groups]
    one = [next(iter(each)) for each in called if len(each) == 1]
    if folders and len(set(one) - {""}) == len(groups):
        return _told_apart(one)
    short = [key.rpartition(".")[2] for key in makes]
    said = short if len(set(short)) == len(short) else makes
    of_keys = [[(name, m[0].keys.get(key)) for name, key in zip(said, makes, strict=True)] for m in groups]
    return [",".join(f"{name}={value}" for name, value in pairs) or "all runs" for pairs in of_keys]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with, where something is left of each."""
    words = [name.split(",") for name in names]
    while len({each[0] for each in words}) == 1 and all(each[1:] for each in words):
        words = [each[1:] for each in words]
    return [",".join(each) for each in words]


def judge(couples: Sequence[tuple[Shape, Shape]], higher: bool, margin: float, test: str) -> list[Pair]:
    """Every couple with its intervals and its answer; the tests of each kind are corrected among each other."""
    shapes = {shape.name: shape for couple in couples for shape in couple}
    common = statistics.spread([shape.scores for shape in shapes.values()])
    found = [TESTS[test](a, b, common) for a, b in couples]
    p = [each.p_differs() for each in found]
    p_holm, within, beyond = (
        statistics.holm(each) for each in (p, [d.p_within(margin) for d in found], [d.p_beyond(margin) for d in found])
    )
    alpha = 1 - LEVEL
    pairs = []
    for i, (a, b) in enumerate(couples):
        same = SAME if within[i] < alpha else OUTSIDE if beyond[i] < alpha else UNKNOWN
        pairs.append(
            Pair(
                first=a.name,
                second=b.name,
                found=found[i],
                interval=found[i].interval(),
                together=found[i].interval(1 - alpha / len(couples)),
                p=p[i],
                p_holm=p_holm[i],
                same=same,
                needed=statistics.seeds_needed(found[i], margin, alpha / len(couples)) if same == UNKNOWN else None,
                better=(a.name if (found[i].value > 0) == higher else b.name) if p_holm[i] < alpha else None,
            )
        )
    return pairs


def _paired(a: Shape, b: Shape, _: tuple[float, int]) -> Difference:
    """Where both have the same seeds, and each once; Welch's otherwise."""
    if a.by_block.keys() == b.by_block.keys() and len(a.by_block) == len(a.runs) == len(b.runs) > 1:
        return statistics.paired(np.array([*a.by_block.values()]), np.array([b.by_block[key] for key in a.by_block]))
    return statistics.welch(a.scores, b.scores)


TESTS = {
    "paired": _paired,
    "welch": lambda a, b, _: statistics.welch(a.scores, b.scores),
    "pooled": lambda a, b, common: statistics.pooled(a.scores, b.scores, common),
}


def _hint(pairs: Sequence[Pair], df: int) -> list[str]:
    """How more can be had from the same runs, where most of it stays open."""
    open_ = [pair for pair in pairs if pair.same == UNKNOWN and pair.better is None and pair.found.known]
    least = min((pair.found.df for pair in open_), default=df)
    if len(open_) * 2 <= len(pairs) or df <= 3 * least:
        return []
    return [
        f"Each of {len(open_)} open pairs is judged by its own spread, {least:.0f} degrees of freedom at least. If "
        f"all shapes may be taken to spread alike, --test=pooled has {df}."
    ]


def _notes(shapes: Sequence[Shape]) -> list[str]:
    """What a reader must know before believing a figure."""
    notes = []
    made_by = {run.made_by for shape in shapes for run in shape.runs}
    if len(made_by) > 1:
        notes.append(f"The runs were not all made alike, {'; '.join(sorted(made_by))}: seconds may not compare.")
    alone = [shape.name for shape in shapes if len(shape.runs) == 1]
    if alone:
        notes.append(
            f"One {SEED} alone of {len(alone)} of {len(shapes)} shapes: of those no interval can be had, and no "
            "difference shown or ruled out. Add seeds."
        )
    shared = [run for shape in shapes for run in shape.runs if run.together > 1]
    if shared:
        notes.append(
            f"{len(shared)} runs were trained together: seconds and memory are of all, and are no price of one."
        )
    early = [run.workdir.name for shape in shapes for run in shape.runs if run.summary.get("stopped_early")]
    if early:
        notes.append(f"Ended early, by eval.patience: {', '.join(early)}.")
    return notes
