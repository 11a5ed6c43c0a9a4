"""Optimizers against references; skipped steps. On devices: test_sharding.py; resumed: test_resume.py."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict

from leanformer.models.vit import Model
from leanformer.runtime.mesh import flatten_names, leaf_names
from leanformer.training import model_setup, optimizers


CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "mask": True}
# A stack of two layers with D = 5, N = 3, H = 2 and F = 7, and leaves outside of it.
SHAPES = {
    "blocks.layers.attention.query.kernel": (2, 5, 3, 2),
    "blocks.layers.attention.out.kernel": (2, 3, 2, 5),
    "blocks.layers.attention.key_up.kernel": (2, 5, 3, 2),
    "blocks.layers.mlp.up.kernel": (2, 5, 7),
    "blocks.layers.mlp.up.bias": (2, 7),
    "blocks.layers.code.kernel": (2, 3, 3, 5),
    "stem.kernel": (3, 3, 2, 5),
    "head.kernel": (5, 11),
}
AS_MATRICES = {
    "blocks.layers.attention.query.kernel": (5, 6),
    "blocks.layers.attention.out.kernel": (6, 5),
    "blocks.layers.attention.key_up.kernel": (5, 6),
    "blocks.layers.mlp.up.kernel": (5, 7),
    "stem.kernel": (18, 5),
    "head.kernel": (5, 11),
}


def nest(flat):
    leaves = {name: leaf if isinstance(leaf, bool) else jnp.asarray(leaf) for name, leaf in flat.items()}
    return unflatten_dict(leaves, sep=".")


@pytest.fixture
def gradients(rng):
    """Gradients of three steps by name, each a tenth of the size before."""
    return [
        {name: rng.standard_normal(s).astype(np.float32) * 10.0**-i for name, s in SHAPES.items()} for i in range(3)
    ]


def compute_directions(name, gradients, **changes):
    """Return the directions of the optimizer for the gradients of each step, by leaf."""
    rule = optimizers.OPTIMIZERS[name](**(SETTINGS | changes))
    params = nest({name: jnp.ones(shape) for name, shape in SHAPES.items()})
    state, result, update = rule.init(params), [], jax.jit(rule.update)
    for step in gradients:
        direction, state = update(nest(step), state, params)
        result.append(flatten_names(direction))
    return result


def split_layers(name, leaf):
    """Return the parts of a leaf that an optimizer must treat separately, as matrices if it has any."""
    layers = list(leaf) if "layers" in name else [leaf]
    return [np.reshape(x, AS_MATRICES.get(name, x.shape)) for x in layers]


def check_layers(steps, gradients, reference, names=SHAPES, *, atol=1e-6):
    """Assert that `steps` are the directions of `reference`, an optax rule, for each layer's matrix separately.

    Directions have size one and result from a few operations, each of which rounds by 6e-8.
    """
    update = jax.jit(reference.update)
    for name in names:
        layer_gradients = [split_layers(name, step[name]) for step in gradients]
        for layer in range(len(layer_gradients[0])):
            params = jnp.ones(layer_gradients[0][layer].shape)
            state = reference.init(params)
            for step, direction in zip(layer_gradients, steps, strict=True):
                expected, state = update(jnp.asarray(step[layer]), state, params)
                actual = split_layers(name, np.asarray(direction[name]))[layer]
                np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=atol, err_msg=name)


def test_matrix_axes_of_every_leaf():
    for name, shape in SHAPES.items():
        result = optimizers.matrix(name, len(shape))
        sizes = result and tuple(int(np.prod([shape[axis] for axis in axes])) for axes in result)
        assert sizes == AS_MATRICES.get(name), name


@pytest.mark.parametrize(
    "config", ["vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean", "nystromformer_text"]
)
def test_all_kernels_except_depthwise_are_matrices(config):
    c = runpy.run_path(str(CONFIGS / f"{config}.py"))["get_config"]()
    m = c.model
    *_, (params, _) = model_setup.abstract_model(c)
    for name, leaf in flatten_names(params).items():
        result = optimizers.matrix(name, leaf.ndim)
        if not name.endswith("kernel") or (leaf.shape[-3:-1] == (3, 3) and leaf.ndim - ("layers" in name) == 3):
            assert result is None, name
            continue
        inputs, outputs = (int(np.prod([leaf.shape[axis] for axis in axes])) for axes in result)
        assert inputs * outputs * (leaf.shape[0] if "layers" in name else 1) == leaf.size, name
        assert min(inputs, outputs) > 1, name
        widths = m.width if isinstance(m.width, tuple) else (m.width, m.get("inner_width"))
        if name.rsplit(".", 2)[-2] in ("query", "key", "value"):
            assert inputs in widths, name
        if name.endswith("attention.out.kernel"):
            assert outputs in widths, name


def test_sgd_is_heavy_ball(gradients):
    first, second, third = (result["stem.kernel"] for result in compute_directions("sgd", gradients))
    g = [step["stem.kernel"] for step in gradients]
    np.testing.assert_allclose(first, g[0], rtol=1e-6)
    np.testing.assert_allclose(second, 0.9 * g[0] + g[1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(third, 0.81 * g[0] + 0.9 * g[1] + g[2], rtol=1e-5, atol=1e-7)


def test_muon_treats_layers_separately(gradients):
    result = compute_directions("muon", gradients)
    hidden = [name for name in AS_MATRICES if "layers" in name]
    for name in hidden:
        shape = AS_MATRICES[name]
        reference = optax.chain(optax.contrib.scale_by_muon(beta=0.9, weight_dimension_numbers=None))
        normalised = [{name: step[name] / (0.2 * max(shape) ** 0.5)} for step in result]
        # Each of five iterations multiplies a small singular value, and its rounding, by up to 3.4: 6e-8 x 3.4^5.
        check_layers(normalised, gradients, reference, names=[name], atol=1e-4)
        for direction in (split_layers(name, np.asarray(step[name])) for step in result):
            singular = np.linalg.svd(np.stack(direction).astype(np.float64), compute_uv=False)
            assert np.all(np.abs(singular / (0.2 * max(shape) ** 0.5) - 0.95) < 0.35), name
    check_layers(result, gradients, optax.scale_by_adam(0.9, 0.95, 1e-8), names=SHAPES.keys() - set(hidden))


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_decay_is_decoupled(name, gradients):
    params = nest({leaf: jnp.full(shape, 3.0) for leaf, shape in SHAPES.items()})
    mask = nest({leaf: leaf.endswith("kernel") for leaf in SHAPES})
    plain, decayed = (optimizers.OPTIMIZERS[name](**(SETTINGS | {"weight_decay": d, "mask": mask})) for d in (0.0, 0.5))
    state, update, update_plain = plain.init(params), jax.jit(decayed.update), jax.jit(plain.update)
    for step in gradients[:2]:
        without, _ = update_plain(nest(step), state, params, b1=0.9)
        direction, state = update(nest(step), state, params, b1=0.9)
        for leaf, x in flatten_names(direction).items():
            extra = 1.5 if leaf.endswith("kernel") else 0.0
            np.testing.assert_allclose(x - flatten_names(without)[leaf], extra, atol=1e-5, err_msg=leaf)


def test_moments_use_the_beta1_of_the_step():
    w, g = jnp.array([0.3, -2.0]), jnp.array([0.5, 0.25])
    optimizer = optimizers.OPTIMIZERS["adamw"](b1=0.5, b2=0.9, eps=1e-8, weight_decay=0.0, mask=True)
    state = optimizer.init(w)
    mean = np.zeros(2)
    for b1 in (0.9, 0.0, 0.3):
        _, state = optimizer.update(g, state, w, b1=b1)
        mean = b1 * mean + (1 - b1) * np.asarray(g)
        np.testing.assert_allclose(state[0].mu, mean, rtol=1e-6)
        g = -2 * g


def test_adamw_matches_numpy(rng):
    p = {"kernel": rng.standard_normal((3, 5)), "bias": rng.standard_normal(5)}
    rule = optimizers.OPTIMIZERS["adamw"](b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, mask=optimizers.decay_mask(p))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), p)
    state = rule.init(params)
    m = v = jax.tree.map(np.zeros_like, p)
    for t in range(1, 6):
        g = jax.tree.map(lambda x: rng.standard_normal(x.shape), p)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        for name, decay in (("kernel", 0.1), ("bias", 0.0)):
            direction = (m[name] / (1 - 0.9**t)) / (np.sqrt(v[name] / (1 - 0.99**t)) + 1e-8)
            p[name] = p[name] - 0.05 * (direction + decay * p[name])
        direction, state = rule.update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g), state, params)
        params = jax.tree.map(lambda p, d: p - 0.05 * d, params, direction)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, p)


def test_factors_of_heads_do_not_decay_and_xcits_do():
    heads, cells = jax.ShapeDtypeStruct((5,), np.float32), jax.ShapeDtypeStruct((5, 1, 1), np.float32)
    stacked = [jax.ShapeDtypeStruct((3, *x.shape), np.float32) for x in (heads, cells)]
    params = {"blocks": {"layers": {"a": {"temperature": stacked[0]}, "b": {"temperature": stacked[1]}}}}
    params |= {"c": {"temperature": heads}, "d": {"temperature": cells}}
    assert jax.tree.leaves(optimizers.decay_mask(params)) == [False, True, False, True]


def test_only_matrices_decay(tiny):
    *_, (params, _) = model_setup.abstract_model(tiny)
    names = leaf_names(params)
    mask = jax.tree.leaves(optimizers.decay_mask(params, Model.no_decay))
    assert sorted(name for name, decays in zip(names, mask, strict=True) if decays) == [
        "blocks.layers.attention.key.kernel",
        "blocks.layers.attention.out.kernel",
        "blocks.layers.attention.query.kernel",
        "blocks.layers.attention.value.kernel",
        "blocks.layers.mlp.down.kernel",
        "blocks.layers.mlp.up.kernel",
        "head.kernel",
        "patch_embed.kernel",
    ]
