"""DaViT against timm: same weights, same logits (fixture by tests/fixtures/make_davit_fixture.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from leanformer import models, pretrained
from leanformer.layers import mlp, multihead
from leanformer.layers.attention import attend
from leanformer.layers.masks import Mask
from leanformer.models import davit
from leanformer.pretrained import layouts
from leanformer.pretrained.layouts.davit import BLOCKS


FIXTURE = Path(__file__).parent / "fixtures" / "davit_timm.safetensors"
CASES = ("davit_tiny", "davit_tiny_padded", "davit_tiny_rect", "davit_tiny_odd", "davit_tiny_wide")
TOLERANCE = 1e-5  # of the largest logit; float32 differs from float64 by 5e-7, in timm by 3e-7
TOLERANCE64 = 1e-9  # of the same in float64


def fixture(case):
    """Arguments of the model, timm's weights, and the arrays of the case."""
    with safe_open(str(FIXTURE), "numpy") as file:
        chosen, shape = (json.loads(file.metadata()[name]) for name in ("cases", "models"))
        chosen, tensors = chosen[case], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    shape = shape[chosen["model"]]
    shape |= {"mlp_dim": [int(width * shape["mlp_ratio"]) for width in shape["width"]]}
    del shape["mlp_ratio"]
    weights, arrays = (
        {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        for prefix in (f"{chosen['model']}/", f"{case}/")
    )
    return shape | {"image_size": tuple(chosen["image_size"]), "channels": 3}, weights, arrays


def error(case, want="logits", **arguments):
    """Largest difference from timm's logits, relative to the largest of them."""
    shape, theirs, arrays = fixture(case)
    model = nnx.eval_shape(lambda: models.build("davit", **shape, **arguments, rngs=nnx.Rngs(0)))
    graphdef, *weights = nnx.split(model, nnx.Param, nnx.BatchStat)
    layout = layouts.layout("timm", shape | {"name": "davit"})
    weights = pretrained.load(theirs, layout, tuple(nnx.as_pure(part) for part in weights))
    images, weights = jax.tree.map(
        lambda x: jnp.asarray(x, arrays[want].dtype), (arrays["input"].transpose(0, 2, 3, 1), weights)
    )
    logits = jax.jit(lambda weights, images: nnx.merge(graphdef, *weights)(images)[0])(weights, images)
    assert logits.dtype == arrays[want].dtype
    return np.abs(logits - arrays[want]).max() / np.abs(arrays[want]).max()


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
    "padding left out": lambda patch: patch.setattr(multihead, "attend", masked),
    "thirds of the channel attention": lambda patch: patch.setitem(BLOCKS, "channel", BLOCKS["spatial"]),
    "no norm before a downsampling": lambda patch: patch.setattr(
        davit.Downsample, "__call__", lambda self, x: self.conv(jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))))
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_the_tolerance_sees(trap, monkeypatch):
    TRAPS[trap](monkeypatch)
    assert error("davit_tiny_odd") > 5 * TOLERANCE


def test_timm_gives_both_blocks_of_a_unit_our_rate_of_drop_path():
    shape, *_ = fixture("davit_tiny_wide")
    with safe_open(str(FIXTURE), "numpy") as file:
        rates = json.loads(file.metadata()["drop_path"])
    model = nnx.eval_shape(lambda: models.build("davit", **shape, drop_path=0.3, rngs=nnx.Rngs(0)))
    for i, units in enumerate(rates):
        ours = getattr(model, f"stage{i + 1}").rates
        np.testing.assert_allclose(np.stack([ours, ours], axis=1), units, rtol=1e-6)
