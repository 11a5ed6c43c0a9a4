"""TNT against timm: same weights, same logits, in both layouts (experiments/fixtures/make_tnt_fixture.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import check_back, definition, distance, in_float64, layout, load, other_epsilon, stored

from leanformer.layers import mlp, norms
from leanformer.models import tnt


CASES = ("original", "patchwise", "original_wide", "patchwise_narrow", "patchwise_rect", "original_grey")
TOLERANCE = 1e-5  # of the largest logit; float32 against float64 differs by up to 4e-7, a wrong epsilon by 7e-5
TOLERANCE_64 = 1e-9


def fixture(case):
    """A case's arguments of our model, timm's weights, images (B H W C), and the logits of both precisions."""
    about, tensors = stored("tnt_timm", case)
    images = tensors.pop("input").transpose(0, 2, 3, 1)
    return about["cases"][case], tensors, images, tensors.pop("logits"), tensors.pop("logits64")


@functools.cache
def weights(case):
    arguments, tensors, *_ = fixture(case)
    return load("tnt", arguments, tensors)[1]


def build(case, **other):
    """The model of a case with timm's weights."""
    graphdef, *_ = definition("tnt", fixture(case)[0], **other)
    return nnx.merge(graphdef, *weights(case))


def error(model, images, expected):
    return distance(jax.jit(lambda images: model(images)[0])(images), expected)


@pytest.mark.parametrize(("case", "backend"), [*((case, "xla") for case in CASES), ("original_wide", "naive")])
def test_logits(case, backend):
    *_, images, logits, _ = fixture(case)
    assert error(build(case, backend=backend), images, logits) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_logits_in_float64(case):
    arguments, tensors, images, _, logits = fixture(case)
    with jax.enable_x64(True):
        graphdef, double = in_float64("tnt", arguments, tensors)
        assert error(nnx.merge(graphdef, *double), images.astype(np.float64), logits) < TOLERANCE_64


@pytest.mark.parametrize("case", CASES)
def test_weights_go_back_as_they_came(case):
    arguments, tensors, *_ = fixture(case)
    check_back(weights(case), layout("tnt", arguments), tensors)


BOTH = pytest.mark.parametrize("case", ["original", "patchwise"])


@BOTH
def test_the_tolerance_sees_a_wrong_epsilon(case):
    *_, images, logits, _ = fixture(case)
    model = build(case)
    other_epsilon(model, norms.LayerNorm, 1e-6)
    assert error(model, images, logits) > 5 * TOLERANCE


def test_the_tolerance_sees_the_other_gelu(monkeypatch):
    *_, images, logits, _ = fixture("patchwise")
    monkeypatch.setitem(mlp.ACTIVATIONS, "gelu", jax.nn.gelu)  # the tanh form, by default
    assert error(build("patchwise"), images, logits) > 5 * TOLERANCE


@BOTH
def test_the_layouts_differ_in_their_stems_already(case):
    *_, images, logits, _ = fixture(case)
    model = build(case)
    model.layout = next(name for name in tnt.LAYOUTS if name != case)  # the blocks stay as they are
    assert error(model, images, logits) > 1000 * TOLERANCE


def test_the_tolerance_sees_pixel_tokens_flattened_channels_first():
    arguments, tensors, images, logits, _ = fixture("original")
    width = arguments["inner_width"]
    tensors["proj.weight"] = tensors["proj.weight"].reshape(-1, 4, width).swapaxes(1, 2).reshape(-1, 4 * width)
    graphdef, wrong = load("tnt", arguments, tensors)
    assert error(nnx.merge(graphdef, *wrong), images, logits) > 1000 * TOLERANCE


def test_the_tolerance_sees_pixels_that_speak_before_their_block(monkeypatch):
    *_, images, logits, _ = fixture("original")

    def wrong(self, x, _):
        pixels, patches = x
        patches = patches + jnp.pad(self.injection(pixels), ((0, 0), (1, 0), (0, 0)))
        pixels = self.inner(pixels.reshape(-1, *pixels.shape[2:]))[0].reshape(pixels.shape)
        return (pixels, self.outer(patches)[0]), {}, None

    monkeypatch.setattr(tnt.TntBlock, "__call__", wrong)
    assert error(build("original"), images, logits) > 1000 * TOLERANCE
