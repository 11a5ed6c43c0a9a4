"""Metrics of GLUE beside accuracy: F1 and Matthews from counts, Pearson and Spearman from every example.

Matthews is 0 by definition where all are taken for one class or all are of one; F1 is 0 where nothing that is positive
was found. A correlation with a constant has no value, and the caller is told so by None.
"""

import numpy as np
from jaxtyping import Float, Int


def accuracy(confusion: Int[np.ndarray, "v v"]) -> float:
    """The share on the diagonal of a matrix whose rows are labels and columns what was taken for them."""
    return float(np.trace(confusion) / confusion.sum())


def f1(confusion: Int[np.ndarray, "2 2"]) -> float:
    """The harmonic mean of precision and recall of class 1."""
    right, wrong = int(confusion[1, 1]), int(confusion[0, 1] + confusion[1, 0])
    return 2 * right / (2 * right + wrong) if right else 0.0


def matthews(confusion: Int[np.ndarray, "v v"]) -> float:
    """The correlation of labels with what was taken for them (Matthews 1975; of any number of classes, Gorodkin 2004,
    eq. 8), in [-1, 1]."""
    counts = confusion.astype(object)  # Python's integers: products of three counts pass 2^63
    labels, taken, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    shared = total * np.trace(counts) - labels @ taken
    spread = (total**2 - labels @ labels) * (total**2 - taken @ taken)
    return float(shared) / float(spread) ** 0.5 if spread else 0.0


def pearson(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float | None:
    """The linear correlation in float64; None where one of both is constant, since there is none."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    x, y = (values.astype(np.float64) - values.astype(np.float64).mean() for values in (a, b))
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float | None:
    """The same of ranks, equals sharing the mean of theirs."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    from scipy import stats  # slow to import, and needed here alone

    return pearson(*(stats.rankdata(values) for values in (a, b)))
