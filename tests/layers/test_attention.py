"""Attention and its dropout against float64 NumPy, in prime dimensions so that transposed axes are detected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refuses

from leanformer.layers import attention
from leanformer.layers.masks import Mask


B, T, S, N, H, V = 2, 5, 7, 3, 11, 13


def reference(q, k, v):
    logits = np.einsum("btnh,bsnh->bnts", q, k, dtype=np.float64) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def compute_tolerance(q, k, v):
    """Return the float32 error: an absolute error of a logit is an equal relative error of its weight."""
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    return 4 * np.finfo(np.float32).eps * max(np.abs(logits).max(), 1) * np.abs(v).max()


@pytest.fixture
def qkv(rng):
    shapes = (B, T, N, H), (B, S, N, H), (B, S, N, V)
    return [np.float32(3 * rng.standard_normal(shape)) for shape in shapes]


@pytest.mark.parametrize("scale", [1, 100])  # large logits must not overflow
@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_float32_matches_reference(qkv, backend, scale):
    q, k, v = scale * qkv[0], *qkv[1:]
    result = attention.attend(*map(jnp.asarray, (q, k, v)), backend=backend)
    np.testing.assert_allclose(result, reference(q, k, v), rtol=0, atol=compute_tolerance(q, k, v))


@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_bfloat16_rounds_like_its_inputs(qkv, backend):
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in qkv]
    result = attention.attend(*(jnp.asarray(x, jnp.bfloat16) for x in rounded), backend=backend)
    assert result.dtype == jnp.bfloat16
    # Rounding q/sqrt(H), the weights and the result once each to 8 bits.
    np.testing.assert_allclose(result.astype(np.float32), reference(*rounded), atol=0.08)


def test_masked_keys_have_exactly_zero_weight(qkv):
    valid_keys = np.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0]], bool)
    matrix = attention.probabilities(*map(jnp.asarray, qkv[:2]), Mask(keep=jnp.asarray(valid_keys)))
    assert matrix.shape == (B, N, T, S)
    np.testing.assert_array_equal(matrix > 0, np.broadcast_to(valid_keys[:, None, None], matrix.shape))


def test_example_without_valid_keys_stays_finite(qkv):
    q, k, v = map(jnp.asarray, qkv)
    for backend in ("xla", "naive"):
        mask = Mask(lengths=jnp.array([0, S]))
        assert np.isfinite(attention.attend(q, k, v, mask=mask, backend=backend)).all()


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((3, 5, 1, 2), (3, 5, 4, 2)),
        ((3, 5, 4, 2), (3, 5, 2, 2)),
        ((3, 1, 4, 2), (3, 5, 4, 2)),
        ((1, 5, 4, 2), (1, 5, 4, 2)),
        ((3, 5, 4, 1), (3, 5, 4, 2)),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_keys_and_values_that_do_not_fit_are_refused(backend, k, v):
    """NumPy's broadcasting would accept them."""
    with refuses((3, 5, 4, 2), k, v, error=ValueError):
        attention.attend(jnp.zeros((3, 5, 4, 2)), jnp.zeros(k), jnp.zeros(v), backend=backend)


def test_times_weights_and_gradients_match_dot_general(rng):
    x = jnp.asarray(rng.standard_normal((2, 5, 3, 7)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((3, 7, 11)), jnp.float32)
    numbers = ((2, 3), (0, 1)), ((), ())
    value, grads = [], []
    for product in (attention.times_weights, jax.lax.dot_general):
        value.append(product(x, w, numbers))
        loss = lambda x, w, f=product: jnp.sum(jnp.sin(f(x, w, numbers)))  # noqa: E731
        grads.append(jax.jit(jax.grad(loss, (0, 1)))(x, w))
    np.testing.assert_allclose(*value, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *grads)


@pytest.mark.parametrize("kv", [1, N])
def test_dropout_gradients_match_naive_backend(kv, rng):
    """In float64, against JAX's gradients of the naive backend; other draws and no dropout give other gradients."""
    with jax.enable_x64(True):
        shapes = [(B, T, N, H), (B, T, kv, H), (B, T, kv, V)]
        arrays = [jnp.asarray(2 * rng.standard_normal(shape)) for shape in shapes]
        mask = Mask(causal=True, lengths=jnp.array([T, 4]))

        def gradients(backend, seed, rate=0.3):
            def loss(q, k, v):
                options = {"dropout": rate, "key": jax.random.split(jax.random.key(seed), B), "soft_cap": 2.0}
                return jnp.sum(jnp.sin(attention.attend(q, k, v, mask=mask, backend=backend, **options)))

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
        return np.asarray(attention.attend(q[examples], k[examples], v[examples], backend=backend, **options))

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
