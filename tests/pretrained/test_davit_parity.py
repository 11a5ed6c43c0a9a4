"""DaViT against timm: same weights, same logits (fixture by experiments/fixtures/make_davit_fixture.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import distance, load, stored

from leanformer import models
from leanformer.layers import mlp, multihead
from leanformer.layers.attention import attend
from leanformer.layers.masks import Mask
from leanformer.models import davit
from leanformer.pretrained.layouts.davit import BLOCKS


CASES = ("davit_tiny", "davit_tiny_padded", "davit_tiny_rect", "davit_tiny_odd", "davit_tiny_wide")
TOLERANCE = 1e-5  # of the largest logit; float32 differs from float64 by 5e-7, in timm by 3e-7
TOLERANCE64 = 1e-9  # of the same in float64


def fixture(case):
    """Arguments of the model, timm's weights, and the arrays of the case."""
    about, arrays = stored("davit_timm", case)
    chosen = about["cases"][case]
    shape, (_, weights) = about["models"][chosen["model"]], stored("davit_timm", chosen["model"])
    shape |= {"mlp_dim": [int(width * shape["mlp_ratio"]) for width in shape["width"]]}
    del shape["mlp_ratio"]
    return shape | {"image_size": tuple(chosen["image_size"]), "channels": 3}, weights, arrays


def error(case, want="logits", **arguments):
    """The distance from timm's logits."""
    shape, theirs, arrays = fixture(case)
    graphdef, weights = load("davit", shape, theirs, **arguments)
    images, weights = jax.tree.map(
        lambda x: jnp.asarray(x, arrays[want].dtype), (arrays["input"].transpose(0, 2, 3, 1), weights)
    )
    logits = jax.jit(lambda weights, images: nnx.merge(graphdef, *weights)(images)[0])(weights, images)
    return distance(logits, arrays[want])


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    assert error(case) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_logits_in_float64(case):
    with jax.enable_x64(True):
        assert error(case, "logits64", dtype=jnp.float64) < TOLERANCE64


def masked(q, k, v, **_):
    """Windows' attention without their padding, whose keys are all the key's bias."""
    return attend(q, k, v, mask=Mask(keep=(k != k[-1:, -1:]).any(axis=(-2, -1))))


TRAPS = {
    "epsilon": lambda patch: patch.setattr(davit, "EPSILON", 1e-6),
    "tanh GELU": lambda patch: patch.setitem(mlp.ACTIVATIONS, "gelu", jax.nn.gelu),
    "no padding": lambda patch: patch.setattr(multihead, "attend", masked),
    "channel thirds": lambda patch: patch.setitem(BLOCKS, "channel", BLOCKS["spatial"]),
    "downsampling norm": lambda patch: patch.setattr(
        davit.Downsample, "__call__", lambda self, x: self.conv(jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))))
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_the_tolerance_sees(trap, monkeypatch):
    TRAPS[trap](monkeypatch)
    assert error("davit_tiny_odd") > 5 * TOLERANCE


def test_timm_gives_both_blocks_of_a_unit_our_rate_of_drop_path():
    shape, *_ = fixture("davit_tiny_wide")
    rates = stored("davit_timm", "davit_tiny_wide")[0]["drop_path"]
    model = nnx.eval_shape(lambda: models.build("davit", **shape, drop_path=0.3, rngs=nnx.Rngs(0)))
    for i, units in enumerate(rates):
        ours = getattr(model, f"stage{i + 1}").rates
        np.testing.assert_allclose(np.stack([ours, ours], axis=1), units, rtol=1e-6)
