"""Accuracy, F1, Matthews, Pearson and Spearman against their definitions."""

import numpy as np
import pytest
import scipy.stats

from leanformer.tasks import metrics


def drawn(draw, classes, size):
    """Labels and what is told of them, as a matrix of counts too."""
    labels, told = draw.integers(0, classes, size), draw.integers(0, classes, size)
    told = np.where(draw.random(size) < 0.5, labels, told)
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, told), 1)
    return labels, told, counts


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_metrics_of_counts(classes, rng):
    """Against their definitions over examples: Matthews is the correlation of indicator vectors."""
    for size in (11, 101):
        labels, told, counts = drawn(rng, classes, size)
        assert metrics.accuracy(counts) == pytest.approx(np.mean(labels == told), rel=1e-12)
        x, y = (np.eye(classes)[values] - np.eye(classes)[values].mean(axis=0) for values in (labels, told))
        expected = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
        assert metrics.matthews(counts) == pytest.approx(expected, rel=1e-12)
        if classes == 2:
            precision, recall = np.mean(labels[told == 1]), np.mean(told[labels == 1])
            assert metrics.f1(counts) == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-12)
            assert metrics.matthews(counts) == pytest.approx(np.corrcoef(labels, told)[0, 1], rel=1e-12)


def test_metrics_of_constants():
    always, never, one = np.array([[0, 3], [0, 5]]), np.array([[3, 0], [5, 0]]), np.array([[0, 0], [2, 5]])
    assert [metrics.matthews(counts) for counts in (always, never, one)] == [0, 0, 0]
    assert metrics.f1(always) == pytest.approx(10 / 13) and metrics.f1(never) == 0
    assert metrics.f1(np.array([[4, 0], [0, 0]])) == 0
    assert metrics.matthews(np.diag([4, 5])) == 1 and metrics.matthews(np.array([[0, 4], [5, 0]])) == -1
    huge = np.array([[3, 1], [1, 2]]) * 10**12
    assert metrics.matthews(huge) == pytest.approx(metrics.matthews(huge // 10**12), rel=1e-15)
    constant, other = np.ones(7, np.float32), np.arange(7.0)
    assert metrics.pearson(constant, other) is metrics.spearman(other, constant) is None
    assert np.isnan(metrics.pearson(np.array([np.nan, 1, 2]), other[:3]))
    assert np.isnan(metrics.spearman(np.array([np.inf, 1, 2]), other[:3]))


def test_correlations(rng):
    for ties in (False, True):
        a = rng.normal(size=53).astype(np.float32)
        b = (a + rng.normal(size=53)).astype(np.float32)
        a, b = (a.round(0), b.round(0)) if ties else (a, b)
        assert metrics.pearson(a, b) == pytest.approx(scipy.stats.pearsonr(a.astype(float), b).statistic, rel=1e-9)
        assert metrics.spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, rel=1e-12)
        assert metrics.spearman(a, b) != pytest.approx(metrics.pearson(a, b), rel=1e-3)
    assert metrics.pearson(1e6 + a, b) == pytest.approx(metrics.pearson(a, b), rel=1e-3)
