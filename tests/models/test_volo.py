"""VOLO: outlook attention against NumPy, taps, measures, heads, training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_weights import fill_weights

from leanformer import models
from leanformer.models import volo


TINY = {"image_size": (20, 28), "patch_size": 4, "channels": 3, "num_classes": 11, "stem_width": 5}
TINY |= {"width": (6, 8, 8), "depth": (2, 3, 1), "num_heads": (3, 5, 2), "head_dim": (4, 7, 3), "value_dim": (2, 9, 5)}
TINY |= {"mlp_dim": (13, 17, 19), "class_heads": 2, "class_head_dim": 5, "class_mlp_dim": 23}
BATCH = 4
STAGES = {  # L T D N H H' F
    "stage1": (2, 5 * 7, 6, 3, 4, 2, 13),
    "stage2": (3, 2 * 3, 8, 5, 7, 9, 17),
    "stage3": (1, 2 * 3, 8, 2, 3, 5, 19),
}


@pytest.fixture
def images(rng):
    return jnp.asarray(rng.standard_normal((BATCH, 20, 28, 3)), jnp.float32)


def build(**other):
    return fill_weights(build_abstract(**other))


def build_abstract(**other):
    return nnx.eval_shape(lambda: models.build("volo", **TINY | other, rngs=nnx.Rngs(0)))


def compute_outlook(x, value, weights, bias, scale, *, rows, columns):
    """Return the heads' outputs before the last projection, from tokens (T D) and weights."""
    x = x.reshape(rows, columns, -1)
    v = np.einsum("rcd,dnh->rcnh", x, value)
    out = np.zeros_like(v)
    for i in range(-(-rows // 2)):
        for j in range(-(-columns // 2)):
            mean = x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((0, 1))
            logits = (np.einsum("d,dnpq->npq", mean, weights) + bias) * scale
            a = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            pixels = [(2 * i + di, 2 * j + dj) for di in (-1, 0, 1) for dj in (-1, 0, 1)]
            inside = [r in range(rows) and c in range(columns) for r, c in pixels]
            for p in range(9):
                for q in range(9):
                    if inside[p] and inside[q]:
                        out[pixels[p]] += a[:, p, q, None] * v[pixels[q]]
    return out.reshape(rows * columns, *out.shape[2:])


@pytest.mark.parametrize("grid", [(4, 6), (5, 7), (1, 3)])
def test_outlook_attention_matches_loops(grid, rng):
    attention = fill_weights(lambda: volo.OutlookAttention(6, 3, 4, 2, grid=grid, rngs=nnx.Rngs(0)))
    value, weights, bias = (rng.standard_normal(s) for s in ((6, 3, 2), (6, 3, 9, 9), (3, 9, 9)))
    attention.value.kernel[...], attention.weights.kernel[...], attention.weights.bias[...] = value, weights, bias
    x = rng.standard_normal((2, grid[0] * grid[1], 6))
    out = jax.jit(lambda x: attention(x)[1]["out"])(jnp.asarray(x, jnp.float32))
    expected = [compute_outlook(one, value, weights, bias, 4**-0.5, rows=grid[0], columns=grid[1]) for one in x]
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_tap_shapes(images):
    _, taps = jax.eval_shape(lambda model, x: model.heads(x, tap=lambda arrays: arrays), build_abstract(), images)
    assert taps.keys() == STAGES.keys()
    for stage, (layers, t, d, n, h, hv, f) in STAGES.items():
        tokens = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (t, d))
        heads = {"v": (t, n, hv), "out": (t, n, hv)} | ({} if stage == "stage1" else {"q": (t, n, h), "k": (t, n, h)})
        expected = {name: (layers, BATCH, *shape) for name, shape in (tokens | heads | {"hidden": (t, f)}).items()}
        assert {name: x.shape for name, x in taps[stage].items()} == expected


def test_drop_path_rises_over_all_blocks_except_outlooks():
    model = build_abstract(drop_path=0.5)
    rates = (model.stage1.rates, model.stage2.rates, model.stage3.rates)
    np.testing.assert_allclose(np.concatenate(rates), [0, 0, 0.2, 0.3, 0.4, 0.5])
    assert model.class_blocks.rates == (0, 0)
