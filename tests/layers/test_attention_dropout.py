"""Dropped attention weights, and kernels that cannot drop any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.layers.attention import attend
from leanformer.layers.masks import Mask
from tests.layers.test_attention_registry import B, H, K, N, T


@pytest.mark.parametrize("kv", [K, N])
def test_dropout_gradients_match_naive_backend(kv, rng):
    """In float64, against JAX's gradients of the naive backend; other draws and no dropout give other gradients."""
    with jax.enable_x64(True):
        shapes = [(B, T, N, H), (B, T, kv, H), (B, T, kv, H)]
        arrays = [jnp.asarray(2 * rng.standard_normal(shape)) for shape in shapes]
        mask = Mask(causal=True, lengths=jnp.array([T, 4]))

        def gradients(backend, seed, rate=0.3):
            def loss(q, k, v):
                options = {"dropout": rate, "key": jax.random.split(jax.random.key(seed), B), "soft_cap": 2.0}
                return jnp.sum(jnp.sin(attend(q, k, v, mask=mask, backend=backend, **options)))

            return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

        expected, without_dropout = gradients("naive", 1), gradients("xla", 1, 0.0)
        for a, b, c, d in zip(gradients("xla", 1), expected, gradients("xla", 2), without_dropout, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
            assert np.abs(c - b).max() > 1e-2 < np.abs(d - b).max()


@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_dropped_attention_weights_are_zero_or_rescaled(backend):
    """Equal weights, read out by values that are a basis, are zero or divided by the fraction kept, to 16 bits.

    Every example has a separate key.
    """
    batch, tokens, heads, keys, rate = 3, 11, 2, 67, 0.3
    q, k = jnp.zeros((batch, tokens, heads, 4)), jnp.zeros((batch, keys, heads, 4))
    v = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (batch, keys, heads, keys))
    example_keys = jax.random.split(jax.random.key(0), batch)

    def weights(examples=slice(None), **options):
        return np.asarray(attend(q[examples], k[examples], v[examples], backend=backend, **options))

    result = weights(dropout=rate, key=example_keys)
    keep_rate = 1 - round(rate * 2**16) / 2**16
    dropped = result == 0
    np.testing.assert_allclose(result[~dropped], 1 / keys / keep_rate, rtol=1e-6)
    assert abs(dropped.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / dropped.size)
    assert not np.array_equal(dropped[:, :, 0], dropped[:, :, 1]) and not np.array_equal(dropped[:, 0], dropped[:, 1])
    examples = np.array([2, 0])
    np.testing.assert_array_equal(weights(examples, dropout=rate, key=example_keys[examples]), result[examples])
    assert not np.array_equal(weights(dropout=rate, key=example_keys[::-1]), result)
    for options in ({"dropout": rate}, {"dropout": 0.0, "key": example_keys}):
        np.testing.assert_allclose(weights(**options), 1 / keys, rtol=1e-6)
