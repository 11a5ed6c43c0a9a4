"""Predictors against what they stand for, and the surface against errors that are known."""

import math

import numpy as np
import pytest

from leanformer.conditioning.theory import gaussian
from leanformer.errors import ConfigError
from leanformer.studies import predictors, surface
from leanformer.studies.predictors import SOVIT, SOVIT_FLOPS, Dimensions


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


def grid(rng, count):
    shapes = []
    for _ in range(count):
        depth, heads, head_dim, mlp = (
            rng.integers(1, 13),
            rng.integers(1, 17),
            rng.integers(8, 129),
            rng.integers(32, 999),
        )
        params = int(np.exp(rng.uniform(10, 16)))
        shapes.append(even(int(depth), int(heads), int(head_dim), int(mlp), 256, params))
    return shapes


TRUE = np.array([-0.3, 0.004, -0.2, 0.05, -0.04, 0.02, -0.03])


def truth(shapes):
    return np.array([math.exp(2.0 + np.dot(TRUE, surface.terms(shape))) for shape in shapes])


def test_surface_finds_what_it_is_made_of(rng):
    shapes = grid(rng, 60)
    fitted = surface.fit(shapes, [[error] for error in truth(shapes)], draws=5)
    new = grid(rng, 20)
    np.testing.assert_allclose(fitted.error(new), truth(new), rtol=1e-6)


def test_one_run_gone_wrong_hardly_moves_it(rng):
    shapes, new = grid(rng, 60), grid(rng, 20)
    errors = truth(shapes) * np.exp(0.01 * rng.normal(size=60))
    errors[7] *= 5
    robust = surface.fit(shapes, [[e] for e in errors], draws=2).error(new)
    assert np.abs(np.log(robust / truth(new))).max() < 0.03 < np.abs(np.log(errors[7] / truth(shapes)[7]))


def test_its_interval_holds_runs_it_has_not_seen(rng):
    shapes, new = grid(rng, 80), grid(rng, 400)
    fitted = surface.fit(
        shapes, [[e * math.exp(0.05 * rng.normal()) for _ in range(2)] for e in truth(shapes)], draws=60
    )
    low, high = fitted.interval(new)
    runs = truth(new) * np.exp(0.05 * rng.normal(size=400))
    assert 0.83 < np.mean((low < runs) & (runs < high)) < 0.97
    better = [new[0], even(new[0].depth, new[0].heads[0], new[0].head_dim[0], new[0].mlp[0], 256, new[0].params * 9)]
    assert fitted.as_good([new[0], new[0]]) == [True, True] and fitted.as_good(better) == [True, False]


@pytest.mark.parametrize(
    ("shapes", "errors", "message"),
    [(4, 1.0, "4 trained shapes, and a surface needs 10"), (12, 0.0, "An error of 0 or less has no logarithm")],
)
def test_what_no_surface_can_be_fitted_to(shapes, errors, message, rng):
    with pytest.raises(ConfigError, match=message):
        surface.fit(grid(rng, shapes), [[errors]] * shapes)
