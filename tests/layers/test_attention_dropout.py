"""Dropped attention weights, and kernels that cannot drop any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses

from leanformer.layers import backends
from leanformer.layers.attention import attend
from leanformer.layers.masks import Mask
from tests.layers.test_attention_registry import B, H, K, N, T


@pytest.mark.parametrize("kv", [K, N])
def test_gradients_under_dropout_are_those_of_the_plain_form(kv, rng):
    """In float64, the plain form's by JAX; those of other draws, or of none, are others."""
    with jax.enable_x64(True):
        shapes = [(B, T, N, H), (B, T, kv, H), (B, T, kv, H)]
        arrays = [jnp.asarray(2 * rng.standard_normal(shape)) for shape in shapes]
        mask = Mask(causal=True, lengths=jnp.array([T, 4]))

        def gradients(backend, seed, rate=0.3):
            def loss(q, k, v):
                how = {"dropout": rate, "key": jax.random.split(jax.random.key(seed), B), "soft_cap": 2.0}
                return jnp.sum(jnp.sin(attend(q, k, v, mask=mask, backend=backend, **how)))

            return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

        expected, none = gradients("naive", 1), gradients("xla", 1, 0.0)
        for a, b, c, d in zip(gradients("xla", 1), expected, gradients("xla", 2), none, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
            assert np.abs(c - b).max() > 1e-2 < np.abs(d - b).max()


@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_dropped_attention_weights(backend):
    """Of equal weights, which values that are a basis show: each is gone, or divided by the share that stays, to
    16 bits; each example by a key of its own."""
    batch, tokens, heads, keys, rate = 3, 11, 2, 67, 0.3
    q, k = jnp.zeros((batch, tokens, heads, 4)), jnp.zeros((batch, keys, heads, 4))
    v = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (batch, keys, heads, keys))
    own = jax.random.split(jax.random.key(0), batch)

    def weights(some=slice(None), **how):
        return np.asarray(attend(q[some], k[some], v[some], backend=backend, **how))

    result = weights(dropout=rate, key=own)
    stays = 1 - round(rate * 2**16) / 2**16
    gone = result == 0
    np.testing.assert_allclose(result[~gone], 1 / keys / stays, rtol=1e-6)
    assert abs(gone.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / gone.size)
    assert not np.array_equal(gone[:, :, 0], gone[:, :, 1]) and not np.array_equal(gone[:, 0], gone[:, 1])
    some = np.array([2, 0])
    np.testing.assert_array_equal(weights(some, dropout=rate, key=own[some]), result[some])
    assert not np.array_equal(weights(dropout=rate, key=own[::-1]), result)
    for how in ({"dropout": rate}, {"dropout": 0.0, "key": own}):
        np.testing.assert_allclose(weights(**how), 1 / keys, rtol=1e-6)


def test_cudnn_refuses_dropout():
    with refuses('model.backend="cudnn"', 0.1, 'model.backend="xla"'):
        attend(*jnp.ones((3, 1, 2, 1, 8), jnp.bfloat16), dropout=0.1, backend="cudnn")
    about = {"device": jax.devices()[0], "dtype": "bfloat16", "head_dim": 64, "dropout": 0.1}
    backend, reason = backends.resolve("auto", **about)
    assert backend == "xla" and mentions(reason, "cuDNN", 0.1)
    with refuses('model.backend="cudnn"', 0.1):
        backends.resolve("cudnn", **about)
