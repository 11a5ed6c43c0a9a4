"""TNT against timm: detection of wrong details, in both layouts."""

import jax.numpy as jnp
import pytest
from flax import nnx
from parity import TOLERANCE, case, split_model

from leanformer.models import tnt


@pytest.mark.parametrize("name", ["original", "patchwise"])
def test_layouts_differ_in_their_stems(name):
    reference = case("tnt_timm", name)
    model = reference.build()
    model.layout = {"original": "patchwise", "patchwise": "original"}[name]  # the blocks stay unchanged
    assert reference.error(model) > 1000 * TOLERANCE


def test_tolerance_detects_channels_first_pixel_tokens():
    reference = case("tnt_timm", "original")
    tensors, width = dict(reference.tensors), reference.arguments["inner_width"]
    tensors["proj.weight"] = tensors["proj.weight"].reshape(-1, 4, width).swapaxes(1, 2).reshape(-1, 4 * width)
    wrong = nnx.merge(split_model("tnt", reference.arguments)[0], *reference.load(tensors))
    assert reference.error(wrong) > 1000 * TOLERANCE


def test_tolerance_detects_pixels_added_before_their_block(monkeypatch):
    reference = case("tnt_timm", "original")

    def wrong(self, x, _):
        pixels, patches = x
        patches = patches + jnp.pad(self.injection(pixels), ((0, 0), (1, 0), (0, 0)))
        pixels = self.inner(pixels.reshape(-1, *pixels.shape[2:]))[0].reshape(pixels.shape)
        return (pixels, self.outer(patches)[0]), {}, None

    monkeypatch.setattr(tnt.TntBlock, "__call__", wrong)
    assert reference.error(reference.build()) > 1000 * TOLERANCE
