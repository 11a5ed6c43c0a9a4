"""Pseudo-inverse and landmarks of Nyström attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.layers import nystrom
from leanformer.layers.masks import Mask
from tests.layers.test_nystrom import LENGTHS, B, M, N, T, iterate_pseudo_inverse, softmax


def test_pseudo_inverse_converges_to_numpy_pinv(rng):
    a = softmax(rng.standard_normal((B, N, M, M)))
    a[..., -2:, :] = a[..., -2:] = 0  # landmarks without tokens
    for scale in ("matrix", "batch"):
        result = nystrom.pseudo_inverse(jnp.asarray(a, jnp.float32), iterations=20, scale=scale)
        expected = np.linalg.pinv(a)
        np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())
        assert not np.any(result[..., -2:, :]) and not np.any(result[..., -2:])


@pytest.mark.parametrize("scale", ["matrix", "batch"])
def test_pseudo_inverse_of_zeros_is_zero_with_finite_gradient(rng, scale):
    a = jnp.asarray(softmax(rng.standard_normal((B, N, M, M))), jnp.float32)
    for zeros in (a.at[0].set(0), 0 * a):  # one example that is only padding; all of them
        gradient = jax.grad(lambda a: jnp.sum(nystrom.pseudo_inverse(a, scale=scale)[1:] ** 2))(zeros)
        assert np.isfinite(gradient).all()
        assert not np.any(nystrom.pseudo_inverse(zeros, scale=scale)[0])


def test_pseudo_inverse_starts_from_scaled_transpose(rng):
    a = softmax(2 * rng.standard_normal((B, N, M, M)))
    columns, rows = a.sum(axis=-2).max(axis=-1), a.sum(axis=-1).max(axis=-1)
    for scale, c in (("matrix", columns * rows), ("batch", np.full((B, N), columns.max() * rows.max()))):
        result = nystrom.pseudo_inverse(jnp.asarray(a, jnp.float32), iterations=1, scale=scale)
        for i in np.ndindex(B, N):
            np.testing.assert_allclose(result[i], iterate_pseudo_inverse(a[i], 1, c[i]), rtol=1e-4, atol=1e-6)


def test_landmarks_are_contiguous_groups_of_similar_size():
    result = np.asarray(nystrom.landmark_tokens(Mask(lengths=jnp.asarray(LENGTHS)), T, M))
    assert [list(row) for row in result.sum(axis=-1)] == [
        [5, 4, 4, 4, 4, 4, 4],
        [2, 2, 2, 2, 2, 2, 1],
        [1] * 5 + [0] * 2,
    ]
    for row, n in zip(result, LENGTHS, strict=True):
        assert list(row.sum(axis=0)) == [1] * n + [0] * (T - n)
        assert (np.diff(row[:, :n].argmax(axis=0)) >= 0).all()
    np.testing.assert_array_equal(nystrom.landmark_tokens(Mask(), T, M), result[0])
    np.testing.assert_array_equal(
        nystrom.landmark_tokens(Mask(keep=jnp.asarray(np.arange(T) < LENGTHS[:, None])), T, M), result
    )
