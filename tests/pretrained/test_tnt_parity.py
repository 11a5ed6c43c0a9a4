"""TNT against timm: detection of wrong details, in both layouts."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import TOLERANCE, case, set_norm_epsilon, split_model

from leanformer.layers import mlp, norms
from leanformer.models import tnt


BOTH = pytest.mark.parametrize("name", ["original", "patchwise"])


@BOTH
def test_tolerance_detects_wrong_epsilon(name):
    reference = case("tnt_timm", name)
    model = reference.build()
    set_norm_epsilon(model, norms.LayerNorm, 1e-6)
    assert reference.error(model) > 5 * TOLERANCE


def test_tolerance_detects_tanh_gelu(monkeypatch):
    reference = case("tnt_timm", "patchwise")
    monkeypatch.setitem(mlp.ACTIVATIONS, "gelu", jax.nn.gelu)  # the tanh form, by default
    assert reference.error(reference.build()) > 5 * TOLERANCE


@BOTH
def test_layouts_differ_in_their_stems(name):
    reference = case("tnt_timm", name)
    model = reference.build()
    model.layout = next(other for other in tnt.LAYOUTS if other != name)  # the blocks stay unchanged
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
