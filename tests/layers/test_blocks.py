"""Stochastic depth, the scanned stack, and taps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from flax import nnx
from messages import refuses

from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.context import Context
from leanformer.layers.dropping import drop_path, path_scales
from leanformer.layers.masks import Mask
from leanformer.layers.mlp import MlpConfig
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention
from leanformer.layers.stack import Stack


WIDTH, DEPTH, BATCH, TOKENS = 13, 3, 5, 7
CONFIG = BlockConfig(WIDTH, mlp=MlpConfig(17))


def make_block(rngs):
    attention = MultiHeadAttention(WIDTH, 3, 5, dtype=jnp.float32, rngs=rngs)
    return Block(attention, CONFIG, rngs=rngs)


@pytest.fixture
def stack():
    return filled(lambda: Stack(make_block, DEPTH, drop_path=0.4, rngs=nnx.Rngs(3)))


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((BATCH, TOKENS, WIDTH)), jnp.float32)


def test_paths_are_dropped_at_their_rates_and_keep_the_mean():
    n, rates = 20_000, np.float32([0.0, 0.3])
    scales = np.asarray(path_scales(jax.random.split(jax.random.key(0), n), rates, 2))
    assert scales.shape == (2, 2, n) and (scales[0] == 1).all()
    for branch in scales[1]:
        assert set(np.unique(branch)) == {np.float32(0), np.float32(1) / np.float32(0.7)}
        assert abs(branch.mean() - 1) < 4 * np.sqrt(0.3 / 0.7 / n)
    assert abs(np.corrcoef(scales[1])[0, 1]) < 4 / np.sqrt(n)  # the two branches are dropped independently


def test_drop_path_scales_whole_examples(x):
    scale = jnp.arange(BATCH, dtype=jnp.float32)
    np.testing.assert_array_equal(drop_path(x, scale), x * np.arange(BATCH, dtype=np.float32)[:, None, None])
    assert drop_path(x, None) is x


def test_an_example_is_dropped_whatever_its_batch_mates(stack, x):
    keys = jax.random.split(jax.random.key(1), BATCH)
    run = nnx.jit(lambda stack, x, key: stack(x, Context(key=key))[0])
    whole = run(stack, x, keys)
    for i in range(BATCH):
        alone = run(stack, x[i : i + 1], keys[i : i + 1])
        np.testing.assert_allclose(alone[0], whole[i], rtol=0, atol=1e-5 * np.abs(whole).max())
    assert np.abs(whole - run(stack, x, None)).max() > 0.1


def test_the_scan_is_the_loop(stack, x):
    result = nnx.jit(lambda stack, x: stack(x)[0])(stack, x)
    graphdef, params = nnx.split(stack.layers)
    one = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x)[0])
    for layer in range(DEPTH):
        x = one(jax.tree.map(lambda p, layer=layer: p[layer], params), x)
    np.testing.assert_allclose(result, x, rtol=0, atol=1e-5 * np.abs(x).max())


def test_layers_start_different():
    kernel = jax.jit(lambda: Stack(make_block, DEPTH, rngs=nnx.Rngs(3)).layers.mlp.up.kernel[...])()
    assert kernel.shape == (DEPTH, WIDTH, 17)
    assert not np.allclose(kernel[0], kernel[1])


def test_layers_branches_and_examples_drop_numbers_of_their_own(x):
    """At a rate of a quarter; what stays is divided by three quarters."""
    rate = 0.25
    config = BlockConfig(WIDTH, mlp=MlpConfig(17), dropout=rate)
    block = lambda rngs: Block(MultiHeadAttention(WIDTH, 3, 5, rngs=rngs), config, rngs=rngs)  # noqa: E731
    stack = filled(lambda: Stack(block, DEPTH, rngs=nnx.Rngs(3)))
    tap = lambda arrays: (arrays["attention"], arrays["block"] - arrays["middle"], arrays["hidden"])  # noqa: E731
    run = nnx.jit(lambda stack, key: stack(x, Context(key=key, tap=tap))[1])
    dropped, whole = run(stack, jax.random.split(jax.random.key(1), BATCH)), run(stack, None)
    np.testing.assert_allclose(
        dropped[0][0], np.where(dropped[0][0] == 0, 0, whole[0][0] / (1 - rate)), rtol=1e-5, atol=1e-6
    )
    masks = [np.asarray(array == 0) for array in dropped]
    for mask in masks:
        assert abs(mask.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / mask.size)
    assert not any(np.asarray(array == 0).any() for array in whole)
    of_layers = [mask[layer].ravel() for mask in masks[:2] for layer in range(DEPTH)]  # of both branches
    of_examples = [masks[0][0, i].ravel() for i in range(BATCH)]
    for own in (of_layers, of_examples):
        others = np.corrcoef(own) - np.eye(len(own))
        assert np.abs(others).max() < 4 / np.sqrt(own[0].size)


def test_rates_rise_linearly(x):
    """With rate 1 - tiny in the last layer alone, dropping is that layer's: its branches vanish or explode."""
    stack = filled(lambda: Stack(make_block, 2, drop_path=0.9, rngs=nnx.Rngs(3)))
    keys = jax.random.split(jax.random.key(1), BATCH)
    look = lambda arrays: arrays["middle"] - arrays["tokens"] - arrays["attention"]  # noqa: E731
    _, first = nnx.jit(lambda stack: stack(x, Context(key=keys, tap=look)))(stack)
    np.testing.assert_allclose(first[0], 0, atol=1e-5)  # the first layer's rate is 0
    assert (np.abs(first[1]).max(axis=(1, 2)) > 1e-3).any()


