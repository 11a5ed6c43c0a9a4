"""Types of norms, MLPs, attention options and blocks, each against its formula in float64 NumPy."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx
from scipy.special import erf

from leanformer import conditioning
from leanformer.layers import norms
from leanformer.layers.blocks import ACTIVATIONS, Block, BlockConfig, Mlp, MlpConfig
from leanformer.layers.masks import Context, Mask
from leanformer.layers.model_base import ATTENTIONS
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.positions import rotate
from leanformer.models.xcit import Model as Xcit


B, T, D, N, K, H, F = 2, 7, 13, 6, 2, 10, 17
softmax = functools.partial(scipy.special.softmax, axis=-1)


NORMS = {
    "layernorm": lambda x, scale, bias: (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias
    ),
    "rmsnorm": lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale,
    "unit": lambda x, scale: x / np.linalg.norm(x, axis=-1, keepdims=True) * scale,
    "none": lambda x: x,
}
FUNCTIONS = {
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def randomise_parameters(module, rng):
    """Return the module with random values in all parameters, none at its initial value, and these by name."""
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) + 0.3, p.dtype), params)
    names = {jax.tree_util.keystr(path, simple=True, separator="."): p for path, p in jax.tree.leaves_with_path(params)}
    return nnx.merge(graphdef, params), {k.removesuffix(".value"): np.float64(p) for k, p in names.items()}


@pytest.fixture
def x(rng):
    return jnp.asarray(2 * rng.standard_normal((B, T, D)) + 1, jnp.float32)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_match_formulas(kind, x, rng):
    module, p = randomise_parameters(nnx.eval_shape(lambda: norms.make(kind, D)), rng)
    assert {name: v.shape for name, v in p.items()} == dict.fromkeys(p, () if kind == "unit" else (D,))
    np.testing.assert_allclose(module(x), NORMS[kind](np.float64(x), **p), rtol=0, atol=3e-6)
    assert NORMS.keys() == norms.NORMS.keys()
    gradient = jax.grad(lambda x: module(x).sum())(jnp.zeros((1, D)))
    assert np.isfinite(gradient).all()  # for padding, whose tokens are zeros


@pytest.mark.parametrize("kind", NORMS)
def test_norm_gradients_match_finite_differences(kind, x, rng):
    """Against central differences of the formula in float64, whose error is about 1e-9 here."""
    module, p = randomise_parameters(nnx.eval_shape(lambda: norms.make(kind, D)), rng)
    weights, points = rng.standard_normal(x.shape), {"x": np.float64(x), **p}
    graphdef, params = nnx.split(module)
    result = jax.grad(lambda params, x: jnp.sum(nnx.merge(graphdef, params)(x) * weights), (0, 1))(params, x)
    leaves = {"x": result[1]}
    for path, gradient in jax.tree.leaves_with_path(result[0]):
        leaves[jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")] = gradient
    assert leaves.keys() == points.keys()
    for name, point in points.items():
        expected = np.empty_like(point)
        for index in np.ndindex(point.shape):
            step = np.zeros_like(point)
            step[index] = 1e-6
            ends = [NORMS[kind](**points | {name: point + sign * step}) for sign in (1, -1)]
            expected[index] = np.sum((ends[0] - ends[1]) * weights) / 2e-6
        # Float32: sums of 13 terms over channels, and of 14 over tokens for parameters, each rounded by 6e-8.
        np.testing.assert_allclose(leaves[name], expected, rtol=0, atol=5e-6 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_mlps_match_formula(kind, gated, x, rng):
    options = {"activation": kind, "gated": gated, "mlp_bias": not gated}
    module, p = randomise_parameters(nnx.eval_shape(lambda: Mlp(D, MlpConfig(F, **options), rngs=nnx.Rngs(0))), rng)
    up, function = np.float64(x) @ p["up.kernel"] + p.get("up.bias", 0), FUNCTIONS[kind]
    hidden = function(np.float64(x) @ p["gate.kernel"]) * up if gated else function(up)
    result, tapped = module(x)
    np.testing.assert_allclose(tapped, hidden, rtol=1e-5, atol=1e-5)
    expected = hidden @ p["down.kernel"] + p.get("down.bias", 0)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert len(p) == (3 if gated else 4) and FUNCTIONS.keys() == ACTIVATIONS.keys()


def rotate_pairs(x, positions, base, width):
    """Return x with its pairs of channels rotated as complex numbers."""
    i = np.arange(width // 2)
    pairs = x[..., : width // 2] + 1j * x[..., width // 2 : width]
    pairs = pairs * np.exp(1j * np.float64(positions)[..., None, None] * base ** (-2 * i / width))
    return np.concatenate([pairs.real, pairs.imag, x[..., width:]], axis=-1)


@pytest.mark.parametrize("width", [None, 4])
def test_rotary_positions_match_complex_rotation(width, rng):
    x, positions = rng.standard_normal((B, T, N, H)), rng.integers(1000, size=(B, T))
    result = rotate(jnp.float32(x), jnp.asarray(positions), base=500.0, width=width)
    np.testing.assert_allclose(result, rotate_pairs(x, positions, 500.0, width or H), rtol=0, atol=3e-4)
    # The product of two rotated vectors depends only on the distance of their positions.
    q, k = (jnp.float32(rng.standard_normal((1, 1, 1, H))) for _ in range(2))

    def dot_product(*pair):
        return float(jnp.sum(rotate(q, jnp.array([pair[:1]])) * rotate(k, jnp.array([pair[1:]]))))

    assert (
        dot_product(3, 8) == pytest.approx(dot_product(40, 45), abs=1e-5) != pytest.approx(dot_product(3, 9), abs=1e-2)
    )


def make_attention(rng, **options):
    make = lambda: MultiHeadAttention(D, N, H, num_kv_heads=K, rngs=nnx.Rngs(0), **options)  # noqa: E731
    return randomise_parameters(nnx.eval_shape(make), rng)


OPTIONS = {
    "qk_norm": {"qk_norm": "rmsnorm"},
    "rotary": {"rotary": 300.0, "rotary_width": 6},
    "norm and rotary": {"qk_norm": "unit", "rotary": 300.0, "logit_scale": 3.0},
    "cap": {"soft_cap": 1.5},
    "all": {"qk_norm": "layernorm", "rotary": 77.0, "soft_cap": 0.7, "temperature": True, "out_bias": False},
}


@pytest.mark.parametrize(("case", "backend"), [*((case, "xla") for case in OPTIONS), ("all", "naive")])
def test_attention_matches_formula(case, backend, x, rng):
    options = OPTIONS[case]
    module, p = make_attention(rng, **options, backend=backend)
    heads = {}
    for name in ("query", "key", "value"):
        heads[name] = np.einsum("btd,dnh->btnh", np.float64(x), p[f"{name}.kernel"]) + p[f"{name}.bias"]
    for name in ("query", "key"):
        if "qk_norm" in options:
            prefix = f"process.{name}_norm."
            parameters = {k.removeprefix(prefix): v for k, v in p.items() if k.startswith(prefix)}
            heads[name] = NORMS[options["qk_norm"]](heads[name], **parameters)
        if "rotary" in options:
            heads[name] = rotate_pairs(heads[name], np.arange(T), options["rotary"], options.get("rotary_width", H))
    q, k, v = heads["query"], *(np.repeat(heads[name], N // K, axis=2) for name in ("key", "value"))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * options.get("logit_scale", H**-0.5)
    logits = logits * p.get("temperature", np.ones(N))[None, :, None, None]
    if cap := options.get("soft_cap"):
        logits = cap * np.tanh(logits / cap)
    visible = np.tril(np.ones((T, T), bool))
    out = np.einsum("bnts,bsnh->btnh", softmax(np.where(visible, logits, -np.inf)), v)
    expected = np.einsum("btnh,nhd->btd", out, p["out.kernel"]) + p.get("out.bias", 0)
    result, arrays, _ = nnx.jit(lambda module, x: module(x, Context(mask=Mask(causal=True))))(module, x)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    # The tap's arrays include every option: the probe measures the entropy of these logits.
    entropy = conditioning.tap(["attention_entropy"])(arrays)["attention_entropy"].value
    unmasked = softmax(logits)
    np.testing.assert_allclose(entropy, -(unmasked * np.log(unmasked + 1e-300)).sum(-1).mean(-1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_blocks_with_post_norm_or_without_mlp_match_formula(norm, x, rng):

    def make(mlp, **options):
        heads = MultiHeadAttention(D, 2, 5, rngs=nnx.Rngs(0))
        return Block(heads, BlockConfig(D, mlp=mlp, norm=norm, **options), rngs=nnx.Rngs(0))

    block, p = randomise_parameters(nnx.eval_shape(lambda: make(MlpConfig(F, activation="relu"), post_norm=True)), rng)

    def norm_parameters(i, p=p):
        return {k.removeprefix(f"norm{i}."): v for k, v in p.items() if k.startswith(f"norm{i}.")}

    branch = np.float64(block.attention(x)[0])
    middle = NORMS[norm](np.float64(x) + branch, **norm_parameters(1))
    hidden = np.maximum(middle @ p["mlp.up.kernel"] + p["mlp.up.bias"], 0)
    expected = NORMS[norm](middle + hidden @ p["mlp.down.kernel"] + p["mlp.down.bias"], **norm_parameters(2))
    np.testing.assert_allclose(block(x)[0], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    without_mlp, p = randomise_parameters(nnx.eval_shape(lambda: make(None)), rng)
    result, arrays, _ = without_mlp(x, Context(tap=lambda a: a))
    assert "hidden" not in arrays and {k.split(".")[0] for k in p} - {"norm1"} == {"attention"}
    np.testing.assert_array_equal(arrays["middle"], result)
    np.testing.assert_allclose(arrays["normed"], NORMS[norm](np.float64(x), **norm_parameters(1, p)), rtol=0, atol=1e-5)


def test_attention_types_accept_their_declared_options():
    """Constructs every type with all options that it declares."""
    values = {int: 3, float: 0.5, bool: True}
    for kind in {**Xcit.attentions, **ATTENTIONS}.values():
        types = {option: next((x for x in get_args(t) if x in values), None) for option, t in kind.options.items()}
        arguments = {option: values[x] for option, x in types.items() if x is not None}
        arguments |= {name: x for name, x in {"rotary": 100.0, "rotary_width": 2}.items() if name in arguments}
        nnx.eval_shape(lambda kind=kind, arguments=arguments: kind(D, N, H, **arguments, rngs=nnx.Rngs(0)))
