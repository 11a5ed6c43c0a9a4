"""GPT and BERT: visible tokens, packed rows, padding, cache, dropout and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_weights import fill_weights

from leanformer import models
from leanformer.layers.positions import sinusoidal_embeddings


TINY = {"vocabulary": 13, "max_length": 11, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
LLAMA = {"norm": "rmsnorm", "activation": "silu", "gated": True, "mlp_bias": False, "qkv_bias": False}
LLAMA |= {"out_bias": False, "positions": "none", "rotary": 100.0, "num_kv_heads": 1, "tied": False}
DEEPSEEK = LLAMA | {"num_kv_heads": None, "attention": "latent", "latent_norm": "rmsnorm"}
GPTS = {
    "gpt2": {},
    "paper": {"activation": "relu", "qkv_bias": False, "tied": False, "head_bias": True, "head_dim": 5},
    "llama": LLAMA,
    "nanochat": LLAMA | {"activation": "relu2", "gated": False, "qk_norm": "rmsnorm", "head_cap": 3.0, "soft_cap": 2.0},
    "deepseek": DEEPSEEK | {"kv_rank": 5, "query_rank": 7, "rotary_width": 6, "value_dim": 3},
}
CRAMMED = {"positions": "sinusoidal", "post_norm": False, "gated": True, "mlp_bias": False, "qkv_bias": False}
CRAMMED |= {"out_bias": False}
BERTS = {
    "bert": {"types": 2, "transform": True, "head_bias": True},
    "crammed": CRAMMED,
    "rotary": CRAMMED | {"positions": "none", "rotary": 100.0, "norm": "rmsnorm"},
}
HEADS = {"bert": {"pooler_dim": 7}, "crammed": {"pool": "mean"}}  # of classifiers
LENGTHS = np.array([4, 11, 7])
ROUNDING = 1e-5  # relative to the largest output: about 10 epsilons per layer, for sums of up to 20 products


def build(kind, **other):
    family, options = ("gpt", GPTS[kind]) if kind in GPTS else ("bert", BERTS[kind])
    return fill_weights(lambda: models.build(family, **TINY | options | other, rngs=nnx.Rngs(0)))


def build_classifier(kind):
    return build(kind, transform=False, head_bias=False, num_classes=3, **HEADS[kind])


def check_close(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


def run(model, tokens, **inputs):
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
    return np.asarray(nnx.jit(lambda m, tokens, inputs: m(tokens, **inputs)[0])(model, jnp.asarray(tokens), inputs))


@pytest.fixture
def tokens(rng):
    return rng.integers(13, size=(3, 11))


@pytest.mark.parametrize("kind", ["gpt2", "paper", "bert"])
def test_logits_are_not_rounded_to_bfloat16(kind, tokens):
    """Rounded, several tokens would have the largest logit."""
    logits = run(build(kind, dtype=jnp.bfloat16), tokens)
    assert logits.dtype == np.float32 and np.mean(logits == logits.astype(jnp.bfloat16)) < 0.1


@pytest.mark.parametrize("kind", [*GPTS, *BERTS])
def test_every_token_sees_those_before_it_and_in_bert_all(kind, rng, tokens):
    rows = np.repeat(tokens[:1], 12, axis=0)
    for position in range(11):
        rows[position, position] = (rows[position, position] + 1 + rng.integers(11)) % 13
    *changed, plain = run(build(kind), rows)
    for position, row in enumerate(changed):  # kernels may round the last rows of a batch differently
        first = position if kind in GPTS else 0
        np.testing.assert_allclose(row[:first], plain[:first], rtol=0, atol=ROUNDING * np.abs(plain).max())
        assert (np.abs(row[first:] - plain[first:]).max(axis=-1) > 1e-4).all()


CACHED = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("nanochat", "deepseek"))) for kind in GPTS]


@pytest.mark.parametrize("kind", CACHED)
def test_cached_logits_match_full_sequence(kind, tokens):
    """Both token by token and in larger pieces."""
    model = build(kind)
    expected, extend = run(model, tokens), nnx.jit(lambda m, *a: m.extend(*a))
    for pieces in ([1] * 11, [5, 1, 1, 4]):
        cache, offset = model.empty_cache(3, 11), 0
        for size in pieces:
            result, cache = extend(model, jnp.asarray(tokens[:, offset : offset + size]), cache, jnp.int32(offset))
            offset += size
            check_close(result, expected[:, offset - 1])
    assert np.abs(expected[:, 1:] - expected[:, :-1]).max() > 0.1


REPEATS = ("llama", "deepseek", "bert", "crammed")  # the others have learned and rotary positions, which both restart
PACKED = [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind in REPEATS)) for kind in ("gpt2", "llama", "deepseek", *BERTS)
]


@pytest.mark.parametrize("kind", PACKED)
def test_packed_documents_match_single_documents(kind, tokens):
    model, row, lengths = build(kind, packed=True), tokens[:1], (4, 1, 5)
    segments = np.repeat([[1, 2, 3, 0]], [*lengths, 1], axis=1)
    result, start = run(model, row, segments=segments), 0
    for length in lengths:
        single = run(model, row[:, start : start + length], segments=np.ones((1, length), np.int32))
        check_close(result[:, start : start + length], single)
        start += length
    # As a single document the logits would differ.
    assert np.abs(result[:, 4:10] - run(model, row)[:, 4:10]).min(axis=-1).max() > 1e-2


@pytest.mark.parametrize("kind", ["gpt2", "paper", "nanochat", "bert"])
def test_logits_from_hidden_states_and_unembedding(kind, tokens):
    """Also at a subset of positions, as for masked tokens."""
    model, cap = build(kind), GPTS.get(kind, {}).get("head_cap")
    kernel, bias = model.unembedding()
    hidden = jax.jit(lambda tokens: model.hidden(tokens)[0])(jnp.asarray(tokens))[:, 2:4]
    hidden = model.decoded(hidden) if kind in BERTS else hidden
    result = hidden @ kernel + (0 if bias is None else bias[None, None])
    result = result if cap is None else cap * jnp.tanh(result / cap)
    check_close(result, run(model, tokens)[:, 2:4])


@pytest.mark.parametrize("kind", HEADS)
def test_classifier_ignores_padding(kind, tokens):
    model = build_classifier(kind)
    result = run(model, tokens, lengths=LENGTHS)
    hidden = jax.jit(lambda *inputs: model.hidden(*inputs)[0])
    x = np.asarray(hidden(jnp.asarray(tokens), jnp.asarray(LENGTHS)), np.float64)
    if kind == "bert":
        pooled = np.tanh(x[:, 0] @ np.asarray(model.pooler.kernel[...]) + np.asarray(model.pooler.bias[...]))
    else:
        pooled = np.stack([row[:length].mean(axis=0) for row, length in zip(x, LENGTHS, strict=True)])
    check_close(result, pooled @ np.asarray(model.head.kernel[...]) + np.asarray(model.head.bias[...]))
    check_close(result[0], run(model, tokens[:1, : LENGTHS[0]])[0])


def test_sinusoidal_embeddings_match_formula():
    result = np.asarray(sinusoidal_embeddings(jnp.asarray([[0, 3, 127]]), 7), np.float64)[0]
    for row, position in zip(result, (0, 3, 127), strict=True):
        for channel in range(7):
            angle = position / 10_000 ** (2 * (channel // 2) / 7)
            assert row[channel] == pytest.approx((np.sin, np.cos)[channel % 2](angle), abs=1e-5)
    scale = jax.jit(lambda: models.build("bert", **TINY | CRAMMED, rngs=nnx.Rngs(0)).pos_scale[...])()
    assert float(scale) == pytest.approx(12**-0.5)


def test_dropout_before_the_classifier(tokens):
    """Half of the pooled features are dropped and the rest doubled; nothing else is dropped."""
    model = build_classifier("crammed")
    model.embed_norm.scale[...], model.embed_norm.bias[...] = jnp.zeros(12), jnp.zeros(12)  # dropout leaves zeros
    model.head.kernel[...], model.head.bias[...] = jnp.eye(12)[:, :3], jnp.zeros(3)
    plain = run(model, tokens)
    model.dropout = 0.5
    result = run(model, tokens, key=jax.random.split(jax.random.key(3), 3))
    assert set(np.round(result / plain, 4).ravel().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("kind", ["gpt2", "crammed"])
def test_dropout_acts_in_training_only(kind, tokens):
    model, keys = build(kind, dropout=0.5), jax.random.split(jax.random.key(0), 3)
    first, repeated, other = (run(model, tokens, key=key) for key in (keys, keys, keys[::-1]))
    np.testing.assert_array_equal(first, repeated)
    assert np.abs(first - other).max() > 0.01 < np.abs(first - run(model, tokens)).max()
