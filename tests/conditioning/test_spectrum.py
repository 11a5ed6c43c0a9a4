"""Singular values against given spectra and NumPy in float64, and flags of degenerate matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses

from leanformer.conditioning import digest, spectrum
from leanformer.conditioning.spectrum import FLOOR, condition, map_arrays, read, singular_values, summarise


slow = pytest.mark.slow
SMALL, LARGE = [(49, 64), (97, 97)], pytest.param(577, 1920, marks=slow)
CONDITIONS = np.array([1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])


def as_jax(route):
    """Return a function that measures with JAX by a method: the CPU's, or the other devices', on the CPU."""

    def values(x):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", lambda x, **_: route(x))
            spectrum.use_jax().clear_cache()
            result = jax.jit(singular_values)(jnp.asarray(x))
        spectrum.use_jax().clear_cache()
        return np.asarray(result)

    return values


METHODS = (spectrum.by_gram, spectrum.by_reflections)
ROUTES = {
    "NumPy": singular_values,
    "JAX on a CPU": as_jax(spectrum.by_reflections),
    "JAX elsewhere": as_jax(spectrum.by_gram),
}


@pytest.fixture(params=ROUTES.values(), ids=ROUTES)
def route(request, monkeypatch):
    """Use each way to singular values."""
    monkeypatch.setattr(spectrum, "singular_values", request.param)
    return request.param


def make_orthonormal(rng, rows, columns):
    return np.linalg.qr(rng.standard_normal((rows, columns)))[0]


SPECTRA = {  # from 1 down to x, r values
    "geometric": np.geomspace,
    "even": np.linspace,
    "bottom": lambda one, x, r: np.r_[np.full(r - 1, one), x],
    "top": lambda one, x, r: np.r_[one, np.full(r - 1, x)],
    "halves": lambda one, x, r: np.r_[np.full(r // 2, one), np.full(r - r // 2, x)],
}


@pytest.mark.parametrize(("m", "n"), [*SMALL, (197, 512), LARGE])
def test_condition_number_of_given_spectra(route, rng, m, n):
    """Use all spectra in one batch; for larger sizes only those with the largest and smallest rounding error."""
    r, spectra = min(m, n), SPECTRA.values() if m < 100 else [SPECTRA["halves"], SPECTRA["top"]]
    u, v = make_orthonormal(rng, m, r), make_orthonormal(rng, n, r)
    matrices = [[(u * spectrum(1, 1 / k, r)) @ v.T for k in CONDITIONS] for spectrum in spectra]
    result = condition(np.float32(matrices))
    error = np.abs(np.asarray(result.condition_number) / CONDITIONS - 1)
    assert error[:, CONDITIONS <= 1e4].max() <= 1e-3
    assert error.max() <= 2e-2
    assert result.valid.all()
    np.testing.assert_allclose(result.log10_condition, np.broadcast_to(np.log10(CONDITIONS), error.shape), atol=0.01)
    assert result.shape == (m, n)


@pytest.mark.parametrize(("m", "n"), [(11, 31), (31, 11), (13, 17), (19, 19), (1, 7), (7, 1)])
def test_values_equal_numpy_in_float64(route, rng, m, n):
    x = rng.standard_normal((2, 3, m, n)).astype(np.float32)
    expected = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(route(x), expected, atol=1e-6 * expected.max())
    for result in (singular_values(jnp.asarray(x)), jax.vmap(singular_values)(jnp.asarray(x))):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, atol=1e-6 * expected.max())


@pytest.mark.parametrize(("m", "n"), [*SMALL, LARGE])
def test_rank_deficiency_is_flagged(route, rng, m, n):
    r = min(m, n)
    whole = rng.standard_normal((m, n))
    repeated, low, last = whole.copy(), whole.copy(), make_orthonormal(rng, m, r)
    repeated[-1] = repeated[0]
    low[5:] = rng.integers(-2, 3, (m - 5, 5)) @ np.round(low[:5], 2)
    last = (last * (np.arange(r) < r - 1)) @ make_orthonormal(rng, n, r).T  # all ones and a zero: the noisiest case
    result = condition(np.stack([whole, repeated, last, low]).astype(np.float32))
    assert result.valid.tolist() == [True, False, False, False]
    assert result.finite.all()
    assert result.negligible[:3].tolist() == [0, 1, 1]
    np.testing.assert_allclose(result.condition_number[1:], 1 / FLOOR, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("m", "n"), [(5, 13), (13, 11)])
def test_non_finite_matrix_is_flagged_without_affecting_others(route, rng, m, n, bad):
    x = rng.standard_normal((3, m, n)).astype(np.float32)
    broken = x.copy()
    broken[1, 2, 3] = bad
    assert np.isnan(route(broken)[1]).all()
    good, result = condition(x), condition(broken)
    assert result.valid.tolist() == [True, False, True]
    assert result.finite.tolist() == [True, False, True]
    for a, b in zip(jax.tree.leaves(good), jax.tree.leaves(result), strict=True):
        assert not np.isnan(b).any()
        np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])
    assert np.isinf(result.condition_number[1])


def test_degenerate_matrices_are_flagged(route, rng):
    zeros = condition(jnp.zeros((2, 7, 5)))
    assert zeros.negligible.tolist() == [5, 5]
    assert not zeros.valid.any()
    single = condition(rng.standard_normal((2, 1, 5)).astype(np.float32))
    np.testing.assert_allclose(single.condition_number, 1)
    assert not single.valid.any()
    equal = condition(np.tile(rng.standard_normal((1, 23)), (17, 1)).astype(np.float32))
    assert not equal.valid
    assert equal.finite
    np.testing.assert_allclose([equal.effective_rank, equal.stable_rank], 1, rtol=1e-4)
    for result in (zeros, single, equal):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))


def test_matrices_of_one_row_beside_padding_are_flagged():
    result = summarise(jnp.array([[2.0, 0.0, 0.0], *[[2.0, 1.0, 0.0]] * 2]), (3, 3), rows=jnp.array([1, 2, 2]))
    assert result.valid.tolist() == [False, True, True]
    (layer,) = digest(map_arrays(lambda x: x[None], result))
    assert len(layer["flags"]) == 1 and mentions(layer["flags"][0], 1, 3)
    (layer,) = digest(summarise(jnp.zeros((1, 0, 3)), (3, 3), rows=jnp.zeros((1, 0), int)))
    assert layer["median"] is None and layer["shape"] == [3, 3]


def test_factorisations_depend_on_the_platform():
    lowered = {
        platform: jax.jit(singular_values).trace(jnp.zeros((3, 53, 97))).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    assert "lapack_dgesdd" in lowered["cpu"]
    assert "syevd" not in lowered["cpu"]
    assert "cusolver_syevd_ffi" in lowered["cuda"]  # one call for the whole batch
    for one_by_one in ("gesvd", "geqrf"):
        assert one_by_one not in lowered["cuda"]


def test_both_routes_agree_as_documented(rng):
    r = 97
    u, v = make_orthonormal(rng, 97, r), make_orthonormal(rng, 97, r)
    for kappa, tolerance in ((1e4, 1e-6), (1e6, 1e-3)):
        x = np.stack([(u * spectrum(1, 1 / kappa, r)) @ v.T for spectrum in SPECTRA.values()]).astype(np.float32)
        with jax.enable_x64(True):
            result, expected = (np.asarray(values(jnp.asarray(x, jnp.float64))) for values in METHODS)
        error = np.abs(result[:, 0] / result[:, -1] / (expected[:, 0] / expected[:, -1]) - 1)
        assert 0 < error.max() <= tolerance, (kappa, error)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_scale_does_not_matter(route, rng, scale):
    x = rng.standard_normal((17, 29)).astype(np.float32)
    plain, scaled = condition(x), condition(x * np.float32(scale))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(scaled), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_largest_values_do_not_underflow(dtype):
    """The reciprocal of a value above a quarter of the dtype's range is subnormal."""
    highest = float(np.finfo(dtype).max)
    for scale in (0.1, 0.2, 0.3, 0.9):
        result = condition((np.diag([3.0, 1.0]) / 3 * scale * highest).astype(dtype))
        np.testing.assert_allclose(result.condition_number, 3, rtol=1e-6)
        np.testing.assert_allclose(result.stable_rank, 10 / 9, rtol=1e-6)
        assert result.valid


