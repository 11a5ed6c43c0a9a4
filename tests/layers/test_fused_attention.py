"""The fused kernel: arguments, odd numbers of tokens, and the devices and sizes that it supports.

cuDNN itself is on no CPU. What surrounds it is worked out here with JAX's own attention of the same arguments in its
place; that the program holds the kernel is test_gpu_lowering's to show.
"""

import functools
import itertools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from flax import nnx
from messages import mentions, refuses

from leanformer import models
from leanformer.layers import attention, backends
from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.masks import Mask
from leanformer.layers.mlp import MlpConfig
from leanformer.layers.multihead import ClassAttention, MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.models.davit import WindowAttention
from leanformer.runtime import target


CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS = (1, 2, 49, 196)
PAIRS = [(6, 8), (6, 7), (7, 6), (5, 7), (1, 197), (197, 197)]  # even and odd, and what models have
B, N, H = 2, 3, 8
WINDOWS = functools.partial(WindowAttention, window_size=5)  # 25 tokens
WIDEST = {"7.5": 0, "8.0": 128, "8.9": 128, "9.0": 256, "10.0": 128, "10.3": 128, "12.0": 128}
DEVICES = {name: target.Gpu(name) for name in WIDEST}


@pytest.fixture
def stand_in(monkeypatch):
    """JAX's own attention in the kernel's place; what it was asked for."""
    real, asked = jax.nn.dot_product_attention, []

    def call(q, k, v, *, key_value_seq_lengths, implementation, **others):
        asked.append((q.shape[1], k.shape[1], key_value_seq_lengths is not None, implementation))
        return real(q, k, v, key_value_seq_lengths=key_value_seq_lengths, **others)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    return asked


def reference(q, k, v, kept, g):
    """Attention and its three gradients for a cotangent g, in float64; `kept` (B S) are the keys that count."""
    logits = np.where(kept[:, None, None], np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    by_weights = np.einsum("btnh,bsnh->bnts", g, v)
    by_logits = weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)) / np.sqrt(H)
    by_q, by_k = np.einsum("bnts,bsnh->btnh", by_logits, k), np.einsum("bnts,btnh->bsnh", by_logits, q)
    return np.einsum("bnts,bsnh->btnh", weights, v), by_q, by_k, np.einsum("bnts,btnh->bsnh", weights, g)


def found(q, k, v, g, *, lengths=None, backend="cudnn"):
    """The same of `attend`."""

    @jax.jit
    def both(q, k, v, g, lengths):
        out, pull = jax.vjp(lambda *x: attention.attend(*x, mask=Mask(lengths=lengths), backend=backend), q, k, v)
        return out, *pull(g)

    return both(q, k, v, g, lengths)


def drawn(rng, t, s):
    return [np.float32(rng.standard_normal((B, tokens, N, H))) for tokens in (t, s, s, t)]


def worst(ours, theirs):
    """Of the largest number of each array, or of 1: a gradient of one key is a sum over all queries."""
    return max(np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("t", "s"), PAIRS)
def test_padding_to_even_numbers_changes_nothing(rng, stand_in, t, s):
    """Forward and the three gradients, one example with every key and one with half of them."""
    q, k, v, g = drawn(rng, t, s)
    lengths = np.array([s, (s + 1) // 2])
    expected = reference(q, k, v, np.arange(s) < lengths[:, None], g)
    assert worst(found(q, k, v, g, lengths=lengths), expected) < 1e-5
    assert stand_in == [(t + t % 2, s + s % 2, True, "cudnn")]


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize(("t", "s"), [(6, 6), (7, 7), (1, 7), (7, 1)])
def test_every_backend_agrees_where_all_keys_count(rng, stand_in, backend, t, s):
    q, k, v, g = drawn(rng, t, s)
    assert worst(found(q, k, v, g, backend=backend), reference(q, k, v, np.ones((B, s), bool), g)) < 1e-5
    assert backend != "cudnn" or stand_in == [(t + t % 2, s + s % 2, s % 2 == 1, "cudnn")]


def test_the_tolerance_would_see_a_query_that_looks_at_the_added_token(rng, monkeypatch):
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **_: real(q, k, v))
    for tokens in (7, 49, 197):
        q, k, v, g = drawn(rng, tokens, tokens)
        expected = reference(q, k, v, np.ones((B, tokens), bool), g)
        assert min(worst([a], [b]) for a, b in zip(found(q, k, v, g), expected, strict=True)) > 1e-4


@pytest.mark.parametrize("make", [MultiHeadAttention, ClassAttention, WINDOWS])
def test_modules_have_an_even_number_of_tokens_before_they_project(rng, stand_in, monkeypatch, make):
    """The same output, arrays for a tap and gradients as without the kernel, and nothing of q, k, v is ever padded."""
    x = rng.standard_normal((B, 5, 5, 12) if make is WINDOWS else (B, 7, 12), np.float32)

    def of(backend):
        module = filled(lambda: make(12, N, H, backend=backend, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(module)

        def loss(params, x):
            result = nnx.merge(graphdef, params)(x)
            return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(result)), result

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    expected = of("xla")
    keys = []
    monkeypatch.setattr(attention, "_even", lambda y, even=attention._even: keys.append(y.shape) or even(y))
    for a, b in zip(*map(jax.tree.leaves, (of("cudnn"), expected)), strict=True):  # sums over up to 2 x 25 x 24
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))
    assert len(stand_in) == 1 and stand_in[0][1:] == (26 if make is WINDOWS else 8, True, "cudnn")
    projected = [shape for shape in keys if len(shape) == 4]
    assert all(tokens % 2 == 0 for _, tokens, *_ in projected if tokens > 1)  # one class token apart


