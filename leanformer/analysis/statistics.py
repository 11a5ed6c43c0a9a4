"""Confidence intervals and tests for a few repetitions, with SciPy's distributions.

Scores of one configuration are assumed to be independent draws from a normal distribution.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import stats


LEVEL = 0.95
POWER = 0.8  # power of the test for which numbers of seeds are computed
MOST_SEEDS = 10_000
Scores = Float[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Closed interval of numbers.

    Attributes:
        low, high: ends of the interval, infinite if it cannot be computed.

    >>> Interval(0.5, 1.5).contains(1.0)
    True
    """

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Return whether the interval contains a value."""
        return self.low <= value <= self.high


NOTHING = Interval(-math.inf, math.inf)
ROUNDING = 1e-12  # of the largest score: a smaller standard deviation comes from rounding, not from seeds


@dataclasses.dataclass(frozen=True)
class Difference:
    """Estimate of `mean(a) - mean(b)`, from which intervals and p values are computed.

    Attributes:
        method: "paired", "Welch", "pooled", "Student" for a single mean, or "slope".
        value: estimate.
        error: standard error; NaN with fewer than two scores.
        df: degrees of freedom of the standard error.
        count: number of pairs, or of the scores of the smaller group; for "pooled" at least 2 if `df` is at least 2.
        seed_std: standard deviation of the difference of a single pair of scores; for "Student" of one score.
    """

    method: str
    value: float
    error: float
    df: float
    count: int
    seed_std: float

    @property
    def testable(self) -> bool:
        """True if `count` is at least 2 and the standard error is above 0, as intervals and p values require."""
        return self.count > 1 and self.error > 0

    def interval(self, level: float = LEVEL) -> Interval:
        """Return Student's two-sided confidence interval at confidence `level`; infinite if not `testable`."""
        if not self.testable:
            return NOTHING
        return Interval(*map(float, stats.t.interval(level, self.df, self.value, self.error)))

    def p_differs(self) -> float:
        """Return the two-sided p value of the null hypothesis of equal means; 1 if the difference is not `testable`."""
        return self._p(abs(self.value), both=True)

    def p_within(self, margin: float) -> float:
        """Return the p value of the null hypothesis that the absolute difference is at least `margin`.

        `margin` is in units of the scores. A small value shows equivalence. It is the larger one of two one-sided tests
        (TOST; Schuirmann, 1987), and 1 if the difference is not `testable`.
        """
        return self._p(margin - abs(self.value))

    def p_beyond(self, margin: float) -> float:
        """Return the p value of the null hypothesis that the absolute difference is at most `margin`.

        `margin` is in units of the scores. A small value shows a difference above the margin. It is two-sided, at least
        `p_differs()`, and 1 if the difference is not `testable`.
        """
        return self._p(abs(self.value) - margin, both=True)

    def _p(self, distance: float, both: bool = False) -> float:
        if not self.testable:
            return 1.0
        return min(1.0, (1 + both) * float(stats.t.sf(distance / self.error, self.df)))


def mean_interval(scores: Scores) -> Interval:
    """Return Student's 95 % confidence interval of the mean; infinite for one score, or if all are equal."""
    return _describe_mean("Student", scores).interval()


def welch(a: Scores, b: Float[np.ndarray, " m"]) -> Difference:
    """Return the difference mean(a) - mean(b) of two independent groups with different variances (Welch, 1947).

    >>> welch(np.array([2.0, 3.0, 4.0]), np.array([1.0, 2.0, 3.0])).value
    1.0
    """
    value, count = float(np.mean(a) - np.mean(b)), min(len(a), len(b))
    if count < 2:
        return Difference("Welch", value, math.nan, math.nan, count, math.nan)
    stds = [_std(scores, a, b) for scores in (a, b)]
    error = math.hypot(*(std / math.sqrt(len(scores)) for std, scores in zip(stds, (a, b), strict=True)))
    df = stats.ttest_ind(a, b, equal_var=False).df if error > 0 else math.nan
    deviation = math.hypot(*stds)
    return Difference("Welch", value, error, float(df), count, deviation)


def paired(a: Scores, b: Scores) -> Difference:
    """Return the difference mean(a - b) of paired scores; entries with the same index have the same seed.

    >>> difference = paired(np.array([2.0, 3.1, 4.0]), np.array([1.0, 2.0, 3.0]))
    >>> round(difference.value, 3), round(difference.p_differs(), 3)
    (1.033, 0.001)
    """
    return _describe_mean("paired", a - b, a, b)


def pooled_std(groups: Sequence[Float[np.ndarray, "_"]]) -> tuple[float, int]:
    """Return the pooled standard deviation of groups of scores, and its degrees of freedom; NaN and 0 if unknown."""
    squares = sum((len(group) - 1) * _std(group, *groups) ** 2 for group in groups if len(group) > 1)
    df = sum(len(group) - 1 for group in groups)
    return (math.sqrt(squares / df) if df else math.nan), df


def pooled_difference(a: Scores, b: Float[np.ndarray, " m"], common: tuple[float, int]) -> Difference:
    """Return the difference mean(a) - mean(b) with the `pooled_std` of all groups, wrong if variances differ."""
    value, (deviation, df) = float(np.mean(a) - np.mean(b)), common
    count = min(len(a), len(b)) if df < 2 else max(2, min(len(a), len(b)))
    error = deviation * math.sqrt(1 / len(a) + 1 / len(b))
    return Difference("pooled", value, error, float(df), count, deviation * math.sqrt(2))


