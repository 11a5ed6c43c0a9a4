"""Response surface: closed-form posterior, predictions, coverage, undetermined effects."""

import itertools
import math

import numpy as np
import pytest
from messages import mentions, refuses
from scipy import optimize, special, stats

from leanformer.analysis import design, surface
from leanformer.analysis.design import TERMS, Design, Dimensions
from leanformer.analysis.surface import Scale
from study.shapes import coverage


def make_vit(depth, heads=4, head_dim=16, mlp=192, width=96, params=None):
    params = params or depth * (4 * width * heads * head_dim + 2 * width * mlp) + 7 * width
    return Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params)


def draw_shapes(rng, count):
    ends = ((1, 13), (1, 17), (8, 129), (32, 999))
    shapes = [[int(rng.integers(*pair)) for pair in ends] for _ in range(count)]
    return [make_vit(*sizes, width=256, params=int(np.exp(rng.uniform(10, 16)))) for sizes in shapes]


SLOPES = np.array([-0.2, 0.003, -0.12, 0.03, -0.03, 0.015, -0.02])


def compute_errors(shapes, level=0.5):
    """Return errors by the terms of the regression, centred at the sizes of one shape."""
    centre = design.doublings(make_vit(4, 4, 32, 256, 256, 500_000))
    return np.array([math.exp(level + np.dot(SLOPES, design.terms(design.doublings(s), centre))) for s in shapes])


def make_exact_grid():
    """Return shapes of 3 depths x 4 heads whose parameters are exactly depth x heads x constant."""
    return [make_vit(d, n, params=10_000 * d * n) for d, n in itertools.product((1, 2, 3), (2, 4, 8, 16))]


@pytest.fixture
def grid_fit(rng):
    shapes = make_exact_grid()
    errors = [[0.3 * s.params**-0.1 * math.exp(0.01 * rng.normal()) for _ in range(2)] for s in shapes]
    return surface.fit(shapes, errors, Scale(1.0))


def test_posterior_has_the_noise_with_the_largest_evidence(rng):
    """y ~ N(X b, noise), b ~ N(0, P); the noise has a scaled inverse chi-squared prior."""
    shapes = draw_shapes(rng, 14)
    values = rng.normal(0.3, 0.2, 14)
    fit = surface.fit(shapes, [[math.exp(value)] for value in values])
    rows, y = np.insert(Design.from_shapes(shapes).rows, 0, 1.0, axis=1), values - np.median(values)
    prior = np.diag([surface.FLAT**2, *(term.prior**2 for term in TERMS)])

    def loss(log_noise):
        noise = math.exp(log_noise)
        evidence = stats.multivariate_normal(None, noise * np.eye(14) + rows @ prior @ rows.T).logpdf(y)
        return -evidence + surface.NOISE_FREEDOM / 2 * (log_noise + surface.NOISE**2 / noise)

    best = optimize.minimize_scalar(loss, bounds=(-12, 2), method="bounded", options={"xatol": 1e-9})
    assert fit.noise == pytest.approx(math.exp(best.x), rel=1e-3)
    covariance = np.linalg.inv(np.linalg.inv(prior) + rows.T @ rows / fit.noise)
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-6, atol=1e-12)
    level = np.eye(8)[0] * np.median(values)
    np.testing.assert_allclose(fit.mean - level, covariance @ rows.T @ y / fit.noise, rtol=1e-6, atol=1e-9)


def test_predictions_are_students_t(grid_fit):
    """Inside the sizes, of a single run; and the difference of two architectures' means."""
    new = [make_vit(2, 6), make_vit(3, 12)]
    rows, beyond = grid_fit._rows(new)
    assert not beyond[:, :4].any() and grid_fit.seeds > 0
    beyond_variance = design.BEYOND**2 * (beyond**2).sum(axis=1)
    error = np.sqrt(np.diag(rows @ grid_fit.covariance @ rows.T) + beyond_variance + grid_fit.noise + grid_fit.seeds)
    for level in (0.5, 0.9):
        half = stats.t.ppf((1 + level) / 2, grid_fit.freedom) * error
        ends = [rows @ grid_fit.mean - half, rows @ grid_fit.mean + half]
        np.testing.assert_allclose(grid_fit.interval(new, level), special.expit(ends), rtol=1e-9)
    np.testing.assert_allclose(grid_fit.expected_error(new), special.expit(rows @ grid_fit.mean), rtol=1e-12)
    assert grid_fit.probability_worse(new, new[0])[0] == 0.5


def test_exact_errors_are_recovered_in_any_order(rng):
    shapes, new = draw_shapes(rng, 60), draw_shapes(rng, 20)
    errors = compute_errors(shapes)
    expected = surface.fit(shapes, [[e] for e in errors]).expected_error(new)
    # Priors of 0.05 to 3 against a smallest noise of 1e-4: shrinkage is of order (1e-4 / 0.05)² / 60.
    np.testing.assert_allclose(expected, compute_errors(new), rtol=1e-4)
    reversed_order = surface.fit(shapes[::-1], [[e] for e in errors[::-1]]).expected_error(new)
    np.testing.assert_allclose(reversed_order, expected, rtol=1e-6)


