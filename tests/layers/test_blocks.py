"""Stochastic depth, the scanned stack, and taps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.masks import Context, Mask
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention
from leanformer.layers.stack import Stack, path_scales


WIDTH, DEPTH, BATCH, TOKENS = 13, 3, 5, 7
CONFIG = BlockConfig(WIDTH, mlp=MlpConfig(17))


def make_block(rngs):
    attention = MultiHeadAttention(WIDTH, 3, 5, dtype=jnp.float32, rngs=rngs)
    return Block(attention, CONFIG, rngs=rngs)


@pytest.fixture
def stack():
    return fill_weights(lambda: Stack(make_block, DEPTH, drop_path=0.4, rngs=nnx.Rngs(3)))


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((BATCH, TOKENS, WIDTH)), jnp.float32)


def test_drop_path_has_its_rate_and_keeps_the_mean():
    n, rates = 20_000, np.float32([0.0, 0.3])
    scales = np.asarray(path_scales(jax.random.split(jax.random.key(0), n), rates, 2))
    assert scales.shape == (2, 2, n) and (scales[0] == 1).all()
    for branch in scales[1]:
        assert set(np.unique(branch)) == {np.float32(0), np.float32(1) / np.float32(0.7)}
        assert abs(branch.mean() - 1) < 4 * np.sqrt(0.3 / 0.7 / n)
    assert abs(np.corrcoef(scales[1])[0, 1]) < 4 / np.sqrt(n)  # the two branches are dropped independently


def test_drop_path_is_independent_of_other_examples(stack, x):
    keys = jax.random.split(jax.random.key(1), BATCH)
    run = nnx.jit(lambda stack, x, key: stack(x, Context(key=key))[0])
    full = run(stack, x, keys)
    for i in range(BATCH):
        single = run(stack, x[i : i + 1], keys[i : i + 1])
        np.testing.assert_allclose(single[0], full[i], rtol=0, atol=1e-5 * np.abs(full).max())
    assert np.abs(full - run(stack, x, None)).max() > 0.1


def test_scanned_stack_matches_loop_over_layers(stack, x):
    result = nnx.jit(lambda stack, x: stack(x)[0])(stack, x)
    graphdef, params = nnx.split(stack.layers)
    apply_layer = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x)[0])
    for layer in range(DEPTH):
        x = apply_layer(jax.tree.map(lambda p, layer=layer: p[layer], params), x)
    np.testing.assert_allclose(result, x, rtol=0, atol=1e-5 * np.abs(x).max())


def test_dropout_is_independent_per_layer_branch_and_example(x):
    """At a rate of 0.25, the remaining values are divided by 0.75."""
    rate = 0.25
    config = BlockConfig(WIDTH, mlp=MlpConfig(17), dropout=rate)
    block = lambda rngs: Block(MultiHeadAttention(WIDTH, 3, 5, rngs=rngs), config, rngs=rngs)  # noqa: E731
    stack = fill_weights(lambda: Stack(block, DEPTH, rngs=nnx.Rngs(3)))
    tap = lambda arrays: (arrays["attention"], arrays["block"] - arrays["middle"], arrays["hidden"])  # noqa: E731
    run = nnx.jit(lambda stack, key: stack(x, Context(key=key, tap=tap))[1])
    dropped, undropped = run(stack, jax.random.split(jax.random.key(1), BATCH)), run(stack, None)
    np.testing.assert_allclose(
        dropped[0][0], np.where(dropped[0][0] == 0, 0, undropped[0][0] / (1 - rate)), rtol=1e-5, atol=1e-6
    )
    masks = [np.asarray(array == 0) for array in dropped]
    for mask in masks:
        assert abs(mask.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / mask.size)
    assert not any(np.asarray(array == 0).any() for array in undropped)
    layer_masks = [mask[layer].ravel() for mask in masks[:2] for layer in range(DEPTH)]  # for both branches
    example_masks = [masks[0][0, i].ravel() for i in range(BATCH)]
    for group in (layer_masks, example_masks):
        correlations = np.corrcoef(group) - np.eye(len(group))
        assert np.abs(correlations).max() < 4 / np.sqrt(group[0].size)


SLOW = ({"remat": "block"}, {"unroll": 2}, {"unroll": DEPTH + 1})


@pytest.mark.parametrize("how", [{"remat": "light"}, *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW)])
def test_remat_and_unroll_do_not_change_gradients(x, how):
    def grads(**how):
        config = dataclasses.replace(CONFIG, dropout=0.3)  # the backward pass repeats the same dropout
        block = lambda rngs: Block(MultiHeadAttention(WIDTH, 3, 5, rngs=rngs), config, rngs=rngs)  # noqa: E731
        stack = fill_weights(lambda: Stack(block, DEPTH, drop_path=0.4, rngs=nnx.Rngs(3), **how))
        graphdef, params = nnx.split(stack)
        keys = jax.random.split(jax.random.key(1), BATCH)
        loss = lambda p: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(x, Context(key=keys))[0]))  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    # Sums over 5 x 7 tokens and 17 channels, three layers deep: about 10 epsilons, for gradients of similar size.
    expected, values = (jax.tree.leaves(tree) for tree in (grads(remat="none"), grads(**how)))
    largest = max(np.abs(b).max() for b in expected)
    for a, b in zip(values, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * np.finfo(np.float32).eps * largest)


def test_program_size_depends_on_unroll_and_not_on_depth(x):
    def lower_to_text(depth, **how):
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Stack(make_block, depth, rngs=nnx.Rngs(3), **how)))
        return jax.jit(lambda p: nnx.merge(graphdef, p)(x)[0]).lower(params).as_text()

    scanned, unrolled = lower_to_text(9), lower_to_text(9, unroll=9)
    assert scanned.count("\n") == lower_to_text(2).count("\n")
    assert "stablehlo.while" in scanned and "stablehlo.while" not in unrolled


@pytest.mark.parametrize(("unroll", "casts", "barriers"), [(1, 2, 0), (DEPTH, 1, DEPTH), (DEPTH + 1, 1, DEPTH)])
def test_unrolled_layers_are_recomputed_but_their_weights_are_not_cast_again(x, unroll, casts, barriers):
    """Without barriers the compiler would save every activation; a cast takes a kernel."""
    block = lambda rngs: Block(MultiHeadAttention(WIDTH, 3, 5, dtype=jnp.bfloat16, rngs=rngs), CONFIG, rngs=rngs)  # noqa: E731
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Stack(block, DEPTH, unroll=unroll, rngs=nnx.Rngs(3))))
    loss = lambda p: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(x)[0]))  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    layers = 1 if unroll == 1 else DEPTH
    weights = rf"stablehlo.convert .* : \(tensor<{WIDTH}x3x5xf32>\) -> tensor<{WIDTH}x3x5xbf16>"
    assert len(re.findall(weights, text)) == 3 * casts * layers  # queries, keys and values
    assert len(re.findall(r"stablehlo\.optimization_barrier %\w+, %", text)) == barriers  # of several arrays


def test_tap_receives_every_array_stacked_over_layers(stack, x):
    _, shapes = nnx.eval_shape(lambda stack: stack(x, Context(tap=lambda arrays: arrays)), stack)
    expected = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (WIDTH,)) | {"hidden": (17,)}
    expected |= dict.fromkeys(("q", "k", "v", "out"), (3, 5))
    assert {name: a.shape for name, a in shapes.items()} == {
        name: (DEPTH, BATCH, TOKENS, *shape) for name, shape in expected.items()
    }


@pytest.mark.parametrize("part", ["lengths", "keep"])
def test_tapped_arrays_are_zero_at_padding(part, x):
    lengths = np.array([TOKENS, 1, 4, 6, 2])
    valid = np.arange(TOKENS) < lengths[:, None]
    if part == "keep":
        valid = np.roll(valid, 1, axis=1)  # padding between tokens
    mask = Mask(lengths=jnp.asarray(lengths)) if part == "lengths" else Mask(keep=jnp.asarray(valid))
    block = fill_weights(lambda: make_block(nnx.Rngs(0)))
    _, arrays, _ = nnx.jit(lambda block: block(x, Context(mask=mask, tap=lambda arrays: arrays)))(block)
    assert len(arrays.pop("mask").parts) == 1 and len(arrays) == 10
    for name, array in arrays.items():
        size = np.abs(array).max(axis=tuple(range(2, array.ndim)))
        assert size.shape == valid.shape and ((size > 0) == valid).all(), name


def test_unsupported_masks_are_refused(x):
    make_attention = lambda: NystromAttention(WIDTH, 3, 5, landmarks=2, rngs=nnx.Rngs(0))  # noqa: E731
    block = fill_weights(lambda: Block(make_attention(), CONFIG, rngs=nnx.Rngs(0)))
    block(x, Context(mask=Mask(lengths=jnp.full(BATCH, 5))))
    for mask in (Mask(causal=True), Mask(segments=jnp.zeros((BATCH, TOKENS), int))):
        with refuses("NystromAttention", mask.parts[0], 'model.attention="softmax"'):
            block(x, Context(mask=mask))
