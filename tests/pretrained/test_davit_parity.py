"""DaViT against timm: detection of wrong details, and drop-path rates."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, load_fixture, split_model

from leanformer import models
from leanformer.layers import multihead
from leanformer.layers.attention import attend
from leanformer.layers.masks import Mask
from leanformer.models import davit
from leanformer.pretrained.layouts.timm import DAVIT_BLOCKS


def attend_without_padding(q, k, v, **_):
    """Return window attention with padding masked; the keys of padding are those equal to the key's bias."""
    return attend(q, k, v, mask=Mask(keep=(k != k[-1:, -1:]).any(axis=(-2, -1))))


WRONG_DETAILS = {
    "no padding": lambda patch: patch.setattr(multihead, "attend", attend_without_padding),
    "channel thirds": lambda patch: patch.setitem(DAVIT_BLOCKS, "channel", DAVIT_BLOCKS["spatial"]),
    "downsampling norm": lambda patch: patch.setattr(
        davit.Downsample, "__call__", lambda self, x: self.conv(jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))))
    ),
}


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize("detail", WRONG_DETAILS)
def test_tolerance_detects_wrong_details(detail, monkeypatch):
    WRONG_DETAILS[detail](monkeypatch)
    reference = case("davit_timm", "davit_tiny_odd")
    model = nnx.merge(split_model("davit", reference.arguments)[0], *reference.load(reference.tensors))
    assert reference.error(model) > 5 * TOLERANCE


def test_drop_path_rates_match_timm_in_both_blocks_of_a_unit():
    arguments = case("davit_timm", "davit_tiny_wide").arguments
    rates = load_fixture("davit_timm", "davit_tiny_wide")[0]["drop_path"]
    model = nnx.eval_shape(lambda: models.build("davit", **arguments, drop_path=0.3, rngs=nnx.Rngs(0)))
    for i, units in enumerate(rates):
        ours = getattr(model, f"stage{i + 1}").rates
        np.testing.assert_allclose(np.stack([ours, ours], axis=1), units, rtol=1e-6)
