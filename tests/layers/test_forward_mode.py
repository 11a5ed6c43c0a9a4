"""Forward-mode differentiation of every architecture and of the losses, against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.layers import forward_mode
from leanformer.tasks.chunked_cross_entropy import cross_entropy
from leanformer.training import model_setup
from tools.exports import CASES, case_config, random_weights


VOLO = {"image_size": 32, "channels": 3, "num_classes": 11, "patch_size": 4, "width": (16, 24), "depth": (1, 1)}
VOLO |= {"mlp_dim": (24, 36), "num_heads": (2, 3), "head_dim": (8, 8), "class_heads": 2, "class_head_dim": 8}
NAMES = ("ViT", "XCiT", "TNT", "DaViT", "BERT, masked", "GPT-2", "Llama", "GPT, latent attention", "Nyströmformer")
FAMILIES = {name: CASES[name] for name in NAMES}
FAMILIES |= {"VOLO": ("images", "volo", VOLO | {"stem_width": 8}), "encoder": CASES["encoder of vectors"]}


def inputs(task, c):
    rng = np.random.default_rng(0)
    if task == "images":
        return jnp.asarray(rng.standard_normal((2, *(c.model.image_size,) * 2, c.model.channels), np.float32))
    if task == "points":
        return jnp.asarray(rng.standard_normal((2, 6, c.model.width), np.float32))
    return jnp.asarray(rng.integers(c.model.vocabulary, size=(2, 8)), jnp.int32)


@pytest.fixture(params=[name if name == "ViT" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def function(request):
    """Return a function of two numbers: a projection of the outputs along two directions of the weights."""
    task, name, arguments = FAMILIES[request.param]
    c = case_config(task, name, arguments)
    if task == "sequences":
        c.model.vocabulary = 17
    model = model_setup.set_up_model(c)
    params, statistics = random_weights(model)
    x, rng = inputs(task, c), np.random.default_rng(1)
    steps = [
        jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape, np.float32)) * 0.02, params) for _ in range(2)
    ]

    def outputs(t):
        moved = jax.tree.map(lambda p, a, b: p + t[0] * a + t[1] * b, params, *steps)
        return model.merge((moved, statistics))(x)[0]

    shape = jax.eval_shape(outputs, jnp.zeros(2))
    weights = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32)), shape)
    return lambda t: sum(jax.tree.leaves(jax.tree.map(lambda w, y: jnp.sum(w * y) / w.size, weights, outputs(t))))


@pytest.mark.slow
def test_first_derivatives_equal_finite_differences(function):
    zero, v, h = jnp.zeros(2), jnp.asarray([0.6, -0.8]), 0.0125
    gradient = jax.jit(jax.grad(function))
    with forward_mode():
        value, tangent = jax.jit(lambda t: jax.jvp(function, (t,), (v,)))(zero)
        linear = jax.jit(lambda t: jax.linearize(function, t)[1](v))(zero)
    plain = jax.jit(function)
    np.testing.assert_allclose(value, plain(zero), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(linear, tangent, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(tangent, gradient(zero) @ v, rtol=1e-3, atol=1e-5)
    # Richardson's extrapolation of central differences: the error is of fourth order.
    wide, narrow = ((plain(s * v) - plain(-s * v)) / (2 * s) for s in (2 * h, h))
    np.testing.assert_allclose(tangent, (4 * narrow - wide) / 3, rtol=2e-2, atol=1e-4)


@pytest.mark.slow
def test_second_derivatives_equal_reverse_mode_twice(function):
    zero = jnp.zeros(2)
    with forward_mode():
        hessian = jax.jit(jax.hessian(function))(zero)
    twice = jax.jit(jax.jacrev(jax.grad(function)))(zero)
    np.testing.assert_allclose(hessian, twice, rtol=1e-2, atol=0.01 * np.abs(twice).max() + 1e-6)


def test_compiled_functions_are_traced_again():
    """A function that was compiled outside the context is not used inside it, and the reverse."""
    x, kernel = jnp.arange(12.0).reshape(1, 3, 4) / 12, jnp.arange(20.0).reshape(4, 5) / 20
    loss = jax.jit(lambda x: cross_entropy(x, kernel, None, jnp.zeros((1, 3), jnp.int32), at_once=5))
    outside = loss(x)
    with forward_mode():
        inside, tangent = jax.jvp(loss, (x,), (x,))
    np.testing.assert_allclose(inside, outside, rtol=1e-6)
    np.testing.assert_allclose(tangent, jnp.sum(jax.grad(loss)(x) * x), atol=1e-5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))