@pytest.mark.parametrize("how", [{"remat": "light"}, {"remat": "block"}, {"unroll": 2}, {"unroll": DEPTH + 1}])
def test_remat_and_unroll_change_nothing(x, how):
    def grads(**how):
        stack = filled(lambda: Stack(make_block, DEPTH, drop_path=0.4, rngs=nnx.Rngs(3), **how))
        graphdef, params = nnx.split(stack)
        keys = jax.random.split(jax.random.key(1), BATCH)
        loss = lambda p: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(x, Context(key=keys))[0]))  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    # Sums over 5 x 7 tokens and 17 channels, three layers deep: some 10 epsilons, of gradients of one size.
    expected, values = (jax.tree.leaves(tree) for tree in (grads(remat="none"), grads(**how)))
    largest = max(np.abs(b).max() for b in expected)
    for a, b in zip(values, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * np.finfo(np.float32).eps * largest)


def test_the_program_grows_with_the_layers_of_a_turn_and_not_with_depth(x):
    def program(depth, **how):
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Stack(make_block, depth, rngs=nnx.Rngs(3), **how)))
        return jax.jit(lambda p: nnx.merge(graphdef, p)(x)[0]).lower(params).as_text()

    def lines(text):
        return text.count("\n")

    scanned = program(9)
    assert lines(scanned) == lines(program(2))
    unrolled = program(9, unroll=9)
    assert "stablehlo.while" in scanned and "stablehlo.while" not in unrolled and lines(unrolled) > 2 * lines(scanned)


def test_a_tap_sees_every_named_array_stacked_over_layers(stack, x):
    _, shapes = nnx.eval_shape(lambda stack: stack(x, Context(tap=lambda arrays: arrays)), stack)
    assert {name: a.shape for name, a in shapes.items()} == {
        "tokens": (DEPTH, BATCH, TOKENS, WIDTH),
        "normed": (DEPTH, BATCH, TOKENS, WIDTH),
        "q": (DEPTH, BATCH, TOKENS, 3, 5),
        "k": (DEPTH, BATCH, TOKENS, 3, 5),
        "v": (DEPTH, BATCH, TOKENS, 3, 5),
        "out": (DEPTH, BATCH, TOKENS, 3, 5),
        "attention": (DEPTH, BATCH, TOKENS, WIDTH),
        "middle": (DEPTH, BATCH, TOKENS, WIDTH),
        "hidden": (DEPTH, BATCH, TOKENS, 17),
        "block": (DEPTH, BATCH, TOKENS, WIDTH),
    }


@pytest.mark.parametrize("part", ["lengths", "keep"])
def test_a_tap_sees_padding_as_zeros_in_every_array(part, x):
    lengths = np.array([TOKENS, 1, 4, 6, 2])
    real = np.arange(TOKENS) < lengths[:, None]
    if part == "keep":
        real = np.roll(real, 1, axis=1)  # padding between tokens
    mask = Mask(lengths=jnp.asarray(lengths)) if part == "lengths" else Mask(keep=jnp.asarray(real))
    block = filled(lambda: make_block(nnx.Rngs(0)))
    _, arrays, _ = nnx.jit(lambda block: block(x, Context(mask=mask, tap=lambda arrays: arrays)))(block)
    assert len(arrays.pop("mask").parts) == 1 and len(arrays) == 10
    for name, array in arrays.items():
        size = np.abs(array).max(axis=tuple(range(2, array.ndim)))
        assert size.shape == real.shape and ((size > 0) == real).all(), name


def test_context_of_a_block_in_a_stack(x):
    """A key only where it drops numbers, scales only where paths are dropped; the rest as it was given."""
    seen = []

    class Listening(Block):
        def __call__(self, x, context):
            seen.append(context)
            return super().__call__(x, context)

    def told(dropout=0.0, drop_path=0.0, **given):
        def block(rngs):
            config = dataclasses.replace(CONFIG, dropout=dropout)
            return Listening(MultiHeadAttention(WIDTH, 3, 5, rngs=rngs), config, rngs=rngs)

        stack = nnx.eval_shape(lambda: Stack(block, DEPTH, drop_path=drop_path, remat="none", rngs=nnx.Rngs(3)))
        nnx.eval_shape(lambda stack: stack(x, Context(**given))[0], stack)
        return seen.pop()

    keys, mask = jax.random.split(jax.random.key(1), BATCH), Mask(lengths=jnp.full(BATCH, 5))
    plain, training = told(mask=mask, tap=dict), told(key=keys)
    assert plain.mask.lengths is mask.lengths and plain.tap is dict and plain.key is plain.scales is plain.cache is None
    assert training.train and not plain.train and training.key is training.scales is None
    assert told(key=keys, dropout=0.1).key.shape == (BATCH,) and told(key=keys, drop_path=0.1).scales.shape == (
        2,
        BATCH,
    )
    assert told(dropout=0.1, drop_path=0.1).key is None


def test_masks_that_an_attention_would_ignore_are_refused(x):
    heads = lambda: NystromAttention(WIDTH, 3, 5, landmarks=2, rngs=nnx.Rngs(0))  # noqa: E731
    block = filled(lambda: Block(heads(), CONFIG, rngs=nnx.Rngs(0)))
    block(x, Context(mask=Mask(lengths=jnp.full(BATCH, 5))))
    for mask in (Mask(causal=True), Mask(window=3), Mask(segments=jnp.zeros((BATCH, TOKENS), int))):
        with refuses("NystromAttention", mask.parts[0], 'model.attention="softmax"'):
            block(x, Context(mask=mask))
