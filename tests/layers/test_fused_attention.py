"""The fused kernel: arguments, odd numbers of tokens, and the devices and sizes that it supports.

cuDNN does not run on CPUs. Its surroundings are tested here with JAX's own attention of the same arguments in its
place; test_gpu_lowering checks that the compiled program contains the kernel.
"""

import functools
import itertools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import mentions, refuses
from random_weights import fill_weights

from leanformer import models
from leanformer.layers import attention, backends
from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.masks import Mask
from leanformer.layers.multihead import ClassAttention, MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.models.davit import WindowAttention
from tests.layers.test_masks import reference, run_attention
from tools.gpu.absent import Gpu, pretend_attached


CONFIGS = Path(__file__).parents[2] / "configs"
PAIRS = [(6, 8), (6, 7), (5, 7), (1, 197)]  # even, odd, and token counts of models
B, N, H = 2, 3, 8
WINDOWS = functools.partial(WindowAttention, window_size=5)  # 25 tokens
WIDEST = {"7.5": 0, "8.0": 128, "8.9": 128, "9.0": 256, "10.0": 128, "10.3": 128, "12.0": 128}
DEVICES = {name: Gpu(name) for name in WIDEST}


@pytest.fixture
def kernel_calls(monkeypatch):
    """Replace the kernel by JAX's own attention; return the list of its calls."""
    original, calls = jax.nn.dot_product_attention, []

    def call(q, k, v, *, key_value_seq_lengths, implementation, **options):
        calls.append((q.shape[1], k.shape[1], key_value_seq_lengths is not None, implementation))
        return original(q, k, v, key_value_seq_lengths=key_value_seq_lengths, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    return calls


def draw_arrays(rng, t, s):
    return [np.float32(rng.standard_normal((B, tokens, N, H))) for tokens in (t, s, s, t)]


def errors(q, k, v, g, lengths=None):
    """Return the largest error of output and gradients, relative to the largest number of an array if that is above 1.

    The gradient of one key is a sum over all queries.
    """
    t, s = q.shape[1], k.shape[1]
    valid = np.arange(s) < (np.full(B, s) if lengths is None else lengths)[:, None]
    expected = reference(q, k, v, g, np.broadcast_to(valid[:, None], (B, t, s)), H**-0.5)
    result = run_attention(
        q, k, v, g, mask=Mask(lengths=lengths if lengths is None else jnp.asarray(lengths)), backend="cudnn"
    )
    return [np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in zip(result, expected, strict=True)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("t", "s"), PAIRS)
def test_padding_to_even_lengths_does_not_change_results(rng, kernel_calls, t, s, masked):
    """For the output and the three gradients; if masked with one example of all keys and one of half of them."""
    lengths = np.array([s, (s + 1) // 2]) if masked else None
    assert max(errors(*draw_arrays(rng, t, s), lengths)) < 1e-5
    assert kernel_calls == [(t + t % 2, s + s % 2, masked or s % 2 == 1, "cudnn")]


def test_tolerance_detects_attention_to_the_added_token(rng, monkeypatch):
    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **_: original(q, k, v))
    for tokens in (7, 49, 197):
        assert min(errors(*draw_arrays(rng, tokens, tokens))) > 1e-4


@pytest.mark.parametrize("make", [MultiHeadAttention, pytest.param(ClassAttention, marks=pytest.mark.slow), WINDOWS])
def test_modules_pad_tokens_before_projection(rng, kernel_calls, monkeypatch, make):
    """Output, tapped arrays and gradients equal those without the kernel, and q, k and v themselves are not padded."""
    x = rng.standard_normal((B, 5, 5, 12) if make is WINDOWS else (B, 7, 12), np.float32)

    def run_module(backend):
        module = fill_weights(lambda: make(12, N, H, backend=backend, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(module)

        def loss(params, x):
            result = nnx.merge(graphdef, params)(x)
            return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(result)), result

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    expected = run_module("xla")
    shapes = []
    monkeypatch.setattr(attention, "_even", lambda y, even=attention._even: shapes.append(y.shape) or even(y))
    for a, b in zip(*map(jax.tree.leaves, (run_module("cudnn"), expected)), strict=True):  # sums over up to 2 x 25 x 24
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))
    assert len(kernel_calls) == 1 and kernel_calls[0][1:] == (26 if make is WINDOWS else 8, True, "cudnn")
    projected = [shape for shape in shapes if len(shape) == 4]
    assert all(tokens % 2 == 0 for _, tokens, *_ in projected if tokens > 1)  # except a single class token


def trace_gradient(device, t, s, h, dtype="bfloat16", lengths=None):
    """Trace the gradient as on that device; raise what JAX raises."""
    q, k, v = (jax.ShapeDtypeStruct((B, tokens, N, h), dtype) for tokens in (t, s, s))

    def loss(q, k, v, lengths):
        return attention.attend(q, k, v, mask=Mask(lengths=lengths), backend="cudnn").astype(jnp.float32).sum()

    with pretend_attached(device):
        return jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, v, lengths)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_kernels_chosen_by_resolve_can_be_traced(device):
    """Head dimensions on both sides of every bound; JAX traces the smallest and the largest supported one."""
    for dtype in ("float32", "float16", "bfloat16"):
        supported = []
        for h in (1, 7, 8, 12, 43, 44, 48, 64, 120, 124, 128, 132, 136, 248, 256, 264, 512):
            with pretend_attached(device):
                backend, reason = backends.resolve("auto", device=device, dtype=dtype, head_dim=h)
            assert backend in ("xla", "cudnn") and (backend == "cudnn") == (reason == backends.FITS)
            if backend == "cudnn":
                supported.append(h)
        widest = 0 if dtype == "float32" else WIDEST[device.compute_capability]
        assert supported == [h for h in (8, 48, 64, 120, 128, 136, 248, 256) if h <= widest]
    for h in {*supported[:1], *supported[-1:]}:
        trace_gradient(device, 1, 49, h)
        trace_gradient(device, 197, 196, h, lengths=jax.ShapeDtypeStruct((B,), jnp.int32))


