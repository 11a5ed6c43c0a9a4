"""GPT: causality, options, packed rows and cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import models


TINY = {"vocabulary": 13, "max_length": 11, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
LLAMA = {"norm": "rmsnorm", "activation": "silu", "gated": True, "mlp_bias": False, "qkv_bias": False}
LLAMA |= {"out_bias": False, "positions": "none", "rotary": 100.0, "num_kv_heads": 1, "tied": False}
DEEPSEEK = LLAMA | {"num_kv_heads": None, "attention": "latent", "latent_norm": "rmsnorm"}
KINDS = {
    "gpt2": {},
    "paper": {"activation": "relu", "qkv_bias": False, "tied": False, "head_bias": True, "head_dim": 5},
    "llama": LLAMA,
    "nanochat": LLAMA | {"activation": "relu2", "gated": False, "qk_norm": "rmsnorm", "head_cap": 3.0, "soft_cap": 2.0},
    "deepseek": DEEPSEEK | {"kv_rank": 5, "query_rank": 7, "rotary_width": 6, "value_dim": 3},
}


ROUNDING = 1e-5  # relative to the largest logit: about 10 epsilons per layer, for sums of up to 20 products


def build(**other):
    return fill_weights(lambda: models.build("gpt", **TINY | other, rngs=nnx.Rngs(0)))


def check_close(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


def compute_logits(model, *inputs):
    return np.asarray(nnx.jit(lambda m, *a: m(*a)[0])(model, *map(jnp.asarray, inputs)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_later_tokens(kind, rng):
    model, tokens = build(**KINDS[kind]), rng.integers(13, size=(1, 11))
    rows = np.repeat(tokens, 12, axis=0)
    for position in range(11):
        rows[position, position] = (rows[position, position] + 1 + rng.integers(11)) % 13
    *changed, plain = compute_logits(model, rows)
    for position, row in enumerate(changed):  # kernels may round the last rows of a batch differently
        np.testing.assert_allclose(row[:position], plain[:position], rtol=0, atol=ROUNDING * np.abs(plain).max())
        assert (np.abs(row[position:] - plain[position:]).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_cached_logits_match_full_sequence(kind, rng):
    """Both token by token and in larger pieces."""
    model, tokens = build(**KINDS[kind]), jnp.asarray(rng.integers(13, size=(2, 11)))
    expected, extend = compute_logits(model, tokens), nnx.jit(lambda m, *a: m.extend(*a))
    for pieces in ([1] * 11, [5, 1, 1, 4]):
        cache, offset = model.empty_cache(2, 11), 0
        for size in pieces:
            result, cache = extend(model, tokens[:, offset : offset + size], cache, jnp.int32(offset))
            offset += size
            check_close(result, expected[:, offset - 1])
    assert np.abs(expected[:, 1:] - expected[:, :-1]).max() > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "llama", "deepseek"])
def test_packed_documents_match_single_documents(kind, rng):
    model = build(**KINDS[kind], packed=True)
    lengths, tokens = (4, 1, 5), rng.integers(13, size=(1, 11))
    segments = np.repeat([[1, 2, 3, 0]], [*lengths, 1], axis=1)
    result, unpacked = compute_logits(model, tokens, segments), compute_logits(model, tokens)
    start = 0
    for length in lengths:
        single = compute_logits(model, tokens[:, start : start + length], np.ones((1, length), np.int32))
        check_close(result[:, start : start + length], single)
        start += length
    # As a single document the logits would differ.
    assert np.abs(result[:, 4:10] - unpacked[:, 4:10]).min(axis=-1).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_logits_from_hidden_states_and_unembedding(kind, rng):
    model, tokens = build(**KINDS[kind]), jnp.asarray(rng.integers(13, size=(2, 7)))
    kernel, bias = model.unembedding()
    result = model.hidden(tokens)[0] @ kernel + (0 if bias is None else bias[None, None])
    cap = KINDS[kind].get("head_cap")
    result = result if cap is None else cap * jnp.tanh(result / cap)
    check_close(result, compute_logits(model, tokens))
    if cap:
        assert np.abs(result).max() < cap


def test_dropout_acts_in_training_only(rng):
    model, tokens = build(dropout=0.5), jnp.asarray(rng.integers(13, size=(2, 7)))
    keys = jax.random.split(jax.random.key(0), 2)
    train = nnx.jit(lambda model, tokens, key: model(tokens, key=key)[0])
    first, repeated, other = (train(model, tokens, k) for k in (keys, keys, keys[::-1]))
    np.testing.assert_array_equal(first, repeated)
    assert np.abs(first - other).max() > 0.01 < np.abs(first - compute_logits(model, tokens)).max()


def test_invalid_values_are_refused(rng):
    with refuses(12, "model.max_length=11"):
        build()(jnp.zeros((1, 12), jnp.int32))
    with refuses(14, "model.max_length=11"):
        build().empty_cache(1, 14)
    with refuses('model.positions="sines"', "learned"):
        build(positions="sines")
    with refuses("model.head_bias=True", "model.tied=True"):
        build(head_bias=True)
    with refuses('model.attention="nystrom"', "causal"):
        build(attention="nystrom")