def test_constant_sizes_keep_their_prior(grid_fit):
    index = {term.axis: i + 1 for i, term in enumerate(TERMS) if term.power == 1}
    i = index["head dimension"]
    assert grid_fit.mean[i] == 0 and grid_fit.covariance[i, i] == pytest.approx(TERMS[i - 1].prior ** 2, rel=1e-9)
    # parameters = depth + heads in doublings: along (1, -1, -1) the runs have no information, and the prior remains.
    direction = np.zeros(8)
    direction[[index["parameters"], index["depth"], index["heads"]]] = 1, -1, -1
    expected = direction / np.array([surface.FLAT, *(term.prior for term in TERMS)]) ** 2
    np.testing.assert_allclose(np.linalg.inv(grid_fit.covariance) @ direction, expected, rtol=1e-6, atol=1e-5)


def test_error_rate_stays_below_1_and_intervals_widen_outside(grid_fit):
    inside, near, far = make_vit(2, 6), make_vit(2, 6, 32), make_vit(8, 1, 128, 24, 24, 900)
    low, high = grid_fit.interval([inside, near, far])
    width = np.log(high / low)
    assert width[0] < width[1] < width[2] and 0 < low[2] < high[2] < 1
    assert grid_fit.design.outside(inside) == [] and grid_fit.design.outside(near) == ["head dimension"]
    assert set(grid_fit.design.outside(far)) == set(design.SIZES)
    smallest, *_, largest = make_exact_grid()
    worse = grid_fit.probability_worse([near, smallest, largest], largest)
    assert worse[2] == 0.5 and 0.05 < worse[0] < 0.95 < worse[1]


def test_predictions_scale_with_the_limit_of_errors(rng):
    """An error of 1 - correlation is at most 2: twice the errors and the limit give twice the predictions."""
    shapes, new = make_exact_grid(), [make_vit(2, 6), make_vit(5, 3, 32)]
    law = 0.3 * np.array([s.params for s in shapes]) ** -0.1
    errors = law * np.exp(0.01 * rng.normal(size=len(shapes)))
    one, two = (surface.fit(shapes, [[limit * e] for e in errors], Scale(limit)) for limit in (1.0, 2.0))
    np.testing.assert_allclose(two.expected_error(new), 2 * one.expected_error(new), rtol=1e-9)
    np.testing.assert_allclose(two.interval(new), 2 * one.interval(new), rtol=1e-9)
    # Noise of 1 %: predictions are at most that far from the measurements, and the regression nearly has this law.
    np.testing.assert_allclose(two.expected_error(shapes), 2 * law, rtol=0.02)


def test_collinear_sizes_are_named():
    assert Design.from_shapes(make_exact_grid()).collinear() == [["parameters", "depth", "heads"]]
    rng = np.random.default_rng(1)
    assert Design.from_shapes(draw_shapes(rng, 30)).collinear() == []
    fixed = [
        make_vit(d, n, 64 // n, m, params=999) for d, n, m in itertools.product((1, 2, 4), (1, 2, 4, 8), (64, 192))
    ]
    assert Design.from_shapes(fixed).collinear() == [["heads", "head dimension"]]
    assert Design.from_shapes([make_vit(d) for d in range(1, 12)]).collinear() == [["parameters", "depth"]]


def test_undetermined_effects_are_named():
    sentences = Design.from_shapes(make_exact_grid()).undetermined()
    assert [mentions(s, "head dimension") for s in sentences] == [True, False, False]
    assert mentions(sentences[1], "MLP / width") and mentions(sentences[2], "parameters", "depth", "heads")
    one_depth = Design.from_shapes([make_vit(2, n, h) for n, h in itertools.product((1, 2, 4, 8), (8, 16, 32))])
    assert mentions(one_depth.undetermined()[0], "depth")
    two = Design.from_shapes([make_vit(d, n) for d, n in itertools.product((2, 4), (1, 2, 4, 8, 16))]).undetermined()
    assert mentions(two[0], "depth", "two")


@pytest.mark.parametrize(
    ("shapes", "error", "limit", "parts"),
    [
        ([make_vit(d) for d in range(1, 5)], 0.5, math.inf, (4, surface.FEWEST)),
        (make_exact_grid(), 0.0, math.inf, (0, "metric")),
        (make_exact_grid(), 1.5, 1.0, (1.5, 1, "metric")),
    ],
)
def test_ill_posed_runs_are_refused(shapes, error, limit, parts):
    with refuses(*parts):
        surface.fit(shapes, [[error]] * len(shapes), Scale(limit))


def test_intervals_contain_new_runs_and_expectations():
    rng, fractions = np.random.default_rng(3), []
    for _ in range(8):
        law = coverage.regression_law(rng)
        trained, new = coverage.sweeps(rng)["20 random shapes"]
        fit = surface.fit(trained, [[law(s) * math.exp(0.01 * rng.normal())] for s in trained])
        low, high = fit.interval(new)
        expected = fit.expected_error(new)
        assert ((low < expected) & (expected < high)).all()
        runs = np.array([law(s) * math.exp(0.01 * rng.normal()) for s in new])
        fractions.append(np.mean((low < runs) & (runs < high)))
    # 90 % of 320 runs, 40 to a fit: the standard error over fits is about 2.5 points.
    assert 0.82 < np.mean(fractions) < 0.98


@pytest.mark.slow
def test_coverage_of_every_type_of_sweep(capsys):
    assert coverage.planned(np.random.default_rng(0), 200), capsys.readouterr().out
