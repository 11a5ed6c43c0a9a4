"""DaViT: taps, random keys of stages, windows, measures, drop path."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from random_weights import fill_weights

from leanformer import models
from leanformer.layers.attention import attend
from leanformer.models.davit import WindowAttention


TINY = {"image_size": (20, 12), "channels": 3, "num_classes": 5, "width": (6, 10), "depth": (2, 1)}
TINY |= {"num_heads": (3, 2), "head_dim": (5, 7), "mlp_dim": (13, 17), "window_size": 2}
WIDE = TINY | {"value_dim": (11, 3), "channel_head_dim": (4, 9)}
BATCH = 2


def build_abstract(**arguments):
    return nnx.eval_shape(lambda: models.build("davit", **arguments, rngs=nnx.Rngs(0)))


def get_tap_shapes(tap, **arguments):
    images = jnp.zeros((BATCH, *TINY["image_size"], 3))
    return nnx.eval_shape(lambda model: model(images, tap=tap)[1], build_abstract(**arguments))


def test_tap_shapes():
    result = get_tap_shapes(lambda arrays: arrays, **WIDE)
    expected = {}  # 5 x 3 and 3 x 2 tokens, in 3 x 2 and 2 x 1 windows of size 2
    for stage, units, t, windows, d, f, n, h, value, channel in (
        (1, 2, 15, 6, 6, 13, 3, 5, 11, 4),
        (2, 1, 6, 2, 10, 17, 2, 7, 3, 9),
    ):
        block = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (units, BATCH, t, d))
        block["hidden"] = (units, BATCH, t, f)
        matrix = {name: (units, BATCH * windows, 4, n, size) for name, size in (("q", h), ("k", h), ("v", value))}
        expected[f"stage{stage}.spatial"] = block | matrix | {"out": (units, BATCH, t, n, value)}
        expected[f"stage{stage}.channel"] = block | dict.fromkeys(("v", "out"), (units, BATCH, t, n, channel))
    assert {stack: {name: x.shape for name, x in arrays.items()} for stack, arrays in result.items()} == expected


def test_windows_attend_only_within_themselves(rng):
    x = jnp.asarray(rng.standard_normal((BATCH, 5, 3, 7)), jnp.float32)
    attention = fill_weights(lambda: WindowAttention(7, 3, 5, 11, window_size=2, rngs=nnx.Rngs(0)))
    y, arrays, _ = nnx.jit(lambda attention, x: attention(x))(attention, x)
    assert y.shape == x.shape
    # Window 3 of 6, the middle one on the right: rows 2 and 3, column 2 and one of padding.
    q, k, v = (arrays[name].reshape(BATCH, 6, 4, 3, -1)[:, 3] for name in "qkv")
    result = arrays["out"].reshape(BATCH, 5, 3, 3, 11)[:, 2:4, 2]
    np.testing.assert_allclose(result, attend(q, k, v)[:, ::2], rtol=0, atol=1e-5 * np.abs(result).max())


def test_interventions_act_on_both_kinds_of_attention():
    model = build_abstract(**TINY, sigma_reparam=True)
    for block in (model.stage1.layers.spatial, model.stage1.layers.channel):
        assert hasattr(block.attention.query, "scale")
