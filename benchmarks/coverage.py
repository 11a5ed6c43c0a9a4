"""Whether the intervals and the answers of `leanformer.compare` are right as often as they say, on simulated runs.

    python benchmarks/coverage.py [--draws=2000] [--seeds=3,5,10]

Normal scores with known differences, judged by the functions that compare uses. Intervals must hold the truth in 95 %
of draws; a wrong answer ("differ" where nothing does, in any of the pairs; "within the margin" or "by more" exactly at
the margin) may come in 5 % at most. Also how often a true equality is found with as many seeds as were said to be
needed. Exit status 1 where coverage leaves 93 to 97 %, or an error rate is over 6 %, what chance allows of 2,000 draws.
"""

import argparse
import sys
from types import SimpleNamespace

import numpy as np

from leanformer.studies import comparison, statistics
from leanformer.studies.comparison import OUTSIDE, SAME, Shape


TRUTH, SPREAD, SHARED = 0.7, 1.0, 1.0  # difference; of a shape's scores; of what a seed does to both shapes
FAMILY = 4  # shapes of which none differs


def shape(name: str, scores: np.ndarray) -> Shape:
    """A shape as compare has it, from scores alone."""
    runs = [SimpleNamespace(value=float(score)) for score in scores]
    return Shape(name, {}, runs, {repr([seed]): run.value for seed, run in enumerate(runs)})


def intervals(rng: np.random.Generator, draws: int, n: int) -> dict[str, float]:
    """Share of draws in which each kind of interval holds the truth."""
    hits = dict.fromkeys(("mean", "Welch", "Welch, spread 1 : 2", "paired", "pooled"), 0)
    for _ in range(draws):
        a, b = rng.normal(TRUTH, SPREAD, n), rng.normal(0, SPREAD, n)
        seed = rng.normal(0, SHARED, n)
        hits["mean"] += statistics.mean_interval(a).holds(TRUTH)
        hits["Welch"] += statistics.welch(a, b).interval().holds(TRUTH)
        hits["Welch, spread 1 : 2"] += statistics.welch(a, 2 * b).interval().holds(TRUTH)
        others = [rng.normal(0, SPREAD, n) for _ in range(FAMILY)]
        hits["pooled"] += statistics.pooled(a, b, statistics.spread([a, b, *others])).interval().holds(TRUTH)
        hits["paired"] += statistics.paired(a + seed, b + seed).interval().holds(TRUTH)
    return {name: hit / draws for name, hit in hits.items()}


def errors(rng: np.random.Generator, draws: int, n: int) -> dict[str, float]:
    """Share of draws with a wrong answer."""
    wrong = dict.fromkeys((f"any of {FAMILY} equal shapes differ", "within, at the margin", "beyond, at the margin"), 0)
    family, within, beyond = wrong
    for _ in range(draws):
        equal = [shape(str(i), rng.normal(0, SPREAD, n)) for i in range(FAMILY)]
        couples = [(a, b) for i, a in enumerate(equal) for b in equal[i + 1 :]]
        wrong[family] += any(pair.better for pair in comparison.judge(couples, True, 1.0, "welch"))
        couple = shape("a", rng.normal(TRUTH, SPREAD / 3, n)), shape("b", rng.normal(0, SPREAD / 3, n))
        (pair,) = comparison.judge([couple], True, TRUTH, "welch")
        wrong[within] += pair.same == SAME
        wrong[beyond] += pair.same == OUTSIDE
    return {name: count / draws for name, count in wrong.items()}


def promise(rng: np.random.Generator, draws: int, margin: float) -> tuple[int, float]:
    """Seeds said to be needed by two shapes whose spread is known, and how often those then find them equal."""
    known = statistics.Difference("Welch", 0.0, SPREAD * np.sqrt(2 / 1000), 1998.0, 1000, SPREAD * np.sqrt(2))
    n = statistics.seeds_needed(known, margin)
    hits = 0
    for _ in range(draws):
        couple = shape("a", rng.normal(0, SPREAD, n)), shape("b", rng.normal(0, SPREAD, n))
        (pair,) = comparison.judge([couple], True, margin, "welch")
        hits += pair.same == SAME
    return n, hits / draws


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seeds", default="3,5,10")
    options = parser.parse_args()
    rng, sound = np.random.default_rng(0), True
    for n in map(int, options.seeds.split(",")):
        held, wrong = intervals(rng, options.draws, n), errors(rng, options.draws, n)
        for name, share in held.items():
            print(f"{n:>3} seeds  interval, {name:<36} holds the truth in {share:6.1%}")
        for name, share in wrong.items():
            print(f"{n:>3} seeds  wrong: {name:<39} in {share:6.1%}")
        sound &= all(0.93 <= share <= 0.97 for share in held.values()) and max(wrong.values()) <= 0.06
    for margin in (0.7, 1.5):
        n, power = promise(rng, options.draws, margin)
        print(f"margin {margin} of a spread of 1: {n} seeds said to be needed for 80 %, found equal in {power:.1%}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
