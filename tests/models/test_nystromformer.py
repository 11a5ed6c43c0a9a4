"""Nyströmformer: initial weights, padding, pooling, towers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_weights import fill_weights

from leanformer import models


def relative_error(values, expected):
    return np.abs(values - expected).max() / np.abs(expected).max()


SIZES = {"vocabulary": 13, "max_length": 31, "num_classes": 3, "width": 17, "depth": 2, "num_heads": 2, "head_dim": 5}
SIZES |= {"value_dim": 7, "mlp_dim": 19, "landmarks": 6}
LENGTHS = np.array([31, 23, 11])


def build(**changes):
    """Return a small model whose attention is not uniform."""
    return fill_weights(lambda: models.build("nystromformer", **(SIZES | changes), rngs=nnx.Rngs(0)))


def run(model, tokens, lengths=None, **arguments):
    graphdef, params = nnx.split(model)
    return jax.jit(lambda p, t, n: nnx.merge(graphdef, p)(t, n, **arguments)[0])(params, tokens, lengths)


@pytest.fixture
def tokens(rng):
    return jnp.asarray(rng.integers(0, 13, (3, 31)), jnp.int32)


@pytest.mark.parametrize("changes", [{}, {"attention": "softmax", "landmarks": None}, {"pool": "token"}], ids=str)
def test_padded_batch_matches_single_sequences(tokens, changes):
    model = build(**changes)
    result = run(model, tokens, jnp.asarray(LENGTHS))
    assert relative_error(result[2], run(model, tokens[2:, : LENGTHS[2]])[0]) < 1e-5
    noise = jnp.where(np.arange(31) < LENGTHS[:, None], tokens, (tokens + 5) % 13)
    np.testing.assert_array_equal(result, run(model, noise, jnp.asarray(LENGTHS)))


def test_initial_weights_are_distributed_as_in_the_original():
    model = models.build("nystromformer", **SIZES, rngs=nnx.Rngs(0))
    kernels = {  # with the number of inputs
        "query": (model.blocks.layers.attention.query.kernel, 17),
        "out": (model.blocks.layers.attention.out.kernel, 2 * 7),
        "up": (model.blocks.layers.mlp.up.kernel, 17),
        "down": (model.blocks.layers.mlp.down.kernel, 19),
        "hidden": (model.hidden.kernel, 17),
        "head": (model.head.kernel, 19),
    }
    for name, (kernel, inputs) in kernels.items():
        kernel, bound = np.abs(kernel[...]), inputs**-0.5
        assert 0.9 * bound < kernel.max() <= bound, name
        assert abs(kernel.mean() - bound / 2) < 4 * bound / np.sqrt(12 * kernel.size), name
    assert np.std(model.embed[...]) == pytest.approx(0.02, rel=0.2)


def test_token_zero_is_padding_only_if_configured(tokens):
    other = jnp.where(tokens == 0, 4, tokens)
    assert not np.array_equal(run(build(), tokens), run(build(), other))
    lengths = jnp.asarray(LENGTHS)
    for padding in ("masked", "zeros"):
        # The embedding of token 0 is never read, so that changing it has no effect.
        model = build(zero_is_padding=True, padding=padding, max_length=30)
        first = run(model, tokens[:, :30])
        model.embed[...] = model.embed[...].at[0].add(1)
        np.testing.assert_array_equal(run(model, tokens[:, :30]), first)
        assert not np.array_equal(run(model, tokens[:, :30], lengths), first)  # lengths count too


def test_padded_mean_divides_by_the_row_length(tokens):
    lengths = jnp.asarray(LENGTHS)
    result = {}
    for pool in ("mean", "padded_mean"):
        model = build(pool=pool)
        result[pool] = jax.jit(lambda t, n, model=model: model._encode(t, n, None, None)[0])(tokens, lengths)
    expected = result["mean"] * (LENGTHS / 31)[:, None]
    assert relative_error(result["padded_mean"], expected) < 1e-5
    assert build(pool="token").pos_embed.shape == (32, 17)


def test_two_towers_share_an_encoder_and_are_ordered(rng):
    tokens = jnp.asarray(rng.integers(0, 13, (3, 2, 31)), jnp.int32)
    lengths = jnp.array([[31, 11], [23, 31], [9, 17]])
    model = build(towers=2)
    assert model.hidden.kernel.shape == (4 * 17, 19)
    encode = nnx.jit(lambda model, tokens, lengths: model._encode(tokens, lengths, None, None)[0])
    a, b = (np.asarray(encode(model, tokens[:, i], lengths[:, i])) for i in range(2))
    features = np.concatenate([a, b, a * b, a - b], axis=1)
    hidden = np.maximum(features @ model.hidden.kernel[...] + model.hidden.bias[...][None], 0)
    result = run(model, tokens, lengths)
    assert relative_error(result, hidden @ model.head.kernel[...] + model.head.bias[...][None]) < 1e-5
    assert relative_error(run(model, tokens[:, ::-1], lengths[:, ::-1]), result) > 1e-3
