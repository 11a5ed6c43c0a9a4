"""The loss over a vocabulary piece by piece: the naive one's value and gradients, without its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.costs import count
from leanformer.runtime import mesh as sharding
from leanformer.tasks.vocabulary import cross_entropy, hits


B, T, D, V = 3, 7, 5, 11


def naive(x, kernel, bias, targets, cap=None):
    """NumPy, float64."""
    logits = x @ kernel + (0 if bias is None else bias)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    log = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    own = np.take_along_axis(log, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return -own[targets >= 0].sum()


@pytest.fixture
def arrays(rng):
    targets = rng.integers(V, size=(B, T))
    targets[0, 3:] = targets[2, 1] = -1
    return rng.normal(size=(B, T, D)), rng.normal(size=(D, V)), rng.normal(size=V), targets


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("at_once", [1, 3 * B * V, 10**9])
def test_value_and_gradients(arrays, at_once, with_bias, cap):
    x, kernel, bias, targets = arrays
    bias = bias if with_bias else None
    argnums = (0, 1, 2) if with_bias else (0, 1)
    with jax.enable_x64(True):
        given = jax.tree.map(jnp.asarray, (x, kernel, bias))
        own = functools.partial(cross_entropy, targets=jnp.asarray(targets), at_once=at_once, soft_cap=cap)
        found, grads = jax.value_and_grad(lambda *a: 3 * own(*a), argnums=argnums)(*given)
        np.testing.assert_allclose(found, 3 * naive(x, kernel, bias, targets, cap), rtol=1e-12)
        np.testing.assert_allclose(own(*given), found / 3, rtol=1e-12)
        grads = [np.asarray(grad) for grad in grads]
    step = 1e-6
    for place, grad in enumerate(grads):
        direction = np.random.default_rng(place).normal(size=grad.shape)
        ends = []
        for sign in (1, -1):
            moved = [x, kernel, bias]
            moved[place] = moved[place] + sign * step * direction
            ends.append(3 * naive(*moved, targets, cap))
        np.testing.assert_allclose((grad * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-7)


def test_bfloat16_products_and_float32_sums(arrays):
    x, kernel, bias, targets = arrays
    rounded = jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32)
    call = functools.partial(cross_entropy, targets=jnp.asarray(targets), at_once=B * V)
    found, grads = jax.value_and_grad(call, argnums=(0, 1, 2))(*rounded)
    assert (found.dtype, [g.dtype for g in grads]) == (jnp.float32, [jnp.bfloat16, jnp.float32, jnp.float32])
    exact = naive(*(np.asarray(a.astype(jnp.bfloat16), np.float64) for a in rounded[:2]), np.float32(bias), targets)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 1, 8), (2, 2, 2)])
def test_a_vocabulary_split_over_devices(shape, cap, rng, meshes):
    """Value, gradients and hits are those of one device, for shares that do not come out even; and no device has the
    logits of another's share, nor of all."""
    b, t, d, v = 4, 7, 5, 37
    over, local = -(-v // shape[2]) * shape[2], -(-v // shape[2])
    x, kernel, bias = (rng.normal(size=s).astype(np.float32) for s in ((b, t, d), (d, v), (v,)))
    kernel[:, 11] = kernel[:, 3]  # equal logits, of which the first is meant
    bias[[11, 3]] = 9
    targets = rng.integers(v, size=(b, t))
    targets[0, 3:], targets[1, :2], targets[1, 2] = -1, 3, 11
    call = jax.value_and_grad(functools.partial(cross_entropy, at_once=b * v * 2, soft_cap=cap), argnums=(0, 1, 2))
    count_of = functools.partial(hits, at_once=b * v * 2)
    mesh, given = meshes(*shape), (x, kernel, bias, targets.astype(np.int32))
    places = (sharding.over_batch(mesh), *(sharding.replicated(mesh),) * 2, sharding.over_batch(mesh))
    text = []
    for function, tolerance in ((call, 2e-6), (count_of, 0)):
        wanted = jax.jit(function)(*given)
        program = jax.jit(sharding.on(mesh, function), in_shardings=places).lower(*given).compile()
        found = program(*jax.device_put(given, places))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        text.append(program.as_text())
    assert 2 <= int(wanted) < b * t
    rows = b // (shape[0] * shape[1])
    for program in text:
        assert f"f32[{rows},2,{local}]" in program  # two tokens of each row at a time
        assert not re.search(rf"\[(\d+,)+({v}|{over})\]", program.replace(f"[{d},", "["))


def test_no_array_of_all_logits():
    """Peak memory of value and gradient, compiled; and the products are as many as with all logits."""
    b, t, d, v = 2, 512, 8, 4099
    x, kernel, targets = (
        jax.ShapeDtypeStruct(s, k) for s, k in (((b, t, d), "float32"), ((d, v), "float32"), ((b, t), "int32"))
    )

    def compiled(at_once):
        call = jax.value_and_grad(lambda x, w, y: cross_entropy(x, w, None, y, at_once=at_once), argnums=(0, 1))
        assert count.flops(call, x, kernel, targets) == 6 * b * t * d * v
        return count.peak_memory(jax.jit(call).lower(x, kernel, targets).compile())

    assert compiled(b * v * 16) < b * t * v * 4 / 8 < compiled(b * v * t) / 8
    assert count.flops(
        jax.grad(lambda x, w, y: cross_entropy(x, w, None, y, at_once=b * v * 200)), x, kernel, targets
    ) == (6 * b * 513 * d * v)
