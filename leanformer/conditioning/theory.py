"""Random-matrix reference of conditioning: the prediction of Leaner Transformers (arXiv 2505.20802) and the exact law.

The paper's argument replaces the attention output before its projection, tokens x (heads · head dimension), by
independent Gaussian entries. Theorem 3.2: with D = heads · head dimension and N tokens, D ≫ N, its condition number is
about 1, and at a fixed head dimension it tends to 1 as heads are added. It follows from Equation 3: the singular values
of such a matrix lie between √D - √N and √D + √N. More heads lower the condition number only if D > N already; from
D < N it first rises to a peak at D ≈ N.
"""

import dataclasses
import functools
import math

import numpy as np


INACCURATE = 0.1  # relative distance from the exact median beyond which the paper's formula is flagged as inaccurate


def formula(tokens: int, width: int) -> float:
    """Return the paper's condition number (√D + √N) / abs(√D − √N) of a Gaussian matrix, D = width, N = tokens.

    The paper states it for D > N. For D < N this is the formula of the transpose, whose singular values are the same.
    For D = N it is infinite, although the matrix is invertible with probability one (see `gaussian`).

    >>> formula(tokens=4, width=16)
    3.0
    """
    a, b = math.sqrt(tokens), math.sqrt(width)
    return math.inf if tokens == width else (a + b) / abs(a - b)


@functools.lru_cache(maxsize=256)
def gaussian_condition(tokens: int, width: int, draws: int = 1000, seed: int = 0) -> np.ndarray:
    """Sample condition numbers of Gaussian tokens x width matrices from their exact distribution, in ascending order.

    Householder reflections turn a Gaussian matrix into a bidiagonal one of independent χ variables without changing its
    singular values (Dumitriu and Edelman 2002, section III.B), so a draw needs O(min(tokens, width)) random numbers.
    Equal arguments give equal draws; the cache returns the same array, which cannot be written to.
    """
    small, large = sorted((tokens, width))
    rng = np.random.default_rng(seed)
    squares = rng.chisquare(np.arange(large, large - small, -1), (draws, small))  # of the diagonal
    above = rng.chisquare(np.arange(small - 1, 0, -1), (draws, small - 1))  # of the entries above it
    conditions = np.sort(_condition_of_bidiagonal(squares, above))
    conditions.flags.writeable = False
    return conditions


def _condition_of_bidiagonal(squares: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return the condition numbers of bidiagonal matrices, from the squares of their entries, draws x n and n - 1.

    The extreme eigenvalues of BᵀB are found by bisection of their logarithms. The number of eigenvalues below a shift
    is the number of negative pivots of BᵀB - shift, which quotients and differences give to high relative accuracy.
    """
    n = squares.shape[1]
    if n == 1:
        return np.ones(len(squares))
    squares, above = squares.T, np.vstack([above.T, np.zeros(len(squares))])
    bound = (squares + above).sum(axis=0)  # the trace
    lower = np.log(np.stack([np.full_like(bound, 1e-30), bound / n]))  # of the smallest, and of the largest
    upper = np.log(np.stack([squares.min(axis=0), bound]))
    for _ in range(48):
        middle = (lower + upper) / 2
        shift = np.exp(middle)
        below, rest = np.zeros(shift.shape, int), -shift
        for square, next_above in zip(squares, above, strict=True):
            pivot = square + rest
            below += pivot < 0
            rest = next_above * (rest / np.where(pivot == 0, 1e-200, pivot)) - shift
        high = below >= np.array([[1], [n]])
        lower, upper = np.where(high, lower, middle), np.where(high, middle, upper)
    smallest, largest = (lower + upper) / 2
    return np.exp((largest - smallest) / 2)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted condition number of a Gaussian matrix of one shape."""

    shape: tuple[int, int]  # rows (tokens) and columns (number of heads · head dimension)
    formula: float  # infinite for a square matrix
    median: float
    q10: float
    q90: float
    inaccurate: bool  # the formula is further than INACCURATE from the median, relative to it
    note: str


def gaussian(tokens: int, width: int, draws: int = 1000, seed: int = 0) -> Prediction:
    """Return the predicted condition number of a Gaussian tokens x width matrix (width = heads · head dimension).

    The fields are `shape`, the paper's `formula` (infinite for a square matrix), `median`, `q10` and `q90` of `draws`
    samples of the exact distribution, `inaccurate`, True if the formula is over 10 % off the median, and `note`, a
    sentence on it.

    >>> prediction = gaussian(tokens=64, width=1024)
    >>> round(prediction.formula, 2), round(prediction.median, 1), prediction.inaccurate
    (1.67, 1.6, False)
    """
    q10, median, q90 = (float(q) for q in np.quantile(gaussian_condition(tokens, width, draws, seed), (0.1, 0.5, 0.9)))
    asymptotic = formula(tokens, width)
    inaccurate = abs(asymptotic / median - 1) > INACCURATE
    note = "more columns than rows, as the paper assumes" if width > tokens else "formula of the transpose"
    if inaccurate:
        note += "; the formula is inaccurate for small or nearly square matrices: use the median"
    return Prediction((tokens, width), asymptotic, median, q10, q90, inaccurate, note)
