"""DaViT against timm: what is computed otherwise is seen, and the rates of drop path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, definition, other_epsilon, stored

from leanformer import models
from leanformer.layers import mlp, multihead, norms
from leanformer.layers.attention import attend
from leanformer.layers.masks import Mask
from leanformer.models import davit
from leanformer.pretrained.layouts.davit import BLOCKS


def masked(q, k, v, **_):
    """Windows' attention without their padding, whose keys are all the key's bias."""
    return attend(q, k, v, mask=Mask(keep=(k != k[-1:, -1:]).any(axis=(-2, -1))))


TRAPS = {
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
    it = case("davit_timm", "davit_tiny_odd")
    wrong = nnx.merge(definition("davit", it.arguments)[0], *it.load(it.tensors))
    assert it.error(wrong) > 5 * TOLERANCE


def test_the_tolerance_sees_a_wrong_epsilon():
    it = case("davit_timm", "davit_tiny_odd")
    model = it.build()
    other_epsilon(model, norms.LayerNorm, 1e-6)
    assert it.error(model) > 5 * TOLERANCE


def test_timm_gives_both_blocks_of_a_unit_our_rate_of_drop_path():
    shape = case("davit_timm", "davit_tiny_wide").arguments
    rates = stored("davit_timm", "davit_tiny_wide")[0]["drop_path"]
    model = nnx.eval_shape(lambda: models.build("davit", **shape, drop_path=0.3, rngs=nnx.Rngs(0)))
    for i, units in enumerate(rates):
        ours = getattr(model, f"stage{i + 1}").rates
        np.testing.assert_allclose(np.stack([ours, ours], axis=1), units, rtol=1e-6)