def test_ranks_of_given_spectra():
    s = jnp.array([[3.0, 3.0, 3.0, 3.0], [5.0, 0.0, 0.0, 0.0], [4.0, 2.0, 1.0, 1.0]])
    result = summarise(s, (4, 9))
    entropy = -np.sum(np.array([4, 2, 1, 1]) / 8 * np.log(np.array([4, 2, 1, 1]) / 8))
    np.testing.assert_allclose(result.effective_rank, [4, 1, np.exp(entropy)], rtol=1e-6)
    np.testing.assert_allclose(result.stable_rank, [4, 1, 22 / 16], rtol=1e-6)
    assert result.negligible.tolist() == [0, 3, 0]
    np.testing.assert_allclose(result.condition_number, [1, 1 / FLOOR, 4], rtol=1e-6)


def test_a_reading_is_never_nan():
    result = read(jnp.array([1.0, jnp.nan, jnp.inf]))
    assert result.value.tolist() == [1, 0, 0]
    assert result.valid.tolist() == [True, False, False]
    assert not read(jnp.ones(2), defined=False).valid.any()


def make_matrix(rng, kappa, parts=1):
    """Return a 7 x 5 matrix with condition number `kappa`: real for one part, complex for two."""

    def draw(rows):
        x = rng.standard_normal((parts, rows, 5))
        return np.linalg.qr(x[0] if parts == 1 else x[0] + 1j * x[1])[0]

    return draw(7) * np.geomspace(1, 1 / kappa, 5) @ draw(5).conj().T


