"""Grouped heads, logit scale, processed queries and keys, and cached decoding, against explicit attention."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import conditioning, models
from leanformer.layers import model_base
from leanformer.layers.attention import probabilities
from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.masks import Context, Mask
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.models.nystromformer import Model as Nystromformer
from leanformer.models.xcit import Model as Xcit


B, T, D, N, K, H, V, L = 2, 7, 13, 6, 2, 4, 5, 3


def make_attention(**arguments):
    return fill_weights(lambda: MultiHeadAttention(D, N, H, V, rngs=nnx.Rngs(0), **arguments))


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


def test_key_heads_are_shared_by_neighbouring_heads(x):
    """A module with all heads, whose keys and values are copies of the shared ones, computes the same."""
    shared, plain = make_attention(num_kv_heads=K, logit_scale=0.3), make_attention(logit_scale=0.3)
    assert shared.key.kernel.shape == (D, K, H) and shared.value.kernel.shape == (D, K, V)
    for name in ("query", "key", "value", "out"):
        for leaf in ("kernel", "bias"):
            copy, axis = getattr(getattr(shared, name), leaf)[...], 1 if leaf == "kernel" else 0
            if name in ("key", "value"):
                copy = jnp.repeat(copy, N // K, axis=axis)
            getattr(getattr(plain, name), leaf)[...] = copy
    (result, arrays, _), (expected, *_) = shared(x), plain(x)
    eps = np.finfo(np.float32).eps  # the same sums in another order
    np.testing.assert_allclose(result, expected, rtol=0, atol=32 * eps * np.abs(expected).max())
    np.testing.assert_allclose(  # the tapped q includes the scale
        probabilities(arrays["q"], arrays["k"]),
        jax.nn.softmax(0.3 * jnp.einsum("btnh,bsnh->bnts", shared.query(x), jnp.repeat(shared.key(x), N // K, 2))),
        atol=1e-5,  # of logits of about 3
    )
    entropy = conditioning.tap(["attention_entropy"])(arrays)["attention_entropy"].value
    assert entropy.shape == (B, N) and not np.allclose(entropy, np.log(T), rtol=1e-6)


def test_weight_measures_of_shared_heads_match_copied_heads():
    def params(kv):
        shape = {"query": (N, H), "key": (kv, H), "value": (kv, V)}
        rng = np.random.default_rng(0)
        kernels = {n: np.float32(rng.standard_normal((1, D, K if n != "query" else N, s[1]))) for n, s in shape.items()}
        kernels = {n: np.repeat(x, shape[n][0] // x.shape[2], axis=2) for n, x in kernels.items()}
        kernels["out"] = np.float32(rng.standard_normal((1, N, V, D)))
        return {"s": {"attention": {name: {"kernel": x} for name, x in kernels.items()}}}

    names = ["query_key_product", "value_output_product"]
    result, expected = (conditioning.weights(params(kv), names)["s"] for kv in (K, N))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)
    assert result["query_key_product"].condition_number.shape == (1, N)


@pytest.fixture
def stack():
    def block(rngs):
        attention = MultiHeadAttention(D, N, H, V, num_kv_heads=K, rotary=100.0, rngs=rngs)
        return Block(attention, BlockConfig(D, mlp=MlpConfig(17)), rngs=rngs)

    return fill_weights(lambda: Stack(block, L, rngs=nnx.Rngs(3)))


def test_cached_decoding_matches_full_sequence(stack, x):
    graphdef, params = nnx.split(stack)

    @jax.jit
    def step(x, cache, first, positions=None):
        context = Context(mask=Mask(causal=True, offset=first), cache=cache, positions=positions)
        return nnx.merge(graphdef, params)(x, context)

    def decode(pieces, extra_offset=0, positions=None):
        cache, parts, first = stack.empty_cache(B, T + 4), [], 0
        for piece in pieces:
            y, taps, cache = step(x[:, first : first + piece], cache, first + extra_offset, positions)
            assert taps is None
            parts, first = [*parts, y], first + piece
        return jnp.concatenate(parts, axis=1), cache

    full, _ = stack(x, Context(mask=Mask(causal=True)))
    for pieces in ((1,) * T, (4, 1, 2)):
        result, cache = decode(pieces)
        np.testing.assert_allclose(result, full, rtol=0, atol=1e-5 * np.abs(full).max())
    assert jax.tree.map(jnp.shape, cache) == {"k": (L, B, T + 4, K, H), "v": (L, B, T + 4, K, V)}
    assert not any(jnp.any(array[:, :, T:]) for array in cache.values())
    # The tolerance detects one key too many at the start, and positions that are all 0.
    for wrong in ({"extra_offset": 1}, {"positions": jnp.zeros(1, int)}):
        assert np.abs(decode((1,) * T, **wrong)[0] - full).max() > 0.1


def test_cache_requires_causal_mask_with_offset(stack, x):
    cache = stack.empty_cache(B, T)
    for mask in (Mask(), Mask(causal=True), Mask(offset=0)):
        with refuses("causal", "offset", error=ValueError):
            stack(x, Context(mask=mask, cache=cache))
    with refuses("cache", "tap", error=ValueError):
        stack(x, Context(mask=Mask(causal=True, offset=0), cache=cache, tap=dict))


VIT = {"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3, "width": D, "depth": 2, "mlp_dim": 19}
VIT |= {"num_heads": N, "head_dim": H}


def test_num_kv_heads_and_logit_scale_are_set_by_config():
    model = nnx.eval_shape(lambda: models.build("vit", **VIT, num_kv_heads=3, logit_scale=0.25, rngs=nnx.Rngs(0)))
    assert model.blocks.layers.attention.key.kernel.shape == (2, D, 3, H)
    assert nnx.eval_shape(lambda model: model(jnp.ones((1, 8, 8, 1)))[0], model).shape == (1, 3)
    for changes, *parts in (
        ({"num_kv_heads": "2"}, "model.num_kv_heads='2'"),
        ({"num_kv_heads": 2, "attention": "nystrom"}, "model.num_kv_heads=2", 'model.attention="nystrom"'),
    ):
        with refuses(*parts):
            models.check("vit", **VIT | changes)
    with refuses("model.num_kv_heads=4", 1, 2, 3, 6):
        make_attention(num_kv_heads=4)


def test_attention_must_support_the_masks_of_the_architecture(monkeypatch):
    sizes = {"vocabulary": 3, "max_length": 9, "num_classes": 2, "width": 5, "depth": 1, "num_heads": 2, "head_dim": 3}
    models.check("nystromformer", **sizes, mlp_dim=4, zero_is_padding=True)
    monkeypatch.setattr(Nystromformer, "mask_parts", lambda arguments: ("causal",))
    with refuses('model.attention="nystrom"', "causal", "lengths, keep"):
        models.check("nystromformer", **sizes, mlp_dim=4)
    models.check("nystromformer", **sizes, mlp_dim=4, attention="softmax")


def test_attention_types_accept_their_declared_options():
    """Constructs every type with all options that it declares."""
    values = {int: 3, float: 0.5, bool: True}
    for kind in {**Xcit.attentions, **model_base.ATTENTIONS}.values():
        types = {option: next((x for x in get_args(t) if x in values), None) for option, t in kind.options.items()}
        arguments = {option: values[x] for option, x in types.items() if x is not None}
        arguments |= {name: x for name, x in {"rotary": 100.0, "rotary_width": 2}.items() if name in arguments}
        nnx.eval_shape(lambda kind=kind, arguments=arguments: kind(D, N, H, **arguments, rngs=nnx.Rngs(0)))
