"""Random-matrix reference: the paper's formula, the exact law and dense Gaussian matrices, compared pairwise."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from leanformer.conditioning.theory import formula, gaussian, gaussian_condition


# tokens, head dimension, heads, the paper's formula, median of the exact law
TABLE = [
    (197, 64, 2, 9.3, 8.7),
    (197, 64, 3, 156, 116),
    (197, 64, 4, 15.3, 14.2),
    (197, 64, 6, 6.05, 5.8),
    (197, 64, 12, 3.05, 2.99),
    (197, 64, 16, 2.56, 2.50),
    (2000, 32, 2, 1.44, 1.41),
    (2000, 32, 4, 1.68, 1.66),
]
NEAR_SQUARE = 3  # number of heads for which 197 x 192 is near square and the distribution broad


@pytest.mark.parametrize(("tokens", "head_dim", "heads", "asymptotic", "median"), TABLE)
def test_formula_and_median_of_reference_sizes(tokens, head_dim, heads, asymptotic, median):
    result = gaussian(tokens, heads * head_dim)
    np.testing.assert_allclose(result.formula, asymptotic, rtol=5e-3)
    np.testing.assert_allclose(result.median, median, rtol=0.05 if heads == NEAR_SQUARE else 1e-2)
    assert result.q10 < result.median < result.q90
    assert result.inaccurate == (heads == NEAR_SQUARE)


def test_quantiles_near_square():
    result = gaussian(197, 192)
    np.testing.assert_allclose([result.q10, result.q90], [81, 167], rtol=0.05)


def test_formula_at_edge_cases():
    assert formula(50, 50) == np.inf
    assert gaussian(50, 50).median < 1e3
    assert formula(3, 11) == formula(11, 3)
    by_heads = [gaussian(128, 64 * heads).median for heads in (1, 2, 4, 12)]
    assert by_heads[1] > by_heads[0] > by_heads[3]  # adding heads is not monotone: a peak at 2 x 64 = 128


@pytest.mark.parametrize(("tokens", "width"), [(23, 31), (29, 29), (47, 11), (1, 5)])
def test_law_equals_dense_gaussian_matrices(rng, tokens, width):
    s = np.linalg.svd(rng.standard_normal((600, tokens, width)), compute_uv=False)
    dense = s[:, 0] / s[:, -1]
    assert ks_2samp(dense, gaussian_condition(tokens, width)).pvalue > 0.01


def test_draws_are_deterministic():
    first = gaussian_condition(7, 13, draws=50)
    assert gaussian_condition(7, 13, draws=50) is first
    gaussian_condition.cache_clear()
    np.testing.assert_array_equal(gaussian_condition(7, 13, draws=50), first)
    assert not np.array_equal(gaussian_condition(7, 13, draws=50, seed=1), first)
