"""BERT: attention, options, parameter counts, packed rows, padding and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import models
from leanformer.layers.positions import sinusoidal_embeddings


TINY = {"vocabulary": 13, "max_length": 11, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
PLAIN = {"types": 2, "transform": True, "head_bias": True}
CRAMMED = {"positions": "sinusoidal", "post_norm": False, "gated": True, "mlp_bias": False, "qkv_bias": False}
CRAMMED |= {"out_bias": False}
ROTARY = CRAMMED | {"positions": "none", "rotary": 100.0, "norm": "rmsnorm"}
KINDS = {"plain": PLAIN, "crammed": CRAMMED, "rotary": ROTARY}
HEADS = {"plain": {"pooler_dim": 7}, "crammed": {"pool": "mean"}}


ROUNDING = 1e-5  # relative to the largest output: about 10 epsilons per layer, for sums of up to 20 products


def build(**other):
    return fill_weights(lambda: models.build("bert", **TINY | other, rngs=nnx.Rngs(0)))


def check_close(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


def run_model(model, *inputs):
    return np.asarray(nnx.jit(lambda m, *a: m(*a)[0])(model, *(x if x is None else jnp.asarray(x) for x in inputs)))


def build_classifier(kind):
    base = {key: value for key, value in KINDS[kind].items() if key not in ("transform", "head_bias")}
    return build(**base, num_classes=3, **HEADS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_depends_on_all_others_and_on_position(kind, rng):
    model, tokens = build(**KINDS[kind]), rng.integers(13, size=(1, 11))
    rows = np.repeat(tokens, 12, axis=0)
    for position in range(11):
        rows[position, position] = (rows[position, position] + 1 + rng.integers(11)) % 13
    *changed, plain = run_model(model, rows)
    for row in changed:
        assert (np.abs(row - plain).max(axis=-1) > 1e-4).all()
    swapped = tokens.copy()
    swapped[0, [2, 7]] = tokens[0, [7, 2]] if tokens[0, 2] != tokens[0, 7] else (tokens[0, [7, 2]] + [1, 0]) % 13
    assert np.abs(run_model(model, swapped)[0, 0] - plain[0]).max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_outputs(kind, rng):
    """Logits of a text's tokens do not depend on the padding after it."""
    model, tokens, lengths = build(**KINDS[kind]), rng.integers(13, size=(3, 11)), np.array([4, 11, 7])
    result = run_model(model, tokens, lengths)
    for row, length in enumerate(lengths):
        single = run_model(model, tokens[row : row + 1, :length])
        check_close(result[row, :length], single[0])
    assert np.abs(result[0, :4] - run_model(model, tokens)[0, :4]).max() > 1e-3


