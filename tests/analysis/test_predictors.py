"""Published predictors against independent formulas and printed values."""

import math

import numpy as np
import pytest

from leanformer.analysis import predictors
from leanformer.analysis.predictors import SOVIT, SOVIT_FLOPS, Dimensions
from leanformer.conditioning.theory import gaussian


def even(depth=12, heads=12, head_dim=64, mlp=3072, width=768, params=10**6, **others):
    return Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params, **others)


def test_spectral_capacity_is_an_expected_logarithm_of_determinants(rng):
    shape = even(1, 3, 40, 200, 120)

    def sampled(rows, columns):
        w = rng.normal(size=(40, rows, columns)) * math.sqrt(2 / (rows + columns))
        return np.linalg.slogdet(np.eye(rows) + w @ w.transpose(0, 2, 1)).logabsdet.mean()

    expected = 9 * sampled(120, 40) + sampled(120, 120) + 2 * sampled(120, 200)
    found = predictors.spectral_capacity(shape)
    assert found == pytest.approx(expected, rel=5e-3)
    assert predictors.spectral_capacity(even(1, 3, 44, 200, 120)) > found * 1.02


def test_spectral_capacity_of_published_rows():
    rows = {(12, 12, 64, 3072): 50.5, (7, 16, 64, 1536): 33.9, (12, 1, 768, 3072): 38.1}  # thousands, to the digit
    for sizes, thousands in rows.items():
        assert predictors.spectral_capacity(even(*sizes)) / 1e3 == pytest.approx(thousands, abs=0.05)


def test_conditioning_is_the_gaussian_law():
    shape = Dimensions(8, (2, 4), (5, 5), (8, 8), 1, tokens=13)
    expected = -(math.log(gaussian(13, 10).median) + math.log(gaussian(13, 20).median)) / 2
    assert predictors.conditioning(shape) == pytest.approx(expected, rel=1e-12)
    assert predictors.conditioning(even()) is None


def test_sovit_is_best_at_its_own_shape_and_follows_compute():
    own = even(27, 16, 72, 4304, 1152, flops=SOVIT_FLOPS)
    assert predictors.sovit(own) == pytest.approx(0, abs=1e-12)
    for changed in (
        even(20, 16, 72, 4304, 1152, flops=SOVIT_FLOPS),
        even(27, 16, 72, 4304, 1152, flops=SOVIT_FLOPS // 9),
    ):
        assert predictors.sovit(changed) < -0.05
    third = {name: round(size * 0.1**power) for name, (size, power) in SOVIT.items()}
    fitting = even(third["depth"], 16, 72, third["mlp"], third["width"], flops=round(0.1 * SOVIT_FLOPS))
    assert predictors.sovit(fitting) > -2e-3
