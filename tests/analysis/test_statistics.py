"""Intervals and tests against their definitions, and coverage of intervals."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from leanformer.analysis import statistics
from leanformer.analysis.statistics import NOTHING, Difference, Interval


A, B = np.array([0.71, 0.74, 0.69, 0.78, 0.75]), np.array([0.61, 0.70, 0.66, 0.69, 0.72])


def test_welch_matches_formula():
    va, vb = A.var(ddof=1) / 5, B[:4].var(ddof=1) / 4
    df = (va + vb) ** 2 / (va**2 / 4 + vb**2 / 3)
    result = statistics.welch(A, B[:4])
    assert result.value == pytest.approx(A.mean() - B[:4].mean(), rel=1e-12)
    assert (result.error, result.df) == pytest.approx((math.sqrt(va + vb), df), rel=1e-12)
    assert result.p_differs() == pytest.approx(stats.ttest_ind(A, B[:4], equal_var=False).pvalue, rel=1e-9)
    # an interval contains zero if and only if the test does not reject
    level = 1 - result.p_differs()
    assert result.interval(level).low == pytest.approx(0, abs=1e-9)


def test_pooled_difference_matches_students_t_test():
    two = statistics.pooled_difference(A, B[:4], statistics.pooled_std([A, B[:4]]))
    assert two.p_differs() == pytest.approx(stats.ttest_ind(A, B[:4]).pvalue, rel=1e-9)
    groups = [A, B, A + 3]
    deviation, df = statistics.pooled_std(groups)
    assert (deviation, df) == pytest.approx((math.sqrt(np.mean([g.var(ddof=1) for g in groups])), 12), rel=1e-12)
    # One seed per group is enough if other groups have the variance.
    assert statistics.pooled_difference(A[:1], B[:1], (deviation, df)).testable
    assert not statistics.pooled_difference(A[:1], B[:1], statistics.pooled_std([A[:1], B[:1]])).testable


def test_paired_difference_matches_paired_t_test():
    result = statistics.paired(A, B)
    d = A - B
    assert (result.value, result.error, result.df) == pytest.approx(
        (d.mean(), d.std(ddof=1) / math.sqrt(5), 4), rel=1e-12
    )
    assert result.p_differs() == pytest.approx(stats.ttest_rel(A, B).pvalue, rel=1e-9)
    assert statistics.paired(A + 3, B + 3).interval().low == pytest.approx(result.interval().low, rel=1e-9)


@pytest.mark.parametrize("margin", [0.02, 0.1, 0.3])
def test_equivalence_is_two_one_sided_tests(margin):
    low = stats.ttest_ind(A + margin, B, equal_var=False, alternative="greater").pvalue
    high = stats.ttest_ind(A - margin, B, equal_var=False, alternative="less").pvalue
    assert statistics.welch(A, B).p_within(margin) == pytest.approx(max(low, high), rel=1e-9)
    outside = stats.ttest_ind(A - margin, B, equal_var=False, alternative="greater").pvalue
    assert statistics.welch(A, B).p_beyond(margin) == pytest.approx(min(1.0, 2 * outside), rel=1e-9)


@pytest.mark.parametrize("scores", [[0.7], [0.7, 0.7]])
def test_zero_variance_and_single_values_give_no_result(scores):
    scores = np.array(scores)
    assert statistics.mean_interval(scores) == NOTHING
    result = statistics.welch(scores, scores)
    assert (result.interval(), result.p_differs(), result.p_within(9.0), result.p_beyond(0.0)) == (
        NOTHING,
        1.0,
        1.0,
        1.0,
    )
    assert statistics.seeds_needed(result, 1.0) is None


@pytest.mark.parametrize("n", [5, 6, 40])
def test_interval_of_a_perfect_rank_correlation(n):
    x = np.arange(n, dtype=float)
    rho, interval = statistics.spearman(x, 3 * x)
    assert rho == pytest.approx(1) and interval.high == 1
    assert interval.low < 0.8 if n < 7 else 0.99 < interval.low < 1
    assert statistics.spearman(x, -x)[1] == Interval(-1.0, -interval.low)


@pytest.mark.parametrize("pairs", [1, 10, 1000])
def test_two_seeds_suffice_for_a_margin_far_above_their_spread(pairs):
    difference = statistics.paired(np.array([1.0, 1.0, 1.0]), np.array([1.0, 1.0 + 1e-9, 1.0 - 1e-9]))
    assert statistics.seeds_needed(difference, 1.0, 0.05 / pairs) == 2


def test_rounding_is_no_variance():
    """0.8335 - 0.832 and 0.828 - 0.8265 differ by rounding only: two ties, which say nothing of other seeds."""
    a, b = np.array([0.828, 0.8335]), np.array([0.8265, 0.832])
    assert np.std(a - b) > 0 and not statistics.paired(a, b).testable
    equal, other = np.array([0.857] * 3), np.array([0.855] * 3)
    assert np.std(equal) > 0 and statistics.mean_interval(equal) == NOTHING
    pooled = statistics.pooled_std([equal, other])
    for difference in (statistics.welch(equal, other), statistics.pooled_difference(equal, other, pooled)):
        assert not difference.testable and difference.p_differs() == 1.0
    tiny = 1e-9 * np.array([1.0, 2.0, 4.0])  # small scores keep their variance
    assert statistics.mean_interval(tiny).high < 1e-8 and statistics.paired(0.5 + tiny, 0.5 - tiny).testable


def adjust_by_closed_testing(p):
    """Return Holm's p by the closed testing principle: the largest Bonferroni p of all sets with this test."""
    sets = [s for n in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), n)]
    return [max(min(1.0, len(s) * min(p[i] for i in s)) for s in sets if j in s) for j in range(len(p))]


