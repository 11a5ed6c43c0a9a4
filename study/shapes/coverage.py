"""Empirical coverage of the intervals of `leanformer.compare` and `leanformer.plan`, on simulated runs.

    python -m study.shapes.coverage [--draws=2000] [--seeds=3,5,10] [--sweeps=200] [--out=FILE]

2026-11-28. Coverage is nominal: 95 % intervals contain the true value in 94.5 to 96.6 % of draws. 90 % prediction
intervals contain new runs in 89.7 to 91.9 % within the sizes of a sweep, and in 97.7 to 100 % outside (too wide).

compare: normal scores with known differences. Wrong answers ("differ" for equal shapes, in any of the pairs; "within
the margin" or "by more" exactly at the margin) may occur in at most 5 %. plan: sweeps with errors from two laws, drawn
for each sweep, and noise of 1 %; the response surface is fitted to a sweep, and its intervals are compared with new
runs of other shapes. The first law has the form of the regression; the second, a power law with a floor, does not. Exit
status 1 if coverage is outside 93 to 97 % or, within the ranges, 85 to 95 %, or if wrong answers exceed 6 %. A value of
0 skips a part. --out writes the shares as a CSV file.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from leanformer.analysis import comparison, statistics, surface
from leanformer.analysis.comparison import OUTSIDE, SAME, Configuration
from leanformer.analysis.design import Dimensions
from study import tables


TRUTH, SPREAD, SHARED = (
    0.7,
    1.0,
    1.0,
)  # true difference; standard deviations of scores, and of the effect of a seed on both shapes
FAMILY = 4  # shapes without any difference
NOISE, LEVEL = 0.01, 0.9  # relative noise of a run; level of plan's intervals
HELD_OUT = 40  # shapes per sweep
Law = Callable[[Dimensions], float]


def make_group(name: str, scores: np.ndarray) -> Configuration:
    """Return the runs of a shape, as `compare` groups them, from scores alone."""
    runs = [SimpleNamespace(value=float(score)) for score in scores]
    return Configuration(name, {}, runs, {repr([seed]): run.value for seed, run in enumerate(runs)})


def interval_coverage(rng: np.random.Generator, draws: int, n: int) -> dict[str, float]:
    """Return the share of draws in which each type of interval contains the true value."""
    hits = dict.fromkeys(("mean", "Welch", "Welch, spread 1 : 2", "paired", "pooled"), 0)
    for _ in range(draws):
        a, b = rng.normal(TRUTH, SPREAD, n), rng.normal(0, SPREAD, n)
        seed = rng.normal(0, SHARED, n)
        hits["mean"] += statistics.mean_interval(a).contains(TRUTH)
        hits["Welch"] += statistics.welch(a, b).interval().contains(TRUTH)
        hits["Welch, spread 1 : 2"] += statistics.welch(a, 2 * b).interval().contains(TRUTH)
        others = [rng.normal(0, SPREAD, n) for _ in range(FAMILY)]
        hits["pooled"] += (
            statistics.pooled_difference(a, b, statistics.pooled_std([a, b, *others])).interval().contains(TRUTH)
        )
        hits["paired"] += statistics.paired(a + seed, b + seed).interval().contains(TRUTH)
    return {name: hit / draws for name, hit in hits.items()}


def wrong_answers(rng: np.random.Generator, draws: int, n: int) -> dict[str, float]:
    """Return the share of draws with each type of wrong answer."""
    wrong = dict.fromkeys((f"any of {FAMILY} equal shapes differ", "within, at the margin", "beyond, at the margin"), 0)
    family, within, beyond = wrong
    for _ in range(draws):
        equal = [make_group(str(i), rng.normal(0, SPREAD, n)) for i in range(FAMILY)]
        couples = [(a, b) for i, a in enumerate(equal) for b in equal[i + 1 :]]
        wrong[family] += any(pair.better for pair in comparison.judge(couples, True, 1.0, "welch"))
        couple = make_group("a", rng.normal(TRUTH, SPREAD / 3, n)), make_group("b", rng.normal(0, SPREAD / 3, n))
        (pair,) = comparison.judge([couple], True, TRUTH, "welch")
        wrong[within] += pair.same == SAME
        wrong[beyond] += pair.same == OUTSIDE
    return {name: count / draws for name, count in wrong.items()}


def make_vit(depth: int, width: int, heads: int, head_dim: int, mlp: int) -> Dimensions:
    """Return a shape with its parameters: matrices, and embeddings of 64 tokens unless it has no MLP."""
    params = depth * (4 * width * heads * head_dim + 2 * width * mlp) + (64 * width if mlp else 0)
    return Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params)


def draw_shape(rng: np.random.Generator) -> Dimensions:
    """Return a shape of random sizes, uniform in their logarithms."""
    sizes = [round(math.exp(rng.uniform(*np.log(ends)))) for ends in ((1, 12), (64, 512), (1, 16), (8, 128))]
    return make_vit(*sizes, round(sizes[1] * 4 ** rng.uniform(0, 1)))


def regression_law(rng: np.random.Generator) -> Law:
    """Draw power laws of all sizes, with an optimal depth."""
    power, bend, best = rng.uniform(0.03, 0.25), rng.uniform(0, 0.03), rng.uniform(1, 3)
    heads, head_dim, mlp = rng.uniform(-0.1, 0.02, 3)

    def error(d: Dimensions) -> float:
        size, depth = math.log2(d.params / 1e5), math.log2(d.depth) - best
        slopes = heads * math.log2(d.heads[0]) + head_dim * math.log2(d.head_dim[0])
        slopes += mlp * math.log2(max(d.mlp[0], 1) / d.width)
        return math.exp(-power * size + bend * depth**2 + slopes)

    return error


def floor_law(rng: np.random.Generator) -> Law:
    """Draw a power law with a floor, and diminishing returns of heads and head dimension."""
    floor, power, bend = rng.uniform(0.2, 1.0), rng.uniform(0.05, 0.4), rng.uniform(0, 0.03)
    gains = rng.uniform(0, 0.2, 2)

    def error(d: Dimensions) -> float:
        heads, head_dim = 1 + gains[0] / d.heads[0], 1 + gains[1] * (8 / d.head_dim[0]) ** 0.5
        return floor + (1e5 / d.params) ** power * heads * head_dim * math.exp(bend * math.log2(d.depth / 4) ** 2)

    return error


def sweeps(rng: np.random.Generator) -> dict[str, tuple[list[Dimensions], list[Dimensions]]]:
    """Return for each type of sweep the shapes that are trained, and others that are held out."""
    heads, other = (2, 4, 8, 16), (3, 5, 6, 10, 12)
    result = {}
    for name, mlp in (("grid of 3 depths x 4 heads, with MLP", 192), ("the same, attention only", 0)):
        grid = [make_vit(depth, 96, n, 16, mlp) for depth, n in itertools.product((2, 3, 4), heads)]
        new = [make_vit(depth, 96, n, 16, mlp) for depth, n in itertools.product((2, 3, 4), other)]
        new += [make_vit(d, w, n, h, mlp) for d, w, n, h in itertools.product((2, 4), (64, 144), (3, 12), (8, 16, 32))]
        result[name] = grid, new
    for number in (12, 20, 40):
        result[f"{number} random shapes"] = tuple([draw_shape(rng) for _ in range(n)] for n in (number, HELD_OUT))
    return result


def planned(rng: np.random.Generator, draws: int) -> tuple[bool, list[dict[str, str]]]:
    """Print the coverage of the response surface. Return whether it is in the expected range, and the shares."""
    rows: dict[tuple[str, str], list[tuple[bool, bool, bool, float]]] = {}
    for draw in range(draws):
        kind, law = (("regression", regression_law), ("floor", floor_law))[draw % 2]
        error = law(rng)
        for name, (trained, new) in sweeps(rng).items():
            runs = [[error(shape) * math.exp(NOISE * rng.normal())] for shape in trained]
            fit = surface.fit(trained, runs)
            expected = fit.expected_error(new)
            for shape, value, low, high in zip(new, expected, *fit.interval(new, LEVEL), strict=True):
                covered = low <= error(shape) * math.exp(NOISE * rng.normal()) <= high
                inside, relative_error = not fit.design.outside(shape), abs(value / error(shape) - 1)
                rows.setdefault((name, kind), []).append((inside, bool(covered), low <= value <= high, relative_error))
    print(f"\n{draws} sweeps of each type, a new law for each; new runs in the {LEVEL:.0%} prediction interval")
    print(f"{'sweep':<38}{'law':<12}{'within ranges':<26}{'outside':<26}expected error in its interval")
    passed, shares = True, []
    for (name, kind), results in rows.items():
        table = np.array(results, float)
        parts = [table[table[:, 0] == inside] for inside in (1, 0)]
        cells = "".join(
            f"{f'{part[:, 1].mean():.1%}, median error {np.median(part[:, 3]):.1%}':<26}" if len(part) else f"{'-':<26}"
            for part in parts
        )
        print(f"{name:<38}{kind:<12}{cells}{table[:, 2].mean():.1%}")
        for place, part in zip(("inside", "outside"), parts, strict=True):
            shares += [make_row("plan", f"{name}, {kind}, {place}", part[:, 1].mean())] * bool(len(part))
        passed &= 0.85 <= parts[0][:, 1].mean() <= 0.95 and table[:, 2].all()
    return bool(passed), shares


def make_row(command: str, case: str, share: float) -> dict[str, str]:
    """Return a row of the table of shares."""
    return {"command": command, "case": case, "share": f"{share:.4f}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seeds", default="3,5,10")
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng, passed, rows = np.random.default_rng(0), True, []
    for n in map(int, options.seeds.split(",") if options.draws else ()):
        coverage, wrong = interval_coverage(rng, options.draws, n), wrong_answers(rng, options.draws, n)
        for name, share in coverage.items():
            print(f"{n:>3} seeds  interval, {name:<36} contains the truth in {share:6.1%}")
            rows.append(make_row("compare", f"{n} seeds, {name}", share))
        for name, share in wrong.items():
            print(f"{n:>3} seeds  wrong: {name:<39} in {share:6.1%}")
            rows.append(make_row("compare", f"{n} seeds, wrong: {name}", share))
        passed &= all(0.93 <= share <= 0.97 for share in coverage.values()) and max(wrong.values()) <= 0.06
    if options.sweeps:
        within, shares = planned(rng, options.sweeps)
        passed, rows = passed and within, rows + shares
    if options.out:
        tables.write(options.out, rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
