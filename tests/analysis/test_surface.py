"""Response surface: closed-form posterior, quantiles, coverage, undetermined effects, equal results on every CPU."""

import itertools
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT
from messages import mentions, refuses
from scipy import stats

from experiments import coverage
from leanformer.analysis import design, surface
from leanformer.analysis.design import TERMS, Design
from leanformer.analysis.dimensions import Dimensions
from leanformer.analysis.surface import Scale


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


def test_posterior_matches_closed_form_for_normal_noise(monkeypatch, rng):
    """With t of many degrees of freedom: y ~ N(X b, V), b ~ N(0, P), all matrices written out run by run."""
    monkeypatch.setattr(surface, "FREEDOM", 1e9)
    rows = np.insert(Design.from_shapes(draw_shapes(rng, 14)).rows, 0, 1.0, axis=1)
    counts = [1 + i % 3 for i in range(14)]
    values = [rng.normal(0.3, 0.2, n) for n in counts]
    data = surface._Data.of(rows, values)
    points = [(math.log(0.05), 0.3), (math.log(0.2), 0.7), (math.log(0.2), 0.1)]
    ln_scale, rho = map(np.array, zip(*points, strict=True))
    result = data.posterior(ln_scale, rho, np.zeros((3, 8)), 1e-12)

    x, y = np.repeat(rows, counts, axis=0), np.concatenate(values) - np.median([v.mean() for v in values])
    prior = np.diag([surface.FLAT**2, *(term.prior**2 for term in TERMS)])
    same = np.equal.outer(*[np.repeat(range(14), counts)] * 2)
    evidence = []
    for i, (ln_s, r) in enumerate(points):
        noise = np.exp(2 * ln_s) * ((1 - r) * np.eye(len(y)) + r * same)
        precision = np.linalg.inv(prior) + x.T @ np.linalg.inv(noise) @ x
        mean = np.linalg.solve(precision, x.T @ np.linalg.inv(noise) @ y)
        # Relative error of order n / FREEDOM = 1e-8 x distance.
        np.testing.assert_allclose(result.mean[i], mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(result.covariance[i], np.linalg.inv(precision), rtol=1e-5, atol=1e-9)
        evidence.append(stats.multivariate_normal(None, noise + x @ prior @ x.T, allow_singular=False).logpdf(y))
    np.testing.assert_allclose(np.diff(result.evidence), np.diff(evidence), atol=1e-3)


def test_quantiles_match_draws_from_the_posterior(grid_fit, rng):
    new, count = [make_vit(2, 6), make_vit(3, 12, 32), make_vit(5, 3, mlp=64)], 200_000
    k = rng.choice(len(grid_fit.weight), count, p=grid_fit.weight)
    rows, beyond = grid_fit._rows(new)
    factors = np.linalg.cholesky(grid_fit.covariance)
    coefficients = grid_fit.mean[k] + np.einsum("kpq,kq->kp", factors[k], rng.normal(size=(count, 8)))
    centre = coefficients @ rows.T + rng.normal(size=(count, 3)) * design.BEYOND * np.linalg.norm(beyond, axis=1)
    runs = centre + grid_fit.noise[k, None] * rng.standard_t(surface.FREEDOM, (count, 3))
    low, high = grid_fit.interval(new)
    for end, level in ((low, 0.05), (grid_fit.expected_error(new), 0.5), (high, 0.95)):
        shares = (1 / (1 + np.exp(-runs)) < end).mean(axis=0)
        # 4 standard errors of a share of 200,000 draws are 0.002 at 5 %, 0.0045 at 50 %; quadrature is below 1e-3.
        np.testing.assert_allclose(shares, level, atol=0.003 if level != 0.5 else 0.0055)
    repeated = grid_fit.noise * np.sqrt(grid_fit.repeated)
    lack = repeated[k, None] * rng.standard_t(surface.FREEDOM, (count, 4))
    worse = (centre - centre[:, :1] + lack[:, :3] - lack[:, 3:] > 0).mean(axis=0)
    beyond_first = np.linalg.norm(beyond - beyond[0], axis=1)
    assert beyond_first[0] == 0  # the first is inside, so that draws of `beyond` are those of the difference
    np.testing.assert_allclose(grid_fit.probability_worse(new, new[0])[1:], worse[1:], atol=0.0055)
    assert grid_fit.probability_worse(new, new[0])[0] == 0.5


def test_noise_quadrature_matches_students_t():
    nodes, weights = surface.student_nodes(surface.FREEDOM, surface.NODES)
    for value in (-3.0, -2.0, -1.0, 0.5):
        mixture = weights @ stats.norm.cdf(value * np.sqrt(nodes))
        assert mixture == pytest.approx(stats.t.cdf(value, surface.FREEDOM), abs=1e-3)


def test_exact_errors_are_recovered_in_any_order(rng):
    shapes, new = draw_shapes(rng, 60), draw_shapes(rng, 20)
    errors = compute_errors(shapes)
    expected = surface.fit(shapes, [[e] for e in errors]).expected_error(new)
    # Priors of 0.05 to 3 against a smallest noise of 1e-4: shrinkage is of order (1e-4 / 0.05)² / 60.
    np.testing.assert_allclose(expected, compute_errors(new), rtol=1e-4)
    reversed_order = surface.fit(shapes[::-1], [[e] for e in errors[::-1]]).expected_error(new)
    np.testing.assert_allclose(reversed_order, expected, rtol=1e-6)


def test_failed_run_hardly_changes_predictions(rng):
    shapes, new = draw_shapes(rng, 60), draw_shapes(rng, 20)
    errors = compute_errors(shapes) * np.exp(0.01 * rng.normal(size=60))
    before = surface.fit(shapes, [[e] for e in errors]).expected_error(new)
    errors[7] *= 5
    after = surface.fit(shapes, [[e] for e in errors]).expected_error(new)
    assert np.abs(np.log(after / before)).max() < 0.01  # the noise of one run


def test_constant_sizes_keep_their_prior(grid_fit):
    index = {term.axis: i + 1 for i, term in enumerate(TERMS) if term.power == 1}
    i = index["head dimension"]
    assert np.abs(grid_fit.mean[:, i]).max() == 0
    np.testing.assert_allclose(grid_fit.covariance[:, i, i], TERMS[i - 1].prior ** 2, rtol=1e-12)
    # parameters = depth + heads in doublings: along (1, -1, -1) the runs have no information, and the prior remains.
    direction = np.zeros(8)
    direction[[index["parameters"], index["depth"], index["heads"]]] = 1, -1, -1
    scaled = direction * grid_fit.weight.sum()
    precision = np.linalg.inv(grid_fit.covariance) @ scaled
    expected = scaled / np.array([surface.FLAT, *(term.prior for term in TERMS)]) ** 2
    np.testing.assert_allclose(precision, np.tile(expected, (len(precision), 1)), rtol=1e-6, atol=1e-5)


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
    assert Design.from_shapes(make_exact_grid()).collinear() == [(["parameters"], ["depth", "heads"])]
    rng = np.random.default_rng(1)
    assert Design.from_shapes(draw_shapes(rng, 30)).collinear() == []
    fixed = [
        make_vit(d, n, 64 // n, m, params=999) for d, n, m in itertools.product((1, 2, 4), (1, 2, 4, 8), (64, 192))
    ]
    assert Design.from_shapes(fixed).collinear() == [(["heads", "head dimension"], [])]
    assert Design.from_shapes([make_vit(d) for d in range(1, 12)]).collinear() == [(["parameters"], ["depth"])]


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
        ([make_vit(2)] * 20, 0.5, math.inf, (1, surface.FEWEST)),
        (make_exact_grid(), 0.0, math.inf, (0, "metric")),
        (make_exact_grid(), 1.5, 1.0, (1.5, 1, "metric")),
        (make_exact_grid(), 1.0, 1.0, (1, "metric")),
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


SCRIPT = """
import itertools, math
import numpy as np
from leanformer.analysis import surface
from leanformer.analysis.dimensions import Dimensions

def shape(d, n, h=16):
    return Dimensions(96, (n,) * d, (h,) * d, (192,) * d, 10_000 * d * n)

rng = np.random.default_rng(0)
trained = [shape(d, n) for d, n in itertools.product((1, 2, 3), (2, 4, 8, 16))]
errors = [[0.4 - 0.05 * math.log2(s.heads[0]) + 0.003 * rng.normal() for _ in range(2)] for s in trained]
fit = surface.fit(trained, errors, surface.Scale(1.0))
new = [shape(d, n, h) for d, n, h in itertools.product((1, 2, 3, 5), (3, 8, 9, 32), (8, 16))]
expected = fit.expected_error(new)
print(np.argsort(expected).tolist())
for values in (expected, *fit.interval(new), fit.probability_worse(new, new[0])):
    print(*(f"{value:.4g}" for value in values))
print(fit.design.undetermined())
"""


def test_every_blas_kernel_gives_the_same_four_digits():
    """Parameters are an exact product here: the design has a null direction, along which rounding must not decide."""
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else set()
    kernels = ["PRESCOTT"]
    kernels += ["HASWELL", "ZEN"] if {"avx2", "fma"} <= flags else []
    kernels += ["SKYLAKEX"] if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags else []
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the kernels are those of x86-64")
    outputs = {}
    for kernel in kernels:
        environment = os.environ | {"OPENBLAS_CORETYPE": kernel, "PYTHONPATH": str(ROOT)}
        process = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        outputs[kernel] = process.stdout
    assert len(outputs["PRESCOTT"].splitlines()) == 6
    assert set(outputs.values()) == {outputs["PRESCOTT"]}