@pytest.mark.parametrize("kind", HEADS)
def test_classifier_ignores_padding(kind, rng):
    model, tokens, lengths = build_classifier(kind), rng.integers(13, size=(3, 11)), np.array([4, 11, 7])
    result = run_model(model, tokens, lengths)
    assert result.shape == (3, 3)
    for row, length in enumerate(lengths):
        check_close(result[row], run_model(model, tokens[row : row + 1, :length])[0])
    x = np.asarray(model.hidden(jnp.asarray(tokens), jnp.asarray(lengths))[0], np.float64)
    if kind == "plain":
        pooled = np.tanh(x[:, 0] @ np.asarray(model.pooler.kernel[...]) + np.asarray(model.pooler.bias[...]))
    else:
        pooled = np.stack([row[:length].mean(axis=0) for row, length in zip(x, lengths, strict=True)])
    expected = pooled @ np.asarray(model.head.kernel[...]) + np.asarray(model.head.bias[...])
    check_close(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_match_single_documents(kind, rng):
    model = build(**KINDS[kind], packed=True)
    lengths, tokens = (4, 1, 5), rng.integers(13, size=(1, 11))
    segments = np.repeat([[1, 2, 3, 0]], [*lengths, 1], axis=1)
    result, start = run_model(model, tokens, None, None, segments), 0
    for length in lengths:
        single = run_model(model, tokens[:, start : start + length])
        check_close(result[:, start : start + length], single)
        start += length


def test_token_types_change_outputs_and_default_to_zero(rng):
    model, tokens = build(**PLAIN), rng.integers(13, size=(2, 7))
    plain, types = run_model(model, tokens), np.repeat([[0, 1]], [3, 4], axis=1).repeat(2, axis=0)
    check_close(run_model(model, tokens, None, np.zeros_like(types)), plain)
    assert np.abs(plain - run_model(model, tokens, None, types)).max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_logits_from_hidden_states_and_unembedding(kind, rng):
    """Also at a subset of positions, as for masked tokens."""
    model, tokens = build(**KINDS[kind]), jnp.asarray(rng.integers(13, size=(2, 7)))
    kernel, bias = model.unembedding()
    result = model.decoded(model.hidden(tokens)[0][:, 2:4]) @ kernel + (0 if bias is None else bias[None, None])
    check_close(result, run_model(model, tokens)[:, 2:4])


def test_sinusoidal_embeddings_match_formula():
    result = np.asarray(sinusoidal_embeddings(jnp.asarray([[0, 3, 127]]), 7), np.float64)[0]
    for row, position in zip(result, (0, 3, 127), strict=True):
        for channel in range(7):
            angle = position / 10_000 ** (2 * (channel // 2) / 7)
            assert row[channel] == pytest.approx((np.sin, np.cos)[channel % 2](angle), abs=1e-5)
    model = models.build("bert", **TINY | CRAMMED | {"depth": 1}, rngs=nnx.Rngs(0))
    assert float(model.pos_scale[...]) == pytest.approx(12**-0.5)


def test_dropout_acts_in_training_only(rng):
    model, tokens = build(**CRAMMED, dropout=0.5), jnp.asarray(rng.integers(13, size=(2, 7)))
    train, keys = nnx.jit(lambda m, *a: m(a[0], key=a[1])[0]), jax.random.split(jax.random.key(0), 2)
    first, repeated, other = (train(model, tokens, k) for k in (keys, keys, keys[::-1]))
    np.testing.assert_array_equal(first, repeated)
    assert np.abs(first - other).max() > 0.01 < np.abs(first - run_model(model, tokens)).max()


def test_dropout_before_the_classifier(rng):
    """Half of the pooled features are dropped and the rest doubled; nothing else is dropped."""
    model, tokens = build_classifier("crammed"), jnp.asarray(rng.integers(13, size=(2, 7)))
    model.embed_norm.scale[...], model.embed_norm.bias[...] = jnp.zeros(12), jnp.zeros(12)  # dropout leaves zeros
    model.head.kernel[...], model.head.bias[...] = jnp.eye(12)[:, :3], jnp.zeros(3)
    plain = np.asarray(model(tokens)[0])
    model.dropout = 0.5
    result = np.asarray(model(tokens, key=jax.random.split(jax.random.key(3), 2))[0])
    ratios = np.round(result / plain, 4)
    assert set(ratios.ravel().tolist()) == {0.0, 2.0}


def test_invalid_values_are_refused(rng):
    tokens = jnp.zeros((1, 11), jnp.int32)
    with refuses(12, "model.max_length=11"):
        build()(jnp.zeros((1, 12), jnp.int32))
    with refuses("model.types"):
        build()(tokens, None, tokens)
    with refuses("segments", "lengths"):
        build(packed=True)(tokens, jnp.ones(1, jnp.int32), None, tokens)
    with refuses('model.positions="sines"', "learned", "sinusoidal"):
        build(positions="sines")
    with refuses('model.pool="last"', "first", "mean"):
        build(pool="last")
    with refuses("model.transform=True", "model.num_classes=3"):
        build(transform=True, num_classes=3)
    with refuses("model.pooler_dim=5", "model.num_classes=None"):
        build(pooler_dim=5)
