"""ViT against timm: same weights, same logits, same gradients (fixture by tests/fixtures/make_vit_fixture.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from leanformer import layouts, models, objective, pretrained


FIXTURE = Path(__file__).parent / "fixtures" / "vit_timm.safetensors"
CASES = ("vit_tiny", "vit_tiny_wide", "vit_tiny_grey", "vit_tiny_rect")
TOLERANCE = 1e-5  # of the largest logit; float32 against float64 differs by 3e-7, a wrong LayerNorm epsilon by 2e-4


def fixture(case):
    with safe_open(str(FIXTURE), "numpy") as file:
        shape = json.loads(file.metadata()["cases"])[case]
        names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        tensors = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
    return shape, tensors


def build(shape):
    names = ("num_classes", "width", "depth", "num_heads", "head_dim", "mlp_dim")
    return models.build(
        "vit",
        image_size=tuple(shape["image_size"]),
        patch_size=shape["patch_size"][0],
        channels=shape["in_channels"],
        **{name: shape[name] for name in names},
        rngs=nnx.Rngs(0),
    )


def from_timm(w, shape, prefix=""):
    """Our tree of parameters from timm's state dict, or the gradients' under `prefix`."""
    arguments = {"name": "vit", "depth": shape["depth"], "patch_size": shape["patch_size"][0]}
    layout = layouts.layout("timm", arguments)
    names = {name for entry in layout for name in entry.names()}
    _, params = nnx.split(build(shape), nnx.Param)
    return pretrained.load({name: w[prefix + name] for name in names}, layout, (nnx.to_pure_dict(params), {}))[0]


def apply(model, tree, images):
    graphdef, params = nnx.split(model, nnx.Param)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), nnx.to_pure_dict(params), tree)
    return nnx.merge(graphdef, nnx.State(tree))(images)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_logits(case, backend):
    shape, w = fixture(case)
    model = build(shape)
    model.blocks.layers.attention.backend = backend
    logits = apply(model, from_timm(w, shape), jnp.asarray(w["input"].transpose(0, 2, 3, 1)))
    error = np.abs(logits - w["logits"]).max() / np.abs(w["logits"]).max()
    assert error < TOLERANCE


def test_gradients():
    shape, w = fixture("vit_tiny")
    model, images = build(shape), jnp.asarray(w["input"].transpose(0, 2, 3, 1))
    targets = jax.nn.one_hot(w["labels"], shape["num_classes"])
    tree = jax.tree.map(jnp.asarray, from_timm(w, shape))
    found = jax.grad(lambda p: objective.classify(apply(model, p, images), targets, "softmax").mean())(tree)
    expected = from_timm(w, shape, "grad/")
    largest = max(np.abs(b).max() for b in jax.tree.leaves(expected))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name == "blocks.layers.attention.key.bias":  # the softmax does not see it: zero but for rounding
            assert max(np.abs(a).max(), np.abs(b).max()) < 1e-6 * largest
        else:  # timm's own float32 is 2e-6 from its float64
            assert np.abs(a - b).max() / np.abs(b).max() < 2e-5, name


def test_the_tolerance_sees_a_wrong_epsilon():
    shape, w = fixture("vit_tiny")
    model = build(shape)
    for norm in (model.norm, model.blocks.layers.norm1, model.blocks.layers.norm2):
        norm.epsilon = 1e-5
    logits = apply(model, from_timm(w, shape), jnp.asarray(w["input"].transpose(0, 2, 3, 1)))
    assert np.abs(logits - w["logits"]).max() / np.abs(w["logits"]).max() > 5 * TOLERANCE
