"""Levers on conditioning, each against its formula in NumPy, float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from filled import filled
from flax import nnx

from leanformer import models
from leanformer.layers import interventions
from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.context import Context
from leanformer.layers.mlp import MlpConfig
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.runtime.trees import leaf_names
from leanformer.training import train_setup
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.optim import decay_mask
from leanformer.training.state import materialise
from tests.layers.test_attention_registry import softmax


B, T, D, N, H, F, L = 2, 7, 13, 3, 5, 17, 3


def module(**options):
    return MultiHeadAttention(D, N, H, rngs=nnx.Rngs(0), **options)


def matrix(kernel, rows=D):
    return np.float64(kernel).reshape(rows, -1)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


@pytest.mark.parametrize("on", [None, "qk", "v"])
def test_lambda_is_added_to_the_chosen_matrices_of_any_shape(on, x):
    """W is 13 x 15: I is eye(13, 15)."""
    result, plain = module(spectral=0.7, levers_on=on), module()
    for name in ("query", "key", "value", "out"):
        rows = N * H if name == "out" else D
        own = matrix(getattr(plain, name).kernel[...], rows)
        np.testing.assert_array_equal(
            matrix(getattr(result, name).kernel[...], rows), own
        )  # what is trained is W alone
        if name != "out":
            own = own + 0.7 * np.eye(D, N * H) * (name[0] in (on or "qkv"))
            y = getattr(result, name)(x).reshape(B, T, -1)
            # Sums of 13 products: at most 13 half epsilons of their sizes' sum, about 4.
            np.testing.assert_allclose(y, np.float64(x) @ own, rtol=0, atol=4e-6)


def test_starts_of_queries_keys_and_values():
    values = {}
    for kind in (None, *interventions.INITS):
        made = module(qkv_init=kind, levers_on=kind and "qv")
        values[kind] = {
            name: np.linalg.svd(matrix(getattr(made, name).kernel[...]), compute_uv=False)
            for name in ("query", "key", "value")
        }
    plain, orthogonal, spectral = values[None], values["orthogonal"], values["spectral"]
    for name in ("query", "value"):
        size = np.sqrt((plain[name] ** 2).mean())
        np.testing.assert_allclose(orthogonal[name], np.full(D, size), rtol=1e-5)
        np.testing.assert_allclose(spectral[name], plain[name] + plain[name][0], rtol=1e-5)
        assert spectral[name][0] / spectral[name][-1] <= 2 < plain[name][0] / plain[name][-1]
    np.testing.assert_array_equal(orthogonal["key"], plain["key"])


def numpy_sigma(kernel, scale):
    return scale * kernel / np.linalg.svd(kernel, compute_uv=False)[0]


def test_sigma_reparam_divides_by_the_largest_singular_value(rng, x):
    made = module(sigma_reparam=True)
    for name, rows in (("query", D), ("out", N * H)):
        linear = getattr(made, name)
        linear.scale[...] = jnp.float32(1.7)
        own = matrix(linear.kernel[...], rows)
        np.testing.assert_allclose(matrix(linear.weights(), rows), numpy_sigma(own, 1.7), rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        made.query(x).reshape(B, T, -1), np.float64(x) @ numpy_sigma(matrix(made.query.kernel[...]), 1.7), atol=3e-6
    )
    # The gradient is that of the quotient itself, σ₁ included: differences of the formula in float64.
    weighting = rng.standard_normal((D, N * H))

    def loss(kernel, scale):
        result = interventions.effective(kernel, 0.0, scale, made.query.direction[...])
        return jnp.sum(result * jnp.asarray(weighting, jnp.float32))

    kernel = made.query.kernel[...].reshape(D, -1)
    by_kernel, by_scale = jax.grad(loss, argnums=(0, 1))(kernel, jnp.float32(1.7))
    for index in ((0, 0), (5, 9), (12, 14)):
        moved = [
            np.float64(kernel)
            + step * np.eye(1, kernel.size, np.ravel_multi_index(index, kernel.shape)).reshape(kernel.shape)
            for step in (-1e-6, 1e-6)
        ]
        low, high = ((weighting * numpy_sigma(m, 1.7)).sum() for m in moved)
        assert float(by_kernel[index]) == pytest.approx((high - low) / 2e-6, rel=1e-3, abs=1e-3)
    assert float(by_scale) == pytest.approx((weighting * numpy_sigma(np.float64(kernel), 1.0)).sum(), rel=1e-4)


def test_power_iteration_finds_a_matrix_that_moved(rng):
    linear = module(sigma_reparam=True).query
    strong = np.outer(rng.standard_normal(D), rng.standard_normal(N * H)) + 0.1 * rng.standard_normal((D, N * H))
    linear.kernel[...] = jnp.asarray(strong, jnp.float32).reshape(linear.kernel.shape)
    before = matrix(linear.weights())
    for _ in range(6):
        linear.move()
    np.testing.assert_allclose(matrix(linear.weights()), numpy_sigma(strong, 1.0), atol=1e-5)
    assert np.abs(before - numpy_sigma(strong, 1.0)).max() > 0.05


class Training:
    """Steps of a config on a mesh, on examples that are a function of the step."""

    def __init__(self, c, mesh):
        self.run = train_setup.build(c, examples=64, mesh=mesh)
        self.step = jax.jit(self.run.train_step)

    def __call__(self, state, steps):
        for _ in range(steps):
            rng, batch = np.random.default_rng(int(state.step)), {}
            for name, leaf in self.run.abstract_batch().items():
                batch[name] = rng.integers(0, 5, leaf.shape).astype(leaf.dtype)
            state, metrics = self.step(state, batch, self.run.run_key())
            assert np.isfinite(float(metrics["last_loss"])) and int(metrics["skipped"]) == 0
        return state


EVERYTHING = {
    **{"spectral": 0.3, "qkv_init": "spectral", "sigma_reparam": True, "mlp_sigma_reparam": True},
    **{"value_residual": 0.4, "value_mix": "learned", "graying": 0.8, "graying_by": "dct"},
}


def test_all_levers_together_take_a_step(plain, meshes):
    """Every direction of σReparam moves, and no parameter stays where it was."""
    c = plain.copy_and_resolve_references().unlock()
    c.model.update(EVERYTHING)
    c.model.depth = 2
    train = Training(c, meshes(1, 1))
    weights = filled(train.run.state.weights)
    after = train(materialise(train.run.make_state, weights, train.run.state), 1)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), weights, after.weights)
    assert len(jax.tree.leaves(moved[1])) == 6  # directions of four matrices of attention and two of the MLP
    still = [name for name, step in zip(leaf_names(moved), jax.tree.leaves(moved), strict=True) if step == 0]
    assert all(name.endswith("key.bias") for name in still), still  # whose gradient is rounding


@pytest.mark.slow  # the state of directions is that of any batch statistic: tests/training/test_sharding.py
def test_all_levers_together_resume_bitwise_and_shard(plain, meshes, tmp_path):
    c = plain.copy_and_resolve_references().unlock()
    c.model.update(EVERYTHING)
    c.model.depth = 2
    train = Training(c, meshes(1, 1))
    first = train(train.run.initial_state(), 2)
    straight = train(first, 1)
    with Checkpoints(tmp_path / "checkpoints") as saved:
        saved.save(2, first)
        saved.wait()
        restored, _ = saved.restore(train.run.state)
    jax.tree.map(np.testing.assert_array_equal, straight, train(restored, 1))
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), train.run.initial_state().statistics, straight.statistics
    )
    assert min(jax.tree.leaves(moved)) > 0 and len(jax.tree.leaves(moved)) == 6  # σReparam's directions
    shared = Training(c, meshes(2, 2))
    result = shared(shared.run.initial_state(), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-4), straight.params, result.params)


def test_evaluation_moves_no_direction(x):
    made = stack(sigma_reparam=True)
    for training in (False, True):
        before = np.array(made.layers.attention.query.direction[...])
        made(x, Context(key=jax.random.split(jax.random.key(0), B) if training else None))
        after = made.layers.attention.query.direction[...]
        made.layers.attention.query.kernel[...] += 0.1  # the first step starts at the singular vector, and stays there
        assert np.array_equal(before, after) or training
    made(x, Context(key=jax.random.split(jax.random.key(0), B)))
    assert np.abs(made.layers.attention.query.direction[...] - after).max() > 1e-3


def test_exempt_from_weight_decay(tiny, meshes):
    c = tiny.copy_and_resolve_references().unlock()
    c.model.update(EVERYTHING)
    run = train_setup.build(c, examples=64, mesh=meshes(1, 1))
    flags = dict(zip(leaf_names(run.state.params), jax.tree.leaves(decay_mask(run.state.params)), strict=True))
    assert {name.rpartition(".")[2] for name, decays in flags.items() if name.startswith("blocks") and decays} == {
        "kernel"
    }
    assert "blocks.layers.attention.query.scale" in flags and "blocks.layers.attention.value_mix" in flags


@pytest.mark.parametrize("shape", [(B, T, D), (B, D, T)])
def test_graying_raises_the_spectrum(shape, rng):
    x = rng.standard_normal(shape)
    left, s, right = np.linalg.svd(x, full_matrices=False)
    raised = left @ ((s[:, :1] * (s / s[:, :1]) ** 0.6)[..., None] * right)
    np.testing.assert_allclose(interventions.flatten_token_spectrum(jnp.float32(x), 0.6), raised, atol=3e-5)
    np.testing.assert_allclose(interventions.flatten_token_spectrum(jnp.float32(x), 0.6, "svd"), raised, atol=3e-5)
    c = scipy.fft.dctn(x, axes=(1, 2), norm="ortho")
    most = np.abs(c).max(axis=(1, 2), keepdims=True)
    flat = scipy.fft.idctn(np.sign(c) * most * (np.abs(c) / most) ** 0.6, axes=(1, 2), norm="ortho")
    np.testing.assert_allclose(interventions.flatten_token_spectrum(jnp.float32(x), 0.6, "dct"), flat, atol=3e-5)
    for by in interventions.SPECTRA:
        same = jnp.float32(x)
        assert (
            interventions.flatten_token_spectrum(same, 1.0, by) is same
            and interventions.flatten_token_spectrum(same, None) is same
        )
        assert not np.isnan(interventions.flatten_token_spectrum(jnp.zeros(shape), 0.6, by)).any()


def test_gradients_of_graying(rng):
    x, weighting = rng.standard_normal((1, 5, 4)), rng.standard_normal((1, 5, 4))

    def dct(x):
        c = scipy.fft.dctn(x, axes=(1, 2), norm="ortho")
        most = np.abs(c).max()
        return (
            weighting * scipy.fft.idctn(np.sign(c) * most * (np.abs(c) / most) ** 0.6, axes=(1, 2), norm="ortho")
        ).sum()

    result = jax.grad(lambda x: jnp.sum(interventions.flatten_token_spectrum(x, 0.6, "dct") * jnp.float32(weighting)))(
        jnp.float32(x)
    )
    for i in range(20):
        step = 1e-6 * np.eye(1, 20, i).reshape(x.shape)
        assert float(result.ravel()[i]) == pytest.approx((dct(x + step) - dct(x - step)) / 2e-6, rel=2e-3, abs=1e-3)
    # Of "svd" that of a product with a matrix that is held.
    left, s, _ = np.linalg.svd(x[0], full_matrices=False)
    held = (left * (s / s[0]) ** -0.4) @ left.T
    result = jax.grad(lambda x: jnp.sum(interventions.flatten_token_spectrum(x, 0.6) * jnp.float32(weighting)))(
        jnp.float32(x)
    )
    np.testing.assert_allclose(result[0], held.T @ weighting[0], atol=1e-4)
    padded = jax.grad(lambda x: jnp.sum(interventions.flatten_token_spectrum(x, 0.6, "dct")))(jnp.zeros((1, 5, 4)))
    assert np.isfinite(padded).all()


def stack(depth=L, mlp_dim=F, norm="layernorm", block=None, **attention):
    def make(rngs):
        heads = MultiHeadAttention(D, N, H, kernel_init=nnx.initializers.normal(0.5), rngs=rngs, **attention)
        mlp = MlpConfig(mlp_dim) if mlp_dim else None
        return Block(heads, BlockConfig(D, mlp=mlp, norm=norm, **(block or {})), rngs=rngs)

    return Stack(make, depth, rngs=nnx.Rngs(3))


def check_same(values, expected):
    """Assert that two programs compute the same but for rounding: some 10 epsilons a layer, of three layers."""
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("mix", ["fixed", "learned"])
def test_values_of_the_first_layer_are_mixed_in(mix, x):
    made = stack(mlp_dim=0, norm="none", value_residual=0.3, value_mix=mix)
    shares = np.tile([0.7, 0.3], (L, 1))
    if mix == "learned":
        np.testing.assert_allclose(made.layers.attention.value_mix[...], shares, rtol=1e-6)
        shares = np.array([[0.9, 0.2], [0.5, 0.8], [-0.4, 1.1]])
        made.layers.attention.value_mix[...] = jnp.float32(shares)
    y, first = np.float64(x), None
    for i in range(L):
        q, k, v = (
            np.einsum("btd,dnh->btnh", y, np.float64(getattr(made.layers.attention, name).kernel[i]))
            for name in ("query", "key", "value")
        )
        first = v if first is None else first
        weights = softmax(np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H))
        heads = np.einsum("bnts,bsnh->btnh", weights, shares[i, 0] * v + shares[i, 1] * first)
        y = y + np.einsum("btnh,nhd->btd", heads, np.float64(made.layers.attention.out.kernel[i]))
    np.testing.assert_allclose(made(x)[0], y, rtol=0, atol=1e-4 * np.abs(y).max())
    if mix == "fixed":
        plain = stack(mlp_dim=0, norm="none")
        check_same(stack(mlp_dim=0, norm="none", value_residual=0.0)(x)[0], plain(x)[0])
        assert np.abs(made(x)[0] - plain(x)[0]).max() > 1e-2 * np.abs(y).max()


def test_in_training_the_first_layer_mixes_its_own_values(x):
    """Of σReparam too, whose directions move before both makings of them: a share of one's own changes nothing."""
    for depth, same in ((1, True), (2, False)):
        made, plain = (stack(depth=depth, sigma_reparam=True, **extra) for extra in ({"value_residual": 0.5}, {}))
        for each in (made, plain):  # directions that power iteration has something to do with
            each.layers.attention.value.direction[...] = jnp.ones_like(each.layers.attention.value.direction[...])
        context = Context(key=jax.random.split(jax.random.key(0), B))
        result, expected = made(x, context)[0], plain(x, context)[0]
        assert np.allclose(result, expected, rtol=0, atol=1e-5 * np.abs(expected).max()) == same


def test_decoding_with_values_of_the_first_layer(rng):
    sizes = {"width": D, "depth": L, "num_heads": N, "head_dim": H, "mlp_dim": F}
    extra = {"value_residual": 0.4, "value_mix": "learned", "spectral": 1.0, "layer_scale": 0.5}
    made = models.build("gpt", vocabulary=11, max_length=T, rngs=nnx.Rngs(0), **sizes, **extra)
    tokens = jnp.asarray(rng.integers(11, size=(B, T)))
    whole, cache = made(tokens)[0], made.empty_cache(B, T)
    for t in range(T):
        result, cache = made.extend(tokens[:, t : t + 1], cache, jnp.int32(t))
        np.testing.assert_allclose(result, whole[:, t], rtol=0, atol=1e-5)


def test_compile_time_is_flat_in_depth(x):
    texts = [
        jax.jit(lambda x, made=made: made(x)[0]).lower(x).as_text()
        for made in (stack(depth, value_residual=0.5, sigma_reparam=True) for depth in (2, 9))
    ]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())
