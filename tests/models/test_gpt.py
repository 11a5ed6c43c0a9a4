"""GPT: causality, options, parameter counts, packed rows and cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from flax import nnx
from messages import refuses

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


ROUNDING = 1e-5  # of the largest logit: some 10 epsilons a layer, of sums of up to 20 products


def build(**other):
    return filled(lambda: models.build("gpt", **TINY | other, rngs=nnx.Rngs(0)))


def check_close(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


def logits_of(model, *inputs):
    return np.asarray(nnx.jit(lambda m, *a: m(*a)[0])(model, *map(jnp.asarray, inputs)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_later_tokens(kind, rng):
    model, tokens = build(**KINDS[kind]), rng.integers(13, size=(1, 11))
    rows = np.repeat(tokens, 12, axis=0)
    for place in range(11):
        rows[place, place] = (rows[place, place] + 1 + rng.integers(11)) % 13
    *changed, plain = logits_of(model, rows)
    for place, row in enumerate(changed):  # rows of one batch: kernels may round its last rows otherwise
        np.testing.assert_allclose(row[:place], plain[:place], rtol=0, atol=ROUNDING * np.abs(plain).max())
        assert (np.abs(row[place:] - plain[place:]).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_logits_of_the_whole(kind, rng):
    """Token by token, and in pieces."""
    model, tokens = build(**KINDS[kind]), jnp.asarray(rng.integers(13, size=(2, 11)))
    wanted, extend = logits_of(model, tokens), nnx.jit(lambda m, *a: m.extend(*a))
    for pieces in ([1] * 11, [5, 1, 1, 4]):
        cache, offset = model.empty_cache(2, 11), 0
        for size in pieces:
            result, cache = extend(model, tokens[:, offset : offset + size], cache, jnp.int32(offset))
            offset += size
            check_close(result, wanted[:, offset - 1])
    assert np.abs(wanted[:, 1:] - wanted[:, :-1]).max() > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "llama", "deepseek"])
def test_packed_documents_are_as_one_by_one(kind, rng):
    model = build(**KINDS[kind], packed=True)
    lengths, tokens = (4, 1, 5), rng.integers(13, size=(1, 11))
    segments = np.repeat([[1, 2, 3, 0]], [*lengths, 1], axis=1)
    result, alone = logits_of(model, tokens, segments), logits_of(model, tokens)
    start = 0
    for length in lengths:
        own = logits_of(model, tokens[:, start : start + length], np.ones((1, length), np.int32))
        check_close(result[:, start : start + length], own)
        start += length
    assert np.abs(result[:, 4:10] - alone[:, 4:10]).min(axis=-1).max() > 1e-2  # one document would be another answer


@pytest.mark.parametrize("kind", KINDS)
def test_logits_from_hidden_states_and_unembedding(kind, rng):
    model, tokens = build(**KINDS[kind]), jnp.asarray(rng.integers(13, size=(2, 7)))
    kernel, bias = model.unembedding()
    result = model.hidden(tokens)[0] @ kernel + (0 if bias is None else bias[None, None])
    cap = KINDS[kind].get("head_cap")
    result = result if cap is None else cap * jnp.tanh(result / cap)
    check_close(result, logits_of(model, tokens))
    if cap:
        assert np.abs(result).max() < cap


def test_dropout_is_for_training_alone(rng):
    model, tokens = build(dropout=0.5), jnp.asarray(rng.integers(13, size=(2, 7)))
    keys = jax.random.split(jax.random.key(0), 2)
    trained = nnx.jit(lambda model, tokens, key: model(tokens, key=key)[0])
    first, again, other = (trained(model, tokens, k) for k in (keys, keys, keys[::-1]))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01 < np.abs(first - logits_of(model, tokens)).max()


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
