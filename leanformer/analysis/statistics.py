"""Intervals and tests over a few repetitions, by scipy's distributions: every figure with what is needed to doubt it.

Scores of one shape are taken as independent draws from one normal distribution; nothing here can check that with three
of them. All functions take scores as arrays and give plain numbers. `level` is a confidence, 0.95 say.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import stats


LEVEL = 0.95
POWER = 0.8  # that numbers of seeds are worked out for
MOST_SEEDS = 10_000
Scores = Float[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Interval:
    """From `low` to `high`; both infinite where nothing can be said."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


NOTHING = Interval(-math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class Difference:
    """An estimate of `mean(a) - mean(b)`.

    Attributes:
        method: "paired", "Welch" or "pooled".
        error: standard error; NaN of fewer than two scores.
        df: its degrees of freedom.
        count: pairs, or the smaller of the two numbers of scores.
        each: the standard error of a difference of one score from each.
    """

    method: str
    value: float
    error: float
    df: float
    count: int
    each: float

    @property
    def known(self) -> bool:
        """Whether there is any spread to judge by."""
        return self.count > 1 and self.error > 0

    def interval(self, level: float = LEVEL) -> Interval:
        """Student's, two-sided."""
        if not self.known:
            return NOTHING
        return Interval(*map(float, stats.t.interval(level, self.df, self.value, self.error)))

    def p_differs(self) -> float:
        """Of no difference, two-sided."""
        return self._p(abs(self.value), both=True)

    def p_within(self, margin: float) -> float:
        """Of a difference of `margin` or more either way: the larger of two one-sided tests (Schuirmann, 1987)."""
        return self._p(margin - abs(self.value))

    def p_beyond(self, margin: float) -> float:
        """Of a difference of `margin` or less, two-sided: never under that of no difference."""
        return self._p(abs(self.value) - margin, both=True)

    def _p(self, distance: float, both: bool = False) -> float:
        if not self.known:
            return 1.0
        return min(1.0, (1 + both) * float(stats.t.sf(distance / self.error, self.df)))


def mean_interval(scores: Scores, level: float = LEVEL) -> Interval:
    """Student's interval for the mean; of one score, or of equal ones, nothing can be said."""
    return _of_one("Student", scores).interval(level)


def welch(a: Scores, b: Float[np.ndarray, " m"]) -> Difference:
    """Two independent groups of any spread (Welch, 1947)."""
    value, count = float(np.mean(a) - np.mean(b)), min(len(a), len(b))
    if count < 2:
        return Difference("Welch", value, math.nan, math.nan, count, math.nan)
    error = math.hypot(stats.sem(a), stats.sem(b))
    df = stats.ttest_ind(a, b, equal_var=False).df if error > 0 else math.nan
    each = math.hypot(np.std(a, ddof=1), np.std(b, ddof=1))
    return Difference("Welch", value, error, float(df), count, each)


def paired(a: Scores, b: Scores) -> Difference:
    """Scores that belong together in the order given: those of one seed."""
    return _of_one("paired", a - b)


def spread(groups: Sequence[Float[np.ndarray, "_"]]) -> tuple[float, int]:
    """The standard deviation that groups have in common, if they have one in common, and its degrees of freedom; NaN
    and 0 where no group has two scores."""
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    df = sum(len(group) - 1 for group in groups)
    return (math.sqrt(squares / df) if df else math.nan), df


def pooled(a: Scores, b: Float[np.ndarray, " m"], common: tuple[float, int]) -> Difference:
    """Two independent groups whose `spread` is that of all groups: many more degrees of freedom, and wrong where the
    spreads differ."""
    value, (deviation, df) = float(np.mean(a) - np.mean(b)), common
    count = min(len(a), len(b)) if df < 2 else max(2, min(len(a), len(b)))
    error = deviation * math.sqrt(1 / len(a) + 1 / len(b))
    return Difference("pooled", value, error, float(df), count, deviation * math.sqrt(2))


def _of_one(method: str, scores: Scores) -> Difference:
    """The mean of one group, from nothing."""
    deviation, error = math.nan, math.nan
    if len(scores) > 1:
        deviation = float(np.std(scores, ddof=1))
        error = deviation / math.sqrt(len(scores))
    return Difference(method, float(np.mean(scores)), error, len(scores) - 1.0, len(scores), deviation)


def holm(p: Sequence[float]) -> list[float]:
    """p values of several tests, each as it is among all of them (Holm, 1979): to reject what is under 0.05 is wrong
    anywhere in at most 5 % of cases."""
    order, adjusted, largest = np.argsort(p, kind="stable"), [0.0] * len(p), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = largest
    return adjusted


def seeds_needed(found: Difference, margin: float, alpha: float = 1 - LEVEL, power: float = POWER) -> int | None:
    """Seeds a shape with which "within ± margin" would be found with that power, were there no difference and the
    spread as it is here; None without a spread, or beyond MOST_SEEDS.

    Noncentral t: exact but for the two one-sided tests' being taken as independent of one another's tails (Phillips,
    1990). The spread of a few scores is itself unsure, so this is a size and not a promise.
    """
    if not found.known or margin <= 0:
        return None
    each, spread = 1 if found.method == "paired" else 2, found.each
    coarse = np.unique(np.geomspace(2, MOST_SEEDS, 60).astype(int))
    enough = _power(coarse, each, spread, margin, alpha) >= power
    if not enough.any():
        return None
    first = int(np.argmax(enough))
    fine = np.arange(coarse[first - 1] + 1 if first else 2, coarse[first] + 1)
    return int(fine[np.argmax(_power(fine, each, spread, margin, alpha) >= power)])


def _power(n: Int[np.ndarray, "k"], each: int, spread: float, margin: float, alpha: float) -> Float[np.ndarray, "k"]:
    """Of finding that two equal shapes of n seeds lie within the margin."""
    df, away = each * (n - 1.0), margin * np.sqrt(n) / spread
    # So far away that the tail is 1 to the last digit, the series for it may not end.
    tail = stats.nct.sf(stats.t.isf(alpha, df), df, np.minimum(away, 35.0))
    return np.maximum(0.0, 2 * tail - 1)


def spearman(x: Scores, y: Scores, level: float = LEVEL) -> tuple[float, Interval]:
    """Rank correlation with an interval by Fisher's z, its error as Bonett and Wright (2000) give it; no interval of
    fewer than five points. NaN where either does not vary."""
    n = len(x)
    if n < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan, NOTHING
    rho = float(stats.spearmanr(x, y).statistic)
    if n < 5:
        return rho, Interval(-1.0, 1.0)
    z, error = math.atanh(min(max(rho, -1 + 1e-12), 1 - 1e-12)), math.sqrt((1 + rho**2 / 2) / (n - 3))
    low, high = stats.norm.interval(level, z, error)
    return rho, Interval(math.tanh(low), math.tanh(high))
