"""Interventions on conditioning, each against its formula in float64 NumPy; their config keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from flax import nnx
from messages import refuses

from leanformer import config, models
from leanformer.layers import interventions
from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.masks import Context
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.pretrained import layouts
from leanformer.runtime.mesh import flatten_names
from leanformer.training import model_setup, train_setup
from leanformer.training.optimizers import decay_mask


B, T, D, N, H, F, L = 2, 7, 13, 3, 5, 17, 3


def make_attention(**options):
    return MultiHeadAttention(D, N, H, rngs=nnx.Rngs(0), **options)


def as_matrix(kernel, rows=D):
    return np.float64(kernel).reshape(rows, -1)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


@pytest.mark.parametrize("on", [None, "qk", "v"])
def test_spectral_shift_is_added_to_the_chosen_matrices(on, x):
    """W is 13 x 15, so I is eye(13, 15)."""
    result, plain = make_attention(spectral=0.7, levers_on=on), make_attention()
    for name in ("query", "key", "value", "out"):
        rows = N * H if name == "out" else D
        weights = as_matrix(getattr(plain, name).kernel[...], rows)
        np.testing.assert_array_equal(as_matrix(getattr(result, name).kernel[...], rows), weights)  # only W is trained
        if name != "out":
            weights = weights + 0.7 * np.eye(D, N * H) * (name[0] in (on or "qkv"))
            y = getattr(result, name)(x).reshape(B, T, -1)
            # Sums of 13 products: at most 13 half epsilons of their sizes' sum, about 4.
            np.testing.assert_allclose(y, np.float64(x) @ weights, rtol=0, atol=4e-6)


def test_qkv_init_sets_the_singular_values():
    values = {}
    for kind in (None, "orthogonal", "spectral"):
        attention = make_attention(qkv_init=kind, levers_on=kind and "qv")
        values[kind] = {
            name: np.linalg.svd(as_matrix(getattr(attention, name).kernel[...]), compute_uv=False)
            for name in ("query", "key", "value")
        }
    plain, orthogonal, spectral = values[None], values["orthogonal"], values["spectral"]
    for name in ("query", "value"):
        size = np.sqrt((plain[name] ** 2).mean())
        np.testing.assert_allclose(orthogonal[name], np.full(D, size), rtol=1e-5)
        np.testing.assert_allclose(spectral[name], plain[name] + plain[name][0], rtol=1e-5)
        assert spectral[name][0] / spectral[name][-1] <= 2 < plain[name][0] / plain[name][-1]
    np.testing.assert_array_equal(orthogonal["key"], plain["key"])


def normalise_by_sigma(kernel, scale):
    return scale * kernel / np.linalg.svd(kernel, compute_uv=False)[0]


def test_sigma_reparam_divides_by_the_largest_singular_value(rng, x):
    attention = make_attention(sigma_reparam=True)
    for name, rows in (("query", D), ("out", N * H)):
        linear = getattr(attention, name)
        linear.scale[...] = jnp.float32(1.7)
        weights = as_matrix(linear.kernel[...], rows)
        np.testing.assert_allclose(
            as_matrix(linear.weights(), rows), normalise_by_sigma(weights, 1.7), rtol=0, atol=1e-6
        )
    np.testing.assert_allclose(
        attention.query(x).reshape(B, T, -1),
        np.float64(x) @ normalise_by_sigma(as_matrix(attention.query.kernel[...]), 1.7),
        atol=3e-6,
    )
    # The gradient includes the gradient of σ₁: compare with differences of the formula in float64.
    weighting = rng.standard_normal((D, N * H))

    def loss(kernel, scale):
        result = interventions.effective(kernel, 0.0, scale, attention.query.direction[...])
        return jnp.sum(result * jnp.asarray(weighting, jnp.float32))

    kernel = attention.query.kernel[...].reshape(D, -1)
    grad_kernel, grad_scale = jax.grad(loss, argnums=(0, 1))(kernel, jnp.float32(1.7))
    for index in ((0, 0), (5, 9), (12, 14)):
        shifted = [
            np.float64(kernel)
            + step * np.eye(1, kernel.size, np.ravel_multi_index(index, kernel.shape)).reshape(kernel.shape)
            for step in (-1e-6, 1e-6)
        ]
        low, high = ((weighting * normalise_by_sigma(m, 1.7)).sum() for m in shifted)
        assert float(grad_kernel[index]) == pytest.approx((high - low) / 2e-6, rel=1e-3, abs=1e-3)
    assert float(grad_scale) == pytest.approx((weighting * normalise_by_sigma(np.float64(kernel), 1.0)).sum(), rel=1e-4)


def test_power_iteration_converges_after_weights_change(rng):
    linear = make_attention(sigma_reparam=True).query
    kernel = np.outer(rng.standard_normal(D), rng.standard_normal(N * H)) + 0.1 * rng.standard_normal((D, N * H))
    linear.kernel[...] = jnp.asarray(kernel, jnp.float32).reshape(linear.kernel.shape)
    before = as_matrix(linear.weights())
    for _ in range(6):
        linear.move()
    np.testing.assert_allclose(as_matrix(linear.weights()), normalise_by_sigma(kernel, 1.0), atol=1e-5)
    assert np.abs(before - normalise_by_sigma(kernel, 1.0)).max() > 0.05


ALL_INTERVENTIONS = {
    **{"spectral": 0.3, "qkv_init": "spectral", "sigma_reparam": True, "mlp_sigma_reparam": True},
    **{"graying": 0.8, "graying_by": "dct"},
}


def test_evaluation_does_not_update_directions(x):
    model = make_stack(sigma_reparam=True)
    for training in (False, True):
        before = np.array(model.layers.attention.query.direction[...])
        model(x, Context(key=jax.random.split(jax.random.key(0), B) if training else None))
        after = model.layers.attention.query.direction[...]
        model.layers.attention.query.kernel[...] += 0.1  # the first step starts at the singular vector, and stays there
        assert np.array_equal(before, after) or training
    model(x, Context(key=jax.random.split(jax.random.key(0), B)))
    assert np.abs(model.layers.attention.query.direction[...] - after).max() > 1e-3


def test_only_kernels_have_weight_decay(tiny, meshes):
    c = tiny.copy_and_resolve_references().unlock()
    c.model.update(ALL_INTERVENTIONS)
    run = train_setup.set_up_training(c, examples=64, mesh=meshes(1, 1))
    flags = flatten_names(decay_mask(run.state.params))
    assert {name.rpartition(".")[2] for name, decays in flags.items() if name.startswith("blocks") and decays} == {
        "kernel"
    }
    assert "blocks.layers.attention.query.scale" in flags


def flatten_cosines(x):
    c = scipy.fft.dctn(x, axes=(1, 2), norm="ortho")
    largest = np.abs(c).max(axis=(1, 2), keepdims=True)
    return scipy.fft.idctn(np.sign(c) * largest * (np.abs(c) / largest) ** 0.6, axes=(1, 2), norm="ortho")


@pytest.mark.parametrize("shape", [(B, T, D), (B, D, T)])
def test_graying_flattens_the_token_spectrum(shape, rng):
    x = rng.standard_normal(shape)
    left, s, right = np.linalg.svd(x, full_matrices=False)
    expected = left @ ((s[:, :1] * (s / s[:, :1]) ** 0.6)[..., None] * right)
    flatten, x32 = interventions.flatten_token_spectrum, jnp.float32(x)
    for by, values in ((None, expected), ("svd", expected), ("dct", flatten_cosines(x))):
        np.testing.assert_allclose(flatten(x32, 0.6, by), values, atol=3e-5)
        assert flatten(x32, 1.0, by) is x32 and flatten(x32, None) is x32
        assert not np.isnan(flatten(jnp.zeros(shape), 0.6, by)).any()


def test_graying_gradients_match_finite_differences(rng):
    x, weighting = rng.standard_normal((1, 5, 4)), rng.standard_normal((1, 5, 4))

    def gradient(by):
        loss = lambda x: jnp.sum(interventions.flatten_token_spectrum(x, 0.6, by) * jnp.float32(weighting))  # noqa: E731
        return jax.grad(loss)(jnp.float32(x))

    for i, value in enumerate(gradient("dct").ravel()):
        step = 1e-6 * np.eye(1, 20, i).reshape(x.shape)
        difference = (weighting * (flatten_cosines(x + step) - flatten_cosines(x - step))).sum() / 2e-6
        assert float(value) == pytest.approx(difference, rel=2e-3, abs=1e-3)
    # "svd" has the gradient of a product with a constant matrix.
    left, s, _ = np.linalg.svd(x[0], full_matrices=False)
    constant = (left * (s / s[0]) ** -0.4) @ left.T
    np.testing.assert_allclose(gradient("svd")[0], constant.T @ weighting[0], atol=1e-4)
    at_zeros = jax.grad(lambda x: jnp.sum(interventions.flatten_token_spectrum(x, 0.6, "dct")))(jnp.zeros((1, 5, 4)))
    assert np.isfinite(at_zeros).all()


def make_stack(**attention):
    def make(rngs):
        heads = MultiHeadAttention(D, N, H, kernel_init=nnx.initializers.normal(0.5), rngs=rngs, **attention)
        return Block(heads, BlockConfig(D, mlp=MlpConfig(F)), rngs=rngs)

    return Stack(make, L, rngs=nnx.Rngs(3))


def test_unset_keys_change_nothing():
    """Unset keys, and values without effect, leave the programs of initialisation and model unchanged."""
    arguments = config.load("quickstart").model.to_dict() | {"backend": "xla"}

    def lower_programs(**model):
        graphdef, make, shapes = model_setup.split_model(lambda rngs: models.build(**arguments | model, rngs=rngs))
        images = jnp.zeros((2, 28, 28, 1))
        run = jax.jit(lambda weights, images: nnx.merge(graphdef, *weights)(images)[0])
        return run.lower(shapes, images).as_text(), jax.jit(make).lower(jax.random.key(0)).as_text()

    plain = lower_programs()
    for neutral in ({"spectral": 0.0}, {"sigma_reparam": False}, {"graying": 1.0}):
        assert lower_programs(**neutral) == plain
    assert lower_programs(spectral=0.1)[0] != plain[0] and lower_programs(qkv_init="spectral")[1] != plain[1]


def test_effective_weights_are_measured(tiny, meshes):
    c = tiny.copy_and_resolve_references().unlock()
    c.model.update(spectral=2.0, sigma_reparam=True)
    run = train_setup.set_up_training(c, examples=64, mesh=meshes(1, 1))
    weights = run.model.random_weights(0)  # their directions of the largest singular values have converged
    raw, effective = (
        np.float64(model.measured()["blocks"]["attention"]["key"]["kernel"])
        for model in (
            nnx.merge(run.model.graphdef, *weights),
            interventions.with_effective_weights(run.model.graphdef, weights),
        )
    )
    for i in range(3):
        expected = raw[i].reshape(12, -1) + 2 * np.eye(12, 24)
        np.testing.assert_allclose(
            effective[i].reshape(12, -1), expected / np.linalg.svd(expected, compute_uv=False)[0], atol=1e-6
        )


def test_other_checkpoint_formats_refuse_interventions():
    arguments = config.load("vit_b_7x16").model.to_dict()
    assert layouts.layout("timm", arguments)
    with refuses("model.spectral=10.0", "timm"):
        layouts.layout("timm", arguments | {"spectral": 10.0})