def _std(values: Scores, *sources: np.ndarray) -> float:
    """Return the standard deviation of values that were computed from `sources`; 0 if it is only their rounding."""
    deviation, largest = float(np.std(values, ddof=1)), max(float(np.abs(source).max()) for source in sources)
    return 0.0 if deviation <= ROUNDING * largest else deviation


def _describe_mean(method: str, scores: Scores, *sources: np.ndarray) -> Difference:
    """Return the mean of one group as a difference from zero; `sources` as in `_std`, by default the scores."""
    deviation, error = math.nan, math.nan
    if len(scores) > 1:
        deviation = _std(scores, *sources or (scores,))
        error = deviation / math.sqrt(len(scores))
    return Difference(method, float(np.mean(scores)), error, len(scores) - 1.0, len(scores), deviation)


def holm(p: Sequence[float]) -> list[float]:
    """Return p values corrected for several tests (Holm, 1979).

    >>> holm([0.01, 0.04])
    [0.02, 0.04]
    """
    order, adjusted, largest = np.argsort(p, kind="stable"), [0.0] * len(p), 0.0
    for place, i in enumerate(order.tolist()):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = largest
    return adjusted


def slope(x: Scores, y: Scores, blocks: Sequence[Any]) -> Difference:
    """Return the slope of a straight line in `x` with a level of its own in every block, by least squares.

    `blocks` has the block of each point, such as its seed. The slope is NaN if `x` differs in no block.
    """
    inside, groups = [np.array(x, float), np.array(y, float)], [*map(repr, blocks)]
    for group in set(groups):
        members = np.array([other == group for other in groups])
        for values in inside:
            values[members] -= values[members].mean()
    squares, df = float(inside[0] @ inside[0]), len(groups) - len(set(groups)) - 1
    value = float(inside[0] @ inside[1]) / squares if squares else math.nan
    residual = float(np.linalg.norm(inside[1] - value * inside[0]))
    residual = 0.0 if residual <= ROUNDING * float(np.abs(y).max()) else residual
    error = residual / math.sqrt(df * squares) if df > 0 and squares else math.nan
    return Difference("slope", value, error, float(df), 1 + max(df, 0), error)


def seeds_needed(difference: Difference, margin: float, alpha: float = 1 - LEVEL) -> int | None:
    """Return the approximate number of seeds per configuration for an equivalence test with the power POWER.

    The configurations are assumed to be equal, with the observed standard deviation. The power of the two one-sided
    tests uses the noncentral t distribution, with their tails as independent (Phillips, 1990). None if unknown.
    """
    return _fewest(difference, margin, alpha, lambda tail: np.maximum(0.0, 2 * tail - 1))


def seeds_to_differ(difference: Difference, alpha: float = 1 - LEVEL) -> int | None:
    """Return the seeds per configuration that show the observed difference with the power POWER; None if unknown."""
    return _fewest(difference, abs(difference.value), alpha / 2, lambda tail: tail)


def _fewest(difference: Difference, distance: float, alpha: float, power: Callable[[np.ndarray], Any]) -> int | None:
    """Return the fewest seeds for which `power`, a function of the probability of one tail, is POWER."""
    if not difference.testable or distance <= 0:
        return None
    groups, spread = 1 if difference.method == "paired" else 2, difference.seed_std
    coarse = np.unique(np.geomspace(2, MOST_SEEDS, 60).astype(int))
    enough = power(_tail(coarse, groups, spread, distance, alpha)) >= POWER
    if not enough.any():
        return None
    first = int(np.argmax(enough))
    fine = np.arange(coarse[first - 1] + 1 if first else 2, coarse[first] + 1)
    return int(fine[np.argmax(power(_tail(fine, groups, spread, distance, alpha)) >= POWER)])


def _tail(n: Int[np.ndarray, "k"], groups: int, spread: float, distance: float, alpha: float) -> Float[np.ndarray, "k"]:
    """Return the probability that a one-sided test at level alpha with n seeds each rejects at this distance."""
    df, noncentrality = groups * (n - 1.0), distance * np.sqrt(n) / spread
    critical = stats.t.isf(alpha, df)
    # Above 35 the series may not converge, and the random numerator is negligible beside the constant.
    large = stats.chi2.cdf(df * np.square(noncentrality / critical), df)
    return np.where(noncentrality > 35, large, stats.nct.sf(critical, df, np.minimum(noncentrality, 35.0)))


def spearman(x: Scores, y: Scores) -> tuple[float, Interval]:
    """Return Spearman's rank correlation of `x` and `y`, and its 95 % confidence interval.

    The interval uses Fisher's z with the standard error of Bonett and Wright (2000). A correlation of 1 or -1 is in it,
    and counts for z as the next smaller one that n points can have. With fewer than five points the interval is -1 to
    1. The correlation is NaN with fewer than three points, or if `x` or `y` is constant.
    """
    n = len(x)
    if n < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan, NOTHING
    rho = float(stats.spearmanr(x, y).statistic)
    if n < 5:
        return rho, Interval(-1.0, 1.0)
    most = 1 - 6 / (n * (n**2 - 1))
    z, error = math.atanh(min(max(rho, -most), most)), math.sqrt((1 + rho**2 / 2) / (n - 3))
    low, high = map(math.tanh, stats.norm.interval(LEVEL, z, error))
    return rho, Interval(-1.0 if rho < -most else low, 1.0 if rho > most else high)
