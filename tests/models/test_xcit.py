"""XCiT: taps, measures, batch statistics, drop path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import conditioning, models
from leanformer.layers.convolution import BatchNorm
from leanformer.models.xcit import CrossCovarianceAttention


TINY = {"image_size": (28, 20), "patch_size": 4, "channels": 1, "num_classes": 11, "width": 6, "depth": 2}
TINY |= {"num_heads": 3, "head_dim": 5, "mlp_dim": 13, "class_heads": 2, "class_head_dim": 7, "class_mlp_dim": 17}
TINY |= {"layer_scale": 0.7}
TOKENS, BATCH = 7 * 5, 4


@pytest.fixture
def images(rng):
    return jnp.asarray(rng.standard_normal((BATCH, 28, 20, 1)), jnp.float32)


def build(**other):
    return models.build("xcit", **TINY | other, rngs=nnx.Rngs(0))


def build_filled(**other):
    return fill_weights(lambda: build(**other))


def run(model, images, tap=None):
    return jax.jit(lambda images: model(images, tap=tap))(images)


def test_tap_shapes(images):
    logits, taps = jax.eval_shape(lambda x: build()(x, tap=dict), images)
    shapes = {name: x.shape[1:] for name, x in taps["blocks"].items()}
    tokens, heads = (BATCH, TOKENS, 6), (BATCH, TOKENS, 3, 5)
    names = ("tokens", "normed", "attention", "middle", "local", "block")
    expected = dict.fromkeys(names, tokens) | {"v": heads, "out": heads, "hidden": (BATCH, TOKENS, 13)}
    assert shapes == expected | {"channel_attention": (BATCH, 3, 5, 5)}
    assert logits.shape == (BATCH, 11)


def check_close(values, expected):
    """Assert equality up to rounding: about 10 epsilons of the largest number per layer."""
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_tapped_arrays_are_consistent(images):
    """Tapped arrays agree with one another, and tapping changes logits only by rounding."""
    model = build_filled()
    names = ("tokens", "attention", "middle", "local", "block", "out", "v", "channel_attention")
    logits, taps = run(model, images, tap=lambda arrays: {name: arrays[name] for name in names})
    a = taps["blocks"]
    check_close(logits, run(model, images)[0])
    check_close(a["middle"], a["tokens"] + a["attention"])
    np.testing.assert_array_equal(a["tokens"][1], a["block"][0])
    np.testing.assert_allclose(a["channel_attention"].sum(-1), 1, atol=1e-6)
    mixed = np.einsum("lbnhg,lbtng->lbtnh", a["channel_attention"], a["v"])
    check_close(a["out"], mixed)
    projection = model.blocks.layers.attention.out
    projected = np.einsum("lbtnh,lnhd->lbtd", mixed, projection.kernel[...]) + projection.bias[...][:, None, None]
    gamma = model.blocks.layers.gamma1[...][:, None, None]
    check_close(a["attention"], gamma * projected)


def test_measures_of_token_attention_do_not_apply(images):
    applicable = ["attention_output", "head_correlation", "mlp_hidden"]
    tap = conditioning.tap([*applicable, "attention_entropy"])
    _, taps = jax.eval_shape(lambda x: build()(x, tap=tap), images)
    assert set(conditioning.by_name(taps, applicable)) == set(applicable)
    with refuses("attention_entropy"):
        conditioning.by_name(taps, ["attention_entropy"])
    result = jax.eval_shape(lambda: conditioning.weights(build().measured(), ["query_weights", "query_key_product"]))
    assert list(result) == ["blocks"] and result["blocks"]["query_weights"].condition_number.shape == (2,)


def test_zero_channels_have_finite_gradients(rng):
    attention = fill_weights(lambda: CrossCovarianceAttention(6, 3, 5, rngs=nnx.Rngs(0)))
    attention.query.kernel[...] = jnp.zeros((6, 3, 5))
    graphdef, weights = nnx.split(attention)
    x = jnp.asarray(rng.standard_normal((2, 7, 6)), jnp.float32)
    gradient = jax.jit(jax.grad(lambda weights: nnx.merge(graphdef, weights)(x)[0].sum()))(weights)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradient))


def test_batch_norm_updates_its_statistics_in_training_only(rng):
    """By PyTorch's rule, which takes the unbiased variance; normalised by the statistics of the batch."""
    x = rng.standard_normal((3, 5, 7)) + 2
    norm = fill_weights(lambda: BatchNorm(7))
    scale, bias, mean, var = (np.float64(p[...]) for p in (norm.scale, norm.bias, norm.mean, norm.var))
    result = norm(jnp.float32(x), train=False)
    np.testing.assert_allclose(result, (x - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(norm.mean[...], np.float32(mean))
    rows = x.reshape(-1, 7)
    result = norm(jnp.float32(x), train=True)
    expected = (x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5) * scale + bias
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm.mean[...], 0.9 * mean + 0.1 * rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var[...], 0.9 * var + 0.1 * rows.var(0, ddof=1), rtol=1e-5)


def test_drop_path_rate_is_constant_except_in_class_blocks():
    model = nnx.eval_shape(lambda: build(drop_path=0.25, depth=3))
    assert model.blocks.rates == (0.25,) * 3 and model.class_blocks.rates == (0.0, 0.0)