@pytest.mark.parametrize("p", [[0.01], [0.01, 0.04, 0.03], [0.5, 0.001, 0.02, 0.9, 0.02], [0.2, 0.2]])
def test_holm_matches_closed_testing(p):
    assert statistics.holm(p) == pytest.approx(adjust_by_closed_testing(p), rel=1e-12)


def test_needed_seeds_depend_on_variance_not_on_group_sizes():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=40), rng.normal(size=3)
    a, b = ((x - x.mean()) / x.std(ddof=1) for x in (a, b))
    expected = statistics.seeds_needed(statistics.welch(a, a), 0.9)
    assert statistics.seeds_needed(statistics.welch(a, b), 0.9) == expected
    assert statistics.seeds_needed(statistics.pooled_difference(a, b, (1.0, 41)), 0.9) == expected
    assert statistics.seeds_needed(statistics.pooled_difference(a[:1], b[:1], (1.0, 41)), 0.9) == expected


@pytest.mark.parametrize(("method", "groups"), [("paired", 1), ("Welch", 2)])
def test_needed_seeds_are_the_minimum(method, groups):
    count = 7
    result = Difference(method, 0.1, math.sqrt(groups / count), groups * (count - 1.0), count, math.sqrt(groups))
    n = statistics.seeds_needed(result, 0.9)

    def power(n, draws=40_000):
        rng = np.random.default_rng(n)
        x = rng.normal(size=(groups, draws, n))
        mean, error = x[0].mean(-1) - (x[1].mean(-1) if groups == 2 else 0), np.sqrt(x.var(-1, ddof=1).sum(0) / n)
        return np.mean(np.abs(mean) + stats.t.isf(0.05, groups * (n - 1)) * error < 0.9)

    assert power(n) > 0.79 and power(n - 1) < 0.8
    assert statistics.seeds_needed(result, 1e-9) is None


def test_rank_correlation():
    x = np.array([5, 1, 4, 2, 9, 7, 8.0])
    rho, interval = statistics.spearman(x, np.exp(x))
    assert rho == pytest.approx(1) and interval.high == pytest.approx(1)
    y = np.array([2, 1, 3, 5, 4, 9, 7.0])
    ranks = [np.argsort(np.argsort(v)) for v in (x, y)]
    rho, interval = statistics.spearman(x, y)
    assert rho == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-12) and interval.low < 0 < rho < interval.high < 1
    assert statistics.spearman(x[:4], y[:4])[1].low == -1 and math.isnan(statistics.spearman(np.ones(3), x[:3])[0])


def test_slope_matches_linear_regression_in_one_block():
    x, y = np.array([1.0, 2, 2, 3, 5]), np.array([0.1, 0.3, 0.2, 0.2, 0.6])
    expected, result = stats.linregress(x, y), statistics.slope(x, y, [0] * 5)
    assert (result.value, result.error, result.df) == pytest.approx((expected.slope, expected.stderr, 3), rel=1e-9)
    assert result.p_differs() == pytest.approx(expected.pvalue, rel=1e-9)
    assert math.isnan(statistics.slope(x[1:3], y[1:3], [0, 0]).value)


@pytest.mark.parametrize("groups", [1, 2])
def test_runs_to_differ_are_the_minimum_of_the_t_test(groups):
    """Power of the t test by simulation."""
    result = Difference("paired" if groups == 1 else "Welch", 0.9, 0.1, 9.0, 10, math.sqrt(groups))
    n = statistics.seeds_to_differ(result)

    def power(n, draws=40_000):
        rng = np.random.default_rng(n)
        x = rng.normal(size=(groups, draws, n))
        x[0] += 0.9
        test = stats.ttest_1samp(x[0], 0, axis=-1) if groups == 1 else stats.ttest_ind(*x, axis=-1)
        return np.mean(test.pvalue < 0.05)

    assert power(n) > 0.79 and power(n - 1) < 0.805