@pytest.mark.parametrize("parts", [1, 2], ids=["real", "complex"])
def test_numpy_matrices_keep_their_precision(rng, parts):
    """κ = 1e9 is beyond the precision of float32; a complex matrix is not reduced to its real part."""
    x = make_matrix(rng, 1e9, parts)
    for matrix in (x, x.tolist()):
        result = condition(matrix)
        assert result.condition_number.dtype == np.float64
        np.testing.assert_allclose(result.condition_number, np.linalg.cond(x), rtol=1e-6)
        np.testing.assert_allclose(result.condition_number, 1e9, rtol=1e-5)
        assert bool(result.valid) and result.shape == (7, 5)
    singular = condition(x @ np.diag([1, 1, 1, 1, 0]))
    assert not singular.valid
    np.testing.assert_allclose(singular.condition_number, 1 / (5 * np.finfo(np.float64).eps))


def test_float64_batch_with_a_nan_matrix(rng):
    x = np.stack([make_matrix(rng, 1e8), np.full((7, 5), np.nan), make_matrix(rng, 10)])
    result = condition(x)
    assert result.finite.tolist() == [True, False, True]
    np.testing.assert_allclose(result.condition_number[np.array([0, 2])], [1e8, 10], rtol=1e-6)


def test_integer_and_complex64_matrices(rng):
    x = np.array([[2, 1], [0, 3], [5, 7]])
    np.testing.assert_allclose(condition(x).condition_number, np.linalg.cond(x), rtol=1e-12)
    z = make_matrix(rng, 100, 2).astype(np.complex64)
    np.testing.assert_allclose(condition(z).condition_number, 100, rtol=1e-4)
    assert not condition(make_matrix(rng, 1e9, 2).astype(np.complex64)).valid  # as in float32


def test_matrices_without_entries_or_with_masked_ones_are_refused():
    with refuses("(3, 0)", error=ValueError):
        condition(np.zeros((3, 0)))
    with refuses("masked", error=ValueError):
        condition(np.ma.masked_equal(np.eye(3), 0))