@pytest.mark.parametrize(
    ("about", "parts"),
    [
        ({"head_dim": 64, "value_dim": 48}, (8, 256, 64, 48)),
        ({"head_dim": (64, 36)}, (8, 256, 36)),
        ({"head_dim": 64, "mask": ("keep",)}, (backends.UNSUPPORTED_PARTS["keep"],)),
        ({"head_dim": 64, "soft_cap": 2.0}, ("soft cap", 2.0)),
        ({"head_dim": 64, "dropout": 0.1}, ("dropout", 0.1)),
        ({"head_dim": 64, "device": jax.devices()[0]}, ("cpu",)),
        ({"head_dim": 64, "dtype": "float32"}, ("bfloat16", "float16", "float32")),
        ({"head_dim": 64, "device": DEVICES["7.5"]}, (8.0, 7.5)),
        ({"head_dim": 136, "device": DEVICES["8.0"]}, (8, 128, 136)),
    ],
)
def test_resolve_names_unsupported_sizes(about, parts):
    about = {"device": DEVICES["9.0"], "dtype": "bfloat16"} | about
    with pretend_attached(DEVICES["9.0"]):
        backend, reason = backends.resolve("auto", **about)
        assert backend == "xla" and mentions(reason, *parts), reason
        with refuses('model.backend="cudnn"', *parts):
            backends.resolve("cudnn", **about)


def test_resolve_refuses_too_old_cudnn():
    """If cuDNN is missing or too old, JAX itself raises an error when tracing."""
    with pretend_attached(DEVICES["10.3"], cudnn=90800):
        backend, reason = backends.resolve("auto", device=DEVICES["10.3"], dtype="bfloat16", head_dim=64)
    assert backend == "xla" and mentions(reason, 10.3, 9.11)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_attention_widths_include_every_head_dim_of_a_config(path):
    """Covers every key that ends in head_dim, except TNT's pixels, whose attention is never fused."""
    m = runpy.run_path(str(path))["get_config"]().model.to_dict()
    names = [name for name in m if name.endswith("head_dim") and name != "inner_head_dim" and m[name] is not None]
    # DaViT's channel attention has a matrix without a token axis.
    names = [name for name in names if name != "channel_head_dim"]
    widths = [m[name] if isinstance(m[name], tuple) else (m[name],) for name in names]
    assert set(itertools.chain(*widths)) == set(models.find_class(m["name"]).attention_widths(m)["head_dim"])


def test_stack_builds_lengths_once_outside_the_scan(rng, kernel_calls):
    x, config = np.float32(rng.standard_normal((B, 7, 12))), BlockConfig(12, mlp=MlpConfig(16))

    def block(rngs):
        return Block(MultiHeadAttention(12, N, H, backend="cudnn", rngs=rngs), config, rngs=rngs)

    graphdef, params = nnx.split(fill_weights(lambda: Stack(block, 3, remat="none", rngs=nnx.Rngs(0))))

    def run_stack(params, x):
        return nnx.merge(graphdef, params)(x)[0]

    (scan,) = (eqn for eqn in jax.make_jaxpr(run_stack)(params, x).eqns if eqn.primitive.name == "scan")
    in_scan = [eqn for eqn in scan.params["jaxpr"].eqns if [str(v.aval) for v in eqn.outvars] == [f"int32[{B}]"]]
    assert in_scan == [] and f"i32[{B}]" in str(jax.make_jaxpr(run_stack)(params, x))
