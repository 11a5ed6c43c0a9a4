"""ViT, DeiT and DINOv2 against timm and Hugging Face: timm's gradients, and what is computed otherwise is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, definition, distance, outputs

from leanformer import pretrained
from leanformer.tasks import losses


PLAIN = [("vit_timm", "vit_tiny"), *(("vit_huggingface", name) for name in ("vit", "deit", "dinov2"))]
DISTILLED = [("vit_timm", "deit_tiny_distilled"), ("vit_huggingface", "deit")]


def test_gradients():
    it = case("vit_timm", "vit_tiny")
    theirs = {name.removeprefix("grad/"): x for name, x in it.arrays.items() if name.startswith("grad/")}
    graphdef, *_ = definition("vit", it.arguments)
    params, statistics = jax.tree.map(jnp.asarray, it.weights)
    images = jnp.asarray(it.arrays["input"])
    targets = jax.nn.one_hot(it.arrays["labels"], it.arguments["num_classes"])

    @jax.jit
    @jax.grad
    def gradient(params):
        logits, _ = nnx.merge(graphdef, params, statistics)(images)
        return losses.classify(logits, targets, "softmax").mean()

    result, expected = (pretrained.flatten_names(tree) for tree in (gradient(params), it.load(theirs)[0]))
    assert result.keys() == expected.keys()
    largest = max(np.abs(b).max() for b in expected.values())
    for name, b in expected.items():
        a = result[name]
        if name == "blocks.layers.attention.key.bias":  # the softmax does not see it: zero but for rounding
            assert max(np.abs(a).max(), np.abs(b).max()) < 100 * np.finfo(np.float32).eps * largest
        else:  # timm's own float32 is 2e-6 from its float64
            assert np.abs(a - b).max() / np.abs(b).max() < 2e-5, name


@pytest.mark.parametrize(("file", "name"), PLAIN)
def test_the_tolerance_sees_a_wrong_epsilon(file, name):
    it = case(file, name)
    model = it.build()
    for norm in (model.norm, model.blocks.layers.norm1, model.blocks.layers.norm2):
        norm.epsilon = 1e-5
    assert it.error(model) > 5 * TOLERANCE


@pytest.mark.parametrize(("file", "name"), DISTILLED)
def test_the_tolerance_sees_one_head_of_two(file, name):
    it = case(file, name)
    result = outputs(it.build(), it.arrays["input"])
    assert distance(result["class"], it.arrays["logits"]) > 1000 * TOLERANCE
    assert distance(result["distilled"], it.arrays["class"]) > 1000 * TOLERANCE


@pytest.mark.parametrize(("file", "name"), DISTILLED)
def test_the_tolerance_sees_the_two_tokens_changed_over(file, name):
    it = case(file, name)
    model = it.build()
    model.cls_token, model.dist_token = model.dist_token, model.cls_token
    assert it.error(model) > 1000 * TOLERANCE


def test_the_tolerance_sees_a_norm_before_the_mean():
    it = case("vit_timm", "vit_tiny_mean")
    model = it.build()

    class Before(nnx.Module):
        def __init__(self, stack, norm):
            self.stack, self.norm = stack, norm

        def __call__(self, x, context):
            x, taps = self.stack(x, context)
            return self.norm(x), taps

    model.blocks, model.norm = Before(model.blocks, model.norm), lambda x: x
    assert it.error(model) > 1000 * TOLERANCE


@pytest.mark.parametrize("gamma", ["gamma1", "gamma2"])
@pytest.mark.parametrize(("file", "name"), [("vit_timm", "vit_tiny_scaled"), ("vit_huggingface", "dinov2")])
def test_the_tolerance_sees_a_branch_that_is_not_scaled(file, name, gamma):
    it = case(file, name)
    model = it.build()
    scale = getattr(model.blocks.layers, gamma)
    scale[...] = jnp.ones_like(scale[...])
    assert it.error(model) > 1000 * TOLERANCE
