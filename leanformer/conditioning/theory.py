"""What Gaussian matrices would show: the prediction of Leaner Transformers (arXiv 2505.20802) and the exact law.

The paper's argument replaces the attention output before its projection, tokens x (heads · head width), by independent
Gaussian entries. Theorem 3.2: with D = heads · head width and N tokens, D ≫ N, its condition number is about 1, and at
fixed head width it tends to 1 as heads are added. Lemma 3.3 is what that rests on: singular values of such a matrix end
at √D ± √N. Condition numbers fall with every head only where D > N already; coming from D < N they peak at D ≈ N.
"""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float


BREAKS = 0.1  # relative: beyond it from the exact median, the paper's formula is said to break


def formula(tokens: int, width: int) -> float:
    """The paper's condition number (√D + √N) / (√D − √N) of a Gaussian tokens x width matrix, D = width, N = tokens.

    The paper states it for D > N. For D < N this is the formula of the transpose, whose singular values are the same;
    for D = N it is infinite, while the matrix is invertible with probability one (see `gaussian`).
    """
    a, b = math.sqrt(tokens), math.sqrt(width)
    return math.inf if tokens == width else (a + b) / abs(a - b)


@functools.lru_cache(maxsize=256)
def gaussian_condition(tokens: int, width: int, draws: int = 1000, seed: int = 0) -> Float[np.ndarray, "draws"]:
    """Condition numbers of independent Gaussian tokens x width matrices, sorted: their exact distribution, sampled.

    Householder reflections turn a Gaussian matrix into a bidiagonal one of independent χ variables without changing its
    singular values (Dumitriu and Edelman 2002, section III.B), so a draw costs O(min) numbers, in float64 on the host:
    0.4 ms at 197 x 1024. Equal arguments give equal draws.

    Raises:
        ValueError: a size under 1.
    """
    small, large = sorted((tokens, width))
    if small < 1 or draws < 1:
        raise ValueError(f"Sizes and draws must be positive, found {tokens} x {width} and {draws}.")
    rng = np.random.default_rng(seed)
    # Zero diagonal, the bidiagonal's two diagonals interleaved beside it: eigenvalues are ± the singular values.
    between = np.empty((draws, 2 * small - 1))
    between[:, ::2] = np.sqrt(rng.chisquare(np.arange(large, large - small, -1), (draws, small)))
    between[:, 1::2] = np.sqrt(rng.chisquare(np.arange(small - 1, 0, -1), (draws, small - 1)))
    found = np.sort([_largest(row, 2 * small - 1) / _largest(row, small) for row in between])
    found.flags.writeable = False  # the cache hands out this very array
    return found


def _largest(between: np.ndarray, index: int) -> float:
    """The eigenvalue number `index`, counted from the lowest, of a tridiagonal matrix with zero diagonal."""
    from scipy.linalg import eigh_tridiagonal  # a 15th of what a command imports, and few ask for a prediction

    zeros = np.zeros(between.size + 1)
    return eigh_tridiagonal(
        zeros, between, eigvals_only=True, select="i", select_range=(index, index), lapack_driver="stebz"
    )[0]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The condition number of a Gaussian matrix of this shape."""

    shape: tuple[int, int]
    formula: float  # the paper's, infinite for a square matrix
    median: float  # exact, with the quantiles at 10 and 90 % of the draws
    q10: float
    q90: float
    breaks: bool  # the formula is further than BREAKS from the median
    note: str


def gaussian(tokens: int, width: int, draws: int = 1000, seed: int = 0) -> Prediction:
    """The prediction for a tokens x width matrix (width = heads · head width), by formula and by the exact law."""
    q10, median, q90 = (float(q) for q in np.quantile(gaussian_condition(tokens, width, draws, seed), (0.1, 0.5, 0.9)))
    asymptotic = formula(tokens, width)
    breaks = abs(asymptotic / median - 1) > BREAKS
    note = "more columns than rows, as the paper assumes" if width > tokens else "formula of the transpose"
    if breaks:
        note += "; the formula breaks, the matrix being small or near square: believe the median"
    return Prediction((tokens, width), asymptotic, median, q10, q90, breaks, note)
