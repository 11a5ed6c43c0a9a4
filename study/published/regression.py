"""Least squares with cluster-robust intervals, for tables of trained models."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from leanformer.analysis.statistics import Difference


SINGULAR = 1e-9  # smallest eigenvalue, relative to 1, below which columns are collinear


def fit(
    y: Float[np.ndarray, " n"], columns: Mapping[str, Float[np.ndarray, " n"]], clusters: np.ndarray
) -> dict[str, Difference]:
    """Return the coefficient of every column of a least-squares fit with an intercept.

    Standard errors come from the jackknife over clusters (CR3; Bell and McCaffrey, 2002; with one row per cluster
    about HC3), which assumes neither equal variances nor independence within a cluster. Intervals use Student's t with
    one degree of freedom less than there are clusters. Columns are centred, so a coefficient beside a centred square is
    the slope at the mean.

    Raises:
        ValueError: columns are collinear, or become so without one of the clusters.
    """
    design = np.column_stack([np.ones(len(y)), *(x - x.mean() for x in columns.values())])
    scale = np.linalg.norm(design, axis=0)
    q, r = np.linalg.qr(design / np.where(scale > 0, scale, 1))
    if abs(np.diag(r)).min() < SINGULAR:
        raise ValueError("Columns of the regression are collinear.")
    solution = np.linalg.solve(r, q.T @ y)
    residuals, groups = y - q @ (r @ solution), list(dict.fromkeys(clusters))
    changes = []
    for group in groups:
        rows = clusters == group
        rest = np.eye(rows.sum()) - q[rows] @ q[rows].T  # singular if the other clusters do not determine a coefficient
        if np.linalg.eigvalsh(rest)[0] < SINGULAR:
            raise ValueError(f"Columns of the regression are collinear without {group}.")
        changes.append(np.linalg.solve(r, q[rows].T @ np.linalg.solve(rest, residuals[rows])))
    count = len(groups)
    errors = np.sqrt((count - 1) / count * np.square(changes).sum(axis=0)) / scale
    results = zip(columns, (solution / scale)[1:], errors[1:], strict=True)
    return {name: Difference("CR3", float(x), float(e), count - 1.0, count, math.nan) for name, x, e in results}


def mean(y: Float[np.ndarray, " n"], clusters: np.ndarray) -> Difference:
    """Return the mean of all rows, with an error as in `fit`."""
    groups = list(dict.fromkeys(clusters))
    without, count = np.array([y[clusters != group].mean() for group in groups]), len(groups)
    error = math.sqrt((count - 1) / count * ((without - y.mean()) ** 2).sum())
    return Difference("CR3", float(y.mean()), error, count - 1.0, count, math.nan)
