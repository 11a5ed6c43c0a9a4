"""Published predictors against independent formulas and reported values."""

import math

import numpy as np
import pytest

from leanformer.analysis.design import Dimensions
from study.shapes import predictors
from study.shapes.predictors import SOVIT, SOVIT_FLOPS


def make_dimensions(depth=12, heads=12, head_dim=64, mlp=3072, width=768, params=10**6, **others):
    return Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params, **others)


def test_spectral_capacity_is_an_expected_log_determinant(rng):
    def sample_capacity(rows, columns):
        w = rng.normal(size=(40, rows, columns)) * math.sqrt(2 / (rows + columns))
        return np.linalg.slogdet(np.eye(rows) + w @ w.transpose(0, 2, 1)).logabsdet.mean()

    expected = 9 * sample_capacity(120, 40) + sample_capacity(120, 120) + 2 * sample_capacity(120, 200)
    assert predictors.spectral_capacity(make_dimensions(1, 3, 40, 200, 120)) == pytest.approx(expected, rel=5e-3)
    reported = {(12, 12, 64, 3072): 50.5, (7, 16, 64, 1536): 33.9, (12, 1, 768, 3072): 38.1}  # thousands
    for sizes, thousands in reported.items():
        assert predictors.spectral_capacity(make_dimensions(*sizes)) / 1e3 == pytest.approx(thousands, abs=0.05)


def test_sovit_is_best_at_its_reference_and_scales_with_flops():
    assert predictors.sovit(make_dimensions(27, 16, 72, 4304, 1152, flops=SOVIT_FLOPS)) == pytest.approx(0, abs=1e-12)
    assert predictors.sovit(make_dimensions(20, 16, 72, 4304, 1152, flops=SOVIT_FLOPS)) < -0.05
    sizes = {name: round(size * 0.1**power) for name, (size, power) in SOVIT.items()}
    scaled = make_dimensions(sizes["depth"], 16, 72, sizes["mlp"], sizes["width"], flops=round(0.1 * SOVIT_FLOPS))
    assert predictors.sovit(scaled) > -2e-3
