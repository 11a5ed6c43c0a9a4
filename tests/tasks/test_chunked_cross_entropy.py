"""Chunked cross-entropy: value and gradients of the naive loss, without its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.costs import count
from leanformer.costs.devices import peak_memory
from leanformer.runtime import mesh as sharding
from leanformer.tasks.chunked_cross_entropy import cross_entropy, cross_entropy_and_hits


B, T, D, V = 3, 7, 5, 11


def compute_naive_loss(x, kernel, bias, targets, cap=None):
    """Return the summed loss by NumPy in float64."""
    logits = x @ kernel + (0 if bias is None else bias)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    log = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    likelihood = np.take_along_axis(log, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return -likelihood[targets >= 0].sum()


@pytest.fixture
def arrays(rng):
    targets = rng.integers(V, size=(B, T))
    targets[0, 3:] = targets[2, 1] = -1
    return rng.normal(size=(B, T, D)), rng.normal(size=(D, V)), rng.normal(size=V), targets


@pytest.mark.parametrize(
    ("at_once", "with_bias", "cap"),
    [(1, True, None), (3 * B * V, True, 1.5), (10**9, False, 1.5)],
)
def test_value_and_gradients_equal_the_naive_loss(arrays, at_once, with_bias, cap):
    x, kernel, bias, targets = arrays
    bias = bias if with_bias else None
    argnums = (0, 1, 2) if with_bias else (0, 1)
    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.asarray, (x, kernel, bias))
        loss = functools.partial(cross_entropy, targets=jnp.asarray(targets), at_once=at_once, soft_cap=cap)
        result, grads = jax.value_and_grad(lambda *a: 3 * loss(*a), argnums=argnums)(*arguments)
        np.testing.assert_allclose(result, 3 * compute_naive_loss(x, kernel, bias, targets, cap), rtol=1e-12)
        np.testing.assert_allclose(loss(*arguments), result / 3, rtol=1e-12)
        grads = [np.asarray(grad) for grad in grads]
    step = 1e-6
    for place, grad in enumerate(grads):
        direction = np.random.default_rng(place).normal(size=grad.shape)
        ends = []
        for sign in (1, -1):
            shifted = [x, kernel, bias]
            shifted[place] = shifted[place] + sign * step * direction
            ends.append(3 * compute_naive_loss(*shifted, targets, cap))
        np.testing.assert_allclose((grad * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-7)


def test_bfloat16_matmuls_are_summed_in_float32(arrays):
    x, kernel, bias, targets = arrays
    rounded = jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32)
    call = functools.partial(cross_entropy, targets=jnp.asarray(targets), at_once=B * V)
    result, grads = jax.value_and_grad(call, argnums=(0, 1, 2))(*rounded)
    assert (result.dtype, [g.dtype for g in grads]) == (jnp.float32, [jnp.bfloat16, jnp.float32, jnp.float32])
    exact = compute_naive_loss(
        *(np.asarray(a.astype(jnp.bfloat16), np.float64) for a in rounded[:2]), np.float32(bias), targets
    )
    np.testing.assert_allclose(result, exact, rtol=1e-5)


def compute_naive_gradients(x, kernel, bias, targets, cap):
    """Return gradients of the naive loss in float64: probabilities minus one at the target, times the cap's slope."""
    logits = x @ kernel + bias
    capped = logits if cap is None else cap * np.tanh(logits / cap)
    probabilities = np.exp(capped) / np.exp(capped).sum(axis=-1, keepdims=True)
    back = (probabilities - np.eye(len(bias))[targets]) * (1 if cap is None else 1 - np.square(capped / cap))
    back = np.where(targets[..., None] >= 0, back, 0)
    return back @ kernel.T, np.einsum("btd,btv->dv", x, back), back.sum(axis=(0, 1))


@pytest.mark.parametrize(("shape", "cap"), [((2, 1, 4), 1.5), pytest.param((1, 1, 8), None, marks=pytest.mark.slow)])
def test_vocabulary_sharded_over_devices(shape, cap, rng, meshes):
    """Value, gradients and hits are correct for uneven shards; no device has logits of another shard, or all logits."""
    b, t, d, v = 4, 7, 5, 37
    padded, local = -(-v // shape[2]) * shape[2], -(-v // shape[2])
    # Multiples of 1/4, so that logits are exact and equal ones are equal however they are summed.
    sizes = ((8, (b, t, d)), (2, (d, v)), (4, (v,)))
    x, kernel, bias = ((rng.integers(-bound, bound + 1, shape) / 4).astype(np.float32) for bound, shape in sizes)
    kernel[:, 11] = kernel[:, 3]  # equal logits: the first counts as the prediction
    bias[[11, 3]] = 9
    targets = rng.integers(v, size=(b, t))
    targets[0, 3:], targets[1, :2], targets[1, 2] = -1, 3, 11
    call = jax.value_and_grad(functools.partial(cross_entropy, at_once=b * v * 2, soft_cap=cap), argnums=(0, 1, 2))
    measure = functools.partial(cross_entropy_and_hits, at_once=b * v * 2, soft_cap=cap)
    mesh, arguments = meshes(*shape), (x, kernel, bias, targets.astype(np.int32))
    places = (sharding.batch_sharding(mesh), *(sharding.replicated_sharding(mesh),) * 2, sharding.batch_sharding(mesh))
    exact = [np.asarray(array, np.float64) for array in (x, kernel, bias)]
    predicted = (exact[0] @ exact[1] + exact[2]).argmax(axis=-1)
    texts, results = [], []
    for function in (call, measure):
        program = jax.jit(sharding.with_mesh(mesh, function), in_shardings=places).lower(*arguments).compile()
        results.append(program(*jax.device_put(arguments, places)))
        texts.append(program.as_text())
    (value, grads), (measured, correct) = results
    # Sums of 28 terms of float32 whose exponents are below 20: 28 x 20 x 6e-8 of the largest.
    for loss in (value, measured):
        np.testing.assert_allclose(loss, compute_naive_loss(*exact, targets, cap), rtol=4e-5)
    for grad, expected in zip(grads, compute_naive_gradients(*exact, targets, cap), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=0, atol=4e-5 * np.abs(expected).max())
    assert int(correct) == (predicted == targets).sum() and 2 <= int(correct) < b * t
    rows = b // (shape[0] * shape[1])
    for text in texts:
        assert f"f32[{rows},2,{local}]" in text  # two tokens per row at a time
        assert not re.search(rf"\[(\d+,)+({v}|{padded})\]", text.replace(f"[{d},", "["))


def test_all_logits_are_never_in_memory():
    """Compiled value and gradient need less peak memory, and as many FLOPs as the loss with all logits at once."""
    b, t, d, v = 2, 512, 8, 4099
    x, kernel, targets = (
        jax.ShapeDtypeStruct(s, k) for s, k in (((b, t, d), "float32"), ((d, v), "float32"), ((b, t), "int32"))
    )

    def measure_peak_memory(at_once):
        call = jax.value_and_grad(lambda x, w, y: cross_entropy(x, w, None, y, at_once=at_once), argnums=(0, 1))
        assert count.flops(call, x, kernel, targets) == 6 * b * t * d * v
        return peak_memory(jax.jit(call).lower(x, kernel, targets).compile())

    assert measure_peak_memory(b * v * 16) < b * t * v * 4 / 8 < measure_peak_memory(b * v * t) / 8
    assert count.flops(
        jax.grad(lambda x, w, y: cross_entropy(x, w, None, y, at_once=b * v * 200)), x, kernel, targets
    ) == (6 * b * 513 * d * v)
