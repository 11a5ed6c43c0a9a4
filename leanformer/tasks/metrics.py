"""Metrics of GLUE: accuracy, F1 and Matthews from counts, Pearson and Spearman from all examples.

Matthews is defined as 0 if there is only one class among predictions or labels, F1 as 0 without true positives. A
correlation with a constant is undefined, and returned as None.
"""

import numpy as np
from jaxtyping import Float, Int


def accuracy(confusion: Int[np.ndarray, "v v"]) -> float:
    """Return the accuracy from a confusion matrix; rows are labels, columns predictions.

    >>> accuracy(np.array([[3, 1], [0, 4]]))
    0.875
    """
    return float(np.trace(confusion) / confusion.sum())


def f1(confusion: Int[np.ndarray, "2 2"]) -> float:
    """Return F1, the harmonic mean of precision and recall, of class 1; rows are labels, columns predictions."""
    right, wrong = int(confusion[1, 1]), int(confusion[0, 1] + confusion[1, 0])
    return 2 * right / (2 * right + wrong) if right else 0.0


def matthews(confusion: Int[np.ndarray, "v v"]) -> float:
    """Return the Matthews correlation of labels (rows) and predictions (columns), in [-1, 1]; 0 if undefined.

    Source: Matthews 1975; for more than two classes Gorodkin 2004, eq. 8.
    """
    counts = confusion.astype(object)  # Python integers: products of three counts exceed 2^63
    labels, taken, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    shared = total * np.trace(counts) - labels @ taken
    spread = (total**2 - labels @ labels) * (total**2 - taken @ taken)
    return float(shared) / float(spread) ** 0.5 if spread else 0.0


def pearson(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float | None:
    """Return the linear correlation of two arrays (n,), in [-1, 1].

    It is None if an argument is constant, and NaN if a number is not finite.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    x, y = (values.astype(np.float64) - values.astype(np.float64).mean() for values in (a, b))
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float | None:
    """Return the rank correlation of two arrays (n,), in [-1, 1], with mean ranks for ties.

    It is None if an argument is constant, and NaN if a number is not finite.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    from scipy import stats  # slow to import

    return pearson(*(stats.rankdata(values) for values in (a, b)))
