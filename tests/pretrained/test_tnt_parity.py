"""TNT against timm: what is computed otherwise is seen, in both layouts."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import TOLERANCE, case, definition, other_epsilon

from leanformer.layers import mlp, norms
from leanformer.models import tnt


BOTH = pytest.mark.parametrize("name", ["original", "patchwise"])


@BOTH
def test_the_tolerance_sees_a_wrong_epsilon(name):
    it = case("tnt_timm", name)
    model = it.build()
    other_epsilon(model, norms.LayerNorm, 1e-6)
    assert it.error(model) > 5 * TOLERANCE


def test_the_tolerance_sees_the_other_gelu(monkeypatch):
    it = case("tnt_timm", "patchwise")
    monkeypatch.setitem(mlp.ACTIVATIONS, "gelu", jax.nn.gelu)  # the tanh form, by default
    assert it.error(it.build()) > 5 * TOLERANCE


@BOTH
def test_the_layouts_differ_in_their_stems_already(name):
    it = case("tnt_timm", name)
    model = it.build()
    model.layout = next(other for other in tnt.LAYOUTS if other != name)  # the blocks stay as they are
    assert it.error(model) > 1000 * TOLERANCE


def test_the_tolerance_sees_pixel_tokens_flattened_channels_first():
    it = case("tnt_timm", "original")
    tensors, width = dict(it.tensors), it.arguments["inner_width"]
    tensors["proj.weight"] = tensors["proj.weight"].reshape(-1, 4, width).swapaxes(1, 2).reshape(-1, 4 * width)
    wrong = nnx.merge(definition("tnt", it.arguments)[0], *it.load(tensors))
    assert it.error(wrong) > 1000 * TOLERANCE


def test_the_tolerance_sees_pixels_that_speak_before_their_block(monkeypatch):
    it = case("tnt_timm", "original")

    def wrong(self, x, _):
        pixels, patches = x
        patches = patches + jnp.pad(self.injection(pixels), ((0, 0), (1, 0), (0, 0)))
        pixels = self.inner(pixels.reshape(-1, *pixels.shape[2:]))[0].reshape(pixels.shape)
        return (pixels, self.outer(patches)[0]), {}, None

    monkeypatch.setattr(tnt.TntBlock, "__call__", wrong)
    assert it.error(it.build()) > 1000 * TOLERANCE