def traces(device, t, s, h, dtype="bfloat16", lengths=None):
    """Traces the gradient as the device would see it; raises what JAX raises."""
    q, k, v = (jax.ShapeDtypeStruct((B, tokens, N, h), dtype) for tokens in (t, s, s))

    def loss(q, k, v, lengths):
        return attention.attend(q, k, v, mask=Mask(lengths=lengths), backend="cudnn").astype(jnp.float32).sum()

    with target.pretend_attached(device):
        return jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, v, lengths)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_that_resolve_chooses_can_be_traced(device, dtype):
    """Widths on both sides of every bound, and pairs of numbers of tokens with the narrowest and the widest."""
    promised = []
    for h in (1, 7, 8, 12, 43, 44, 48, 64, 120, 124, 128, 132, 136, 248, 256, 264, 512):
        answer, reason = backends.resolve("auto", device=device, dtype=dtype, head_dim=h)
        assert answer in ("xla", "cudnn") and (answer == "cudnn") == (reason == backends.FITS)
        if answer == "cudnn":
            promised.append(h)
    widest = 0 if dtype == "float32" else WIDEST[device.compute_capability]
    assert promised == [h for h in (8, 48, 64, 120, 128, 136, 248, 256) if h <= widest]
    for (t, s), h in itertools.product(((1, 49), (196, 196), (197, 196)), {*promised[:1], *promised[-1:]}):
        traces(device, t, s, h, dtype)
        traces(device, t, s, h, dtype, lengths=jax.ShapeDtypeStruct((B,), jnp.int32))


@pytest.mark.parametrize(
    ("about", "parts"),
    [
        ({"head_dim": 64, "value_dim": 48}, (8, 256, 64, 48)),
        ({"head_dim": (64, 36)}, (8, 256, 36)),
        ({"head_dim": 64, "mask": ("keep",)}, (backends.mask_obstacle(("keep",)),)),
        ({"head_dim": 64, "dtype": "float32"}, ("bfloat16", "float16", "float32")),
        ({"head_dim": 64, "device": DEVICES["7.5"]}, (8.0, 7.5)),
        ({"head_dim": 136, "device": DEVICES["8.0"]}, (8, 128, 136)),
    ],
)
def test_resolve_refuses_unsupported_sizes_by_name(about, parts):
    about = {"device": DEVICES["9.0"], "dtype": "bfloat16"} | about
    backend, reason = backends.resolve("auto", **about)
    assert backend == "xla" and mentions(reason, *parts), reason
    with refuses('model.backend="cudnn"', *parts):
        backends.resolve("cudnn", **about)


def test_resolve_refuses_what_jax_refuses(monkeypatch):
    """Where the library is missing or too old, JAX itself says so, when it traces."""
    monkeypatch.setattr(target, "CUDNN", 90800)
    backend, reason = backends.resolve("auto", device=DEVICES["10.3"], dtype="bfloat16", head_dim=64)
    assert backend == "xla" and mentions(reason, 10.3, 9.11)


def test_odd_numbers_of_tokens_are_refused_without_the_remedy(monkeypatch):
    """When JAX takes them the added token can go, and this says so."""
    monkeypatch.setattr(attention, "_even", lambda x: x)
    for t, s in itertools.product(TOKENS, TOKENS):
        if t % 2 or s % 2:
            with refuses(f"Q {t}", f"KV {s}", error=NotImplementedError):
                traces(DEVICES["9.0"], t, s, 64)
        else:
            traces(DEVICES["9.0"], t, s, 64)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_the_widths_of_every_config_are_asked_about(path):
    """All widths under a name that ends in head_dim, TNT's pixels apart, whose attention is never fused."""
    m = runpy.run_path(str(path))["get_config"]().model.to_dict()
    names = [name for name in m if name.endswith("head_dim") and name != "inner_head_dim" and m[name] is not None]
    names = [name for name in names if name != "channel_head_dim"]  # DaViT's, whose matrix has no tokens
    widths = [m[name] if isinstance(m[name], tuple) else (m[name],) for name in names]
    assert set(itertools.chain(*widths)) == set(models.find_class(m["name"]).attention_widths(m)["head_dim"])


def test_a_stack_makes_lengths_once_for_all_its_layers(rng, stand_in):
    """Outside of the scan; the same output and gradients as one layer after the other."""
    x, config = np.float32(rng.standard_normal((B, 7, 12))), BlockConfig(12, mlp=MlpConfig(16))

    def block(rngs):
        return Block(MultiHeadAttention(12, N, H, backend="cudnn", rngs=rngs), config, rngs=rngs)

    stack = filled(lambda: Stack(block, 3, remat="none", rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(stack)

    def whole(params, x):
        return nnx.merge(graphdef, params)(x)[0]

    def one_by_one(params, x):
        layers = nnx.split(nnx.merge(graphdef, params).layers)
        for i in range(3):
            x, _, _ = nnx.merge(layers[0], jax.tree.map(lambda leaf, i=i: leaf[i], layers[1]))(x)
        return x

    def pulled(function):
        out, pull = jax.vjp(jax.jit(function), params, x)
        return out, *pull(jnp.sin(out))

    for a, b in zip(*map(jax.tree.leaves, map(pulled, (whole, one_by_one))), strict=True):  # three layers of rounding
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))
    (scan,) = (eqn for eqn in jax.make_jaxpr(whole)(params, x).eqns if eqn.primitive.name == "scan")
    made = [eqn for eqn in scan.params["jaxpr"].eqns if [str(v.aval) for v in eqn.outvars] == [f"int32[{B}]"]]
    assert made == [] and f"i32[{B}]" in str(jax.make_jaxpr(whole)(params, x))
