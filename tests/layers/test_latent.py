"""Latent attention: its formula in NumPy, and its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from leanformer import models
from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.latent import LatentAttention
from leanformer.layers.masks import Context, Mask
from leanformer.layers.stack import Stack
from tests.layers.test_formulas import randomise_parameters


B, T, D, N, H, V, R, Q, P, L = 2, 7, 13, 3, 5, 11, 8, 7, 4, 2
ROTARY = {"rotary": 100.0, "rotary_width": P}


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


def rotate_pairs(x, base):
    """Return x (B T n P) with its pairs of channels rotated as complex numbers."""
    half, xp = x.shape[-1] // 2, np if isinstance(x, np.ndarray) else jnp
    angles = np.arange(x.shape[1])[:, None, None] * base ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return xp.concatenate([pairs.real, pairs.imag], axis=-1)


def rms(x, scale):
    return x / (((x**2).mean(-1, keepdims=True) + 1e-6) ** 0.5) * scale


def compute_formula(p, x, base):
    """Return queries, keys and output, for NumPy or JAX arrays; without a base there are no rotary positions."""
    xp = np if isinstance(x, np.ndarray) else jnp
    latent = rms(x @ p["latent.kernel"], p["latent_norm.scale"])
    k, v = (xp.einsum("btr,rnh->btnh", latent, p[f"{name}_up.kernel"]) for name in ("key", "value"))
    if "query.kernel" in p:
        q = xp.einsum("btd,dnh->btnh", x, p["query.kernel"])
    else:
        q = rms(x @ p["query_latent.kernel"], p["query_norm.scale"])
        q = xp.einsum("btr,rnh->btnh", q, p["query_up.kernel"])
    if base:
        rotary_keys = rotate_pairs((x @ p["turned.kernel"])[:, :, None], base)
        q = xp.concatenate([q[..., :H], rotate_pairs(q[..., H:], base)], axis=-1)
        k = xp.concatenate([k, xp.repeat(rotary_keys, N, axis=2)], axis=-1)
    logits = xp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = xp.exp(logits - logits.max(-1, keepdims=True)) * np.tri(T)
    out = xp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    return q, k, xp.einsum("btnh,nhd->btd", out, p["out.kernel"]) + p["out.bias"]


CASES = [(query_rank, rotary) for query_rank in (None, Q) for rotary in ({}, ROTARY)]


def make_attention(query_rank, rotary, rng, **other):
    options = {"kv_rank": R, "query_rank": query_rank, "latent_norm": "rmsnorm", "qkv_bias": False} | rotary | other
    return randomise_parameters(nnx.eval_shape(lambda: LatentAttention(D, N, H, V, **options, rngs=nnx.Rngs(0))), rng)


@pytest.mark.parametrize(("query_rank", "rotary"), CASES)
def test_output_and_parameter_count_match_formula(x, rng, query_rank, rotary):
    module, p = make_attention(query_rank, rotary, rng)
    width = H + (P if rotary else 0)
    q, k, expected = compute_formula(p, np.float64(x), rotary.get("rotary"))
    assert q.shape == k.shape == (B, T, N, width)
    result, arrays, _ = nnx.jit(lambda module, x: module(x, Context(mask=Mask(causal=True))))(module, x)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(arrays["k"], k, rtol=0, atol=2e-6 * np.abs(k).max())
    sizes = D * R + R + R * N * (H + V) + N * V * D + D + (D * P if rotary else 0)
    sizes += D * N * width if query_rank is None else D * Q + Q + Q * N * width
    assert sum(leaf.size for leaf in p.values()) == sizes


FAST = [pytest.param(*case, marks=[pytest.mark.slow] * (case != (Q, ROTARY))) for case in CASES]  # the others do less


@pytest.mark.parametrize(("query_rank", "rotary"), FAST)
def test_gradients_match_formula(rng, query_rank, rotary):
    """In float64, for the tokens and every parameter; another rotary base gives other gradients."""
    base = rotary.get("rotary")
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        module, p = make_attention(query_rank, rotary, rng, dtype=jnp.float64)
        graphdef, shapes = nnx.split(module)
        p, x = {name: jnp.asarray(leaf / 2) for name, leaf in p.items()}, jnp.asarray(rng.standard_normal((B, T, D)))

        def module_loss(p, x):
            module = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(shapes), list(p.values())))
            return jnp.sin(module(x, Context(mask=Mask(causal=True)))[0]).sum()

        def formula_loss(p, x, base=base):
            return jnp.sin(compute_formula(p, x, base)[2]).sum()

        def gradients(function):
            return jax.jit(jax.grad(function, (0, 1)))(p, x)

        result, expected = gradients(module_loss), gradients(formula_loss)
        other = gradients(lambda p, x: formula_loss(p, x, base and base * 1.001))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert a.dtype == np.float64 and np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * largest)
    assert not rotary or np.abs(other[1] - expected[1]).max() > 1e-7 * largest


def test_cache_holds_latents():
    def block(rngs):
        attention = LatentAttention(D, N, H, V, kv_rank=R, **ROTARY, rngs=rngs)
        return Block(attention, BlockConfig(D, mlp=MlpConfig(17)), rngs=rngs)

    stack = nnx.eval_shape(lambda: Stack(block, L, rngs=nnx.Rngs(3)))
    shapes = jax.tree.map(jnp.shape, stack.empty_cache(B, T + 2))
    assert shapes == {"latent": (L, B, T + 2, R), "turned": (L, B, T + 2, P)}


VIT = {"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3, "width": D, "depth": 2, "mlp_dim": 19}
VIT |= {"num_heads": N, "head_dim": H, "attention": "latent"}


def test_vit_with_latent_attention_from_config():
    model = nnx.eval_shape(lambda: models.build("vit", **VIT, kv_rank=R, **ROTARY, rngs=nnx.Rngs(0)))
    assert nnx.eval_shape(lambda model: model(jnp.ones((1, 8, 8, 1)))[0], model).shape == (1, 3)
    widths = models.find_class("vit").attention_widths(VIT | {"kv_rank": R} | ROTARY)
    assert widths == {"head_dim": (H + P,), "value_dim": (H,)}
