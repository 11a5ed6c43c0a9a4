"""Accuracy, F1, Matthews, Pearson and Spearman against their definitions."""

import numpy as np
import pytest
import scipy.stats

from leanformer.tasks import sentences as metrics


def draw_counts(draw, classes, size):
    """Return labels, predictions and their matrix of counts."""
    labels, predictions = draw.integers(0, classes, size), draw.integers(0, classes, size)
    predictions = np.where(draw.random(size) < 0.5, labels, predictions)
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, predictions), 1)
    return labels, predictions, counts


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_metrics_of_counts_equal_their_definitions(classes, rng):
    """Compare with definitions over examples: Matthews is the correlation of indicator vectors."""
    for size in (11, 101):
        labels, predictions, counts = draw_counts(rng, classes, size)
        assert metrics.accuracy(counts) == pytest.approx(np.mean(labels == predictions), rel=1e-12)
        x, y = (np.eye(classes)[values] - np.eye(classes)[values].mean(axis=0) for values in (labels, predictions))
        expected = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
        assert metrics.matthews(counts) == pytest.approx(expected, rel=1e-12)
        if classes == 2:
            precision, recall = np.mean(labels[predictions == 1]), np.mean(predictions[labels == 1])
            assert metrics.f1(counts) == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-12)
            assert metrics.matthews(counts) == pytest.approx(np.corrcoef(labels, predictions)[0, 1], rel=1e-12)


def test_metrics_of_constant_predictions():
    always, never, single_class = np.array([[0, 3], [0, 5]]), np.array([[3, 0], [5, 0]]), np.array([[0, 0], [2, 5]])
    assert [metrics.matthews(counts) for counts in (always, never, single_class)] == [0, 0, 0]
    assert metrics.f1(always) == pytest.approx(10 / 13) and metrics.f1(never) == 0
    assert metrics.f1(np.array([[4, 0], [0, 0]])) == 0
    assert metrics.matthews(np.diag([4, 5])) == 1 and metrics.matthews(np.array([[0, 4], [5, 0]])) == -1
    huge = np.array([[3, 1], [1, 2]]) * 10**12
    assert metrics.matthews(huge) == pytest.approx(metrics.matthews(huge // 10**12), rel=1e-15)
    constant, other = np.ones(7, np.float32), np.arange(7.0)
    assert metrics.pearson(constant, other) == metrics.spearman(other, constant) == 0
    assert np.isnan(metrics.pearson(np.array([np.nan, 1, 2]), other[:3]))
    assert np.isnan(metrics.spearman(np.array([np.nan, 1, 2]), other[:3]))


def test_correlations_equal_scipy(rng):
    for ties in (False, True):
        a = rng.normal(size=53).astype(np.float32)
        b = (a + rng.normal(size=53)).astype(np.float32)
        a, b = (a.round(0), b.round(0)) if ties else (a, b)
        assert metrics.pearson(a, b) == pytest.approx(scipy.stats.pearsonr(a.astype(float), b).statistic, rel=1e-9)
        assert metrics.spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, rel=1e-12)
        assert metrics.spearman(a, b) != pytest.approx(metrics.pearson(a, b), rel=1e-3)
    assert metrics.pearson(1e6 + a, b) == pytest.approx(metrics.pearson(a, b), rel=1e-3)
