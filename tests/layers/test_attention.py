"""Attention against float64 NumPy, in prime dimensions so that transposed axes are detected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refuses

from leanformer.layers import attention, backends
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
def test_bfloat16_error_is_that_of_rounded_inputs(qkv, backend):
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in qkv]
    result = attention.attend(*(jnp.asarray(x, jnp.bfloat16) for x in rounded), backend=backend)
    assert result.dtype == jnp.bfloat16
    # Rounding q/sqrt(H), the weights and the result once each to 8 bits.
    np.testing.assert_allclose(result.astype(np.float32), reference(*rounded), atol=0.08)


LENGTHS = np.array([4, 7])


@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_masked_keys_have_zero_weight_and_no_gradient(qkv, backend):
    valid_keys = np.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0]], bool)
    q, k, v = map(jnp.asarray, qkv)
    result = attention.attend(q, k, v, mask=Mask(keep=jnp.asarray(valid_keys)), backend=backend)
    for i in range(B):
        example = [x[i : i + 1] for x in qkv]
        expected = reference(example[0], example[1][:, valid_keys[i]], example[2][:, valid_keys[i]])
        np.testing.assert_allclose(result[i : i + 1], expected, rtol=0, atol=compute_tolerance(*example))
    matrix = attention.probabilities(q, k, Mask(keep=jnp.asarray(valid_keys)))
    np.testing.assert_array_equal(matrix > 0, np.broadcast_to(valid_keys[:, None, None], matrix.shape))

    def loss(k, v):
        return jnp.sum(jnp.sin(attention.attend(q, k, v, mask=Mask(keep=jnp.asarray(valid_keys)), backend=backend)))

    for gradient in jax.grad(loss, (0, 1))(k, v):
        np.testing.assert_array_equal(np.abs(gradient).max(axis=(2, 3)) > 0, valid_keys)


def test_example_without_valid_keys_stays_finite(qkv):
    q, k, v = map(jnp.asarray, qkv)
    for backend in ("xla", "naive"):
        mask = Mask(lengths=jnp.array([0, S]))
        assert np.isfinite(attention.attend(q, k, v, mask=mask, backend=backend)).all()


def test_empty_mask_leaves_program_unchanged(qkv):
    def lower_to_text(**arguments):
        return jax.jit(lambda *qkv: attention.attend(*qkv, **arguments)).lower(*qkv).as_text()

    assert lower_to_text() == lower_to_text(mask=Mask()) != lower_to_text(mask=Mask(lengths=jnp.asarray(LENGTHS)))


def test_unknown_backend_is_refused():
    with refuses("backend='flash'", error=ValueError):
        attention.attend(*(jnp.zeros((1, 1, 1, 8)),) * 3, backend="flash")


def test_resolve_gives_a_reason_and_refuses_unavailable_kernels():
    assert backends.resolve("naive", device=None, dtype="float32", head_dim=8)[0] == "naive"
    backend, reason = backends.resolve("auto", device=jax.devices()[0], dtype="bfloat16", head_dim=64)
    assert backend == "xla" and "cpu" in reason
    with refuses('model.backend="cudnn"', "cpu", 'model.backend="xla"'):
        backends.resolve("cudnn", device=jax.devices()[0], dtype="bfloat16", head_dim=64)


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
    with pytest.raises(NotImplementedError):
        attention.times_weights(x, w, (((0,), (0,)), ((), ())))
