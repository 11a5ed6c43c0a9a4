"""XCiT: taps, measures, batch statistics, drop path."""

import math

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


TINY = {
    "image_size": (28, 20),
    "patch_size": 4,
    "channels": 1,
    "num_classes": 11,
    "width": 6,
    "depth": 2,
    "num_heads": 3,
    "head_dim": 5,
    "mlp_dim": 13,
    "class_heads": 2,
    "class_head_dim": 7,
    "class_mlp_dim": 17,
    "layer_scale": 0.7,
}
TOKENS, BATCH = 7 * 5, 4


@pytest.fixture
def images(rng):
    return jnp.asarray(rng.standard_normal((BATCH, 28, 20, 1)), jnp.float32)


def build(**other):
    return models.build("xcit", **TINY | other, rngs=nnx.Rngs(0))


def build_filled(**other):
    return fill_weights(lambda: build(**other))


def run(model, images, key=None, tap=None):
    """Return logits, taps and updated statistics, computed by one program; the model is unchanged."""
    graphdef, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)

    @jax.jit
    def apply(params, statistics, images, key):
        model = nnx.merge(graphdef, params, statistics)
        logits, taps = model(images, key=key, tap=tap)
        return logits, taps, nnx.state(model, nnx.BatchStat)

    return apply(params, statistics, images, key)


def make_keys(number=BATCH):
    return jax.random.split(jax.random.key(1), number)


def params(model):
    return nnx.as_pure(nnx.state(model, nnx.Param))


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
    logits, taps, _ = run(model, images, tap=lambda arrays: {name: arrays[name] for name in names})
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


def update_statistics(running, maps):
    """Return running (mean, var) after a batch of maps (..., C) by PyTorch's rule, in float64."""
    rows = np.asarray(maps, np.float64).reshape(-1, maps.shape[-1])
    return 0.9 * running[0] + 0.1 * rows.mean(0), 0.9 * running[1] + 0.1 * rows.var(0, ddof=1)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def convolve(x, kernel, stride=1):
    """Convolve maps (B height width C), padded by one, with kernel (3, 3, C, C') or, per channel, (3, 3, C)."""
    x = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = ((n - 3) // stride + 1 for n in x.shape[1:3])
    letters = "bhwc,cd->bhwd" if kernel.ndim == 4 else "bhwc,c->bhwc"
    return sum(
        np.einsum(letters, x[:, i : i + stride * height : stride, j : j + stride * width : stride], kernel[i, j])
        for i in range(3)
        for j in range(3)
    )


def normalise(x, mean, var, scale, bias, epsilon):
    return (x - mean) / np.sqrt(var + epsilon) * np.asarray(scale) + np.asarray(bias)


def test_training_updates_batch_statistics_as_pytorch(images, rng):
    model = build_filled()
    norms = [module for _, module in nnx.iter_modules(model) if isinstance(module, BatchNorm)]
    assert len(norms) == 3
    for norm in norms:
        for x, low in ((norm.mean, -0.5), (norm.var, 0.5), (norm.scale, 0.5), (norm.bias, -0.5)):
            x[...] = jnp.asarray(rng.uniform(low, low + 1, x[...].shape), jnp.float32)
    stem, local, norm3 = model.patch_embed, model.blocks.layers.local, model.blocks.layers.norm3
    pairs = ((stem.conv1, stem.norm1), (stem.conv2, stem.norm2))
    before = {norm: (np.array(norm.mean[...]), np.array(norm.var[...])) for norm in norms}
    statistics = nnx.state(model, nnx.BatchStat)
    jax.tree.map(np.testing.assert_array_equal, run(model, images)[2], statistics)  # evaluation changes nothing
    _, taps, statistics = run(model, images, make_keys(), tap=lambda arrays: arrays["middle"])
    nnx.update(model, statistics)
    middle = taps["blocks"]
    x = images
    for conv, norm in pairs:
        x = convolve(x, conv.kernel[...], stride=2)
        np.testing.assert_allclose(
            (norm.mean[...], norm.var[...]), update_statistics(before[norm], x), rtol=1e-5, atol=1e-6
        )
        flat = x.reshape(-1, x.shape[-1])
        x = gelu(normalise(x, flat.mean(0), flat.var(0), norm.scale[...], norm.bias[...], 1e-5))
    for layer in range(2):
        tokens = np.asarray(middle[layer], np.float64)
        mean, var = tokens.mean(-1, keepdims=True), tokens.var(-1, keepdims=True)
        tokens = normalise(tokens, mean, var, norm3.scale[...][layer], norm3.bias[...][layer], 1e-6)
        tokens = tokens.reshape(BATCH, 7, 5, 6)
        result = gelu(convolve(tokens, local.conv1.kernel[...][layer]) + np.asarray(local.conv1.bias[...][layer]))
        expected = update_statistics([x[layer] for x in before[local.norm]], result)
        got = (local.norm.mean[...][layer], local.norm.var[...][layer])
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_drop_path_rate_is_constant_except_in_class_blocks():
    model, number = build_filled(drop_path=0.25, depth=3), 400
    assert model.class_blocks.rates == (0.0, 0.0)
    images = jnp.tile(jnp.linspace(-1, 1, 64).reshape(1, 8, 8, 1), (number, 1, 1, 1))

    def branch_scale(arrays):
        added, branch = arrays["middle"] - arrays["tokens"], arrays["attention"]
        return jnp.sum(added * branch, axis=(1, 2)) / jnp.sum(branch**2, axis=(1, 2))

    scales = run(model, images, make_keys(number), tap=branch_scale)[1]["blocks"]
    assert scales.shape == (3, number)
    np.testing.assert_allclose(np.minimum(np.abs(scales), np.abs(scales - 1 / 0.75)), 0, atol=1e-3)
    np.testing.assert_allclose((scales > 0.5).mean(1), 0.75, atol=4 * math.sqrt(0.75 * 0.25 / number))
    assert not np.array_equal(scales[0], scales[1])
