"""ViT, DeiT and DINOv2 against timm and Hugging Face: timm's gradients, and detection of wrong details."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, split_model

from leanformer.runtime.mesh import flatten_names
from leanformer.tasks.classification import classify


DISTILLED = [("vit_timm", "deit_tiny_distilled"), ("vit_huggingface", "deit")]


def test_gradients_match_timm():
    reference = case("vit_timm", "vit_tiny")
    theirs = {name.removeprefix("grad/"): x for name, x in reference.arrays.items() if name.startswith("grad/")}
    graphdef, *_ = split_model("vit", reference.arguments)
    params, statistics = jax.tree.map(jnp.asarray, reference.weights)
    images = jnp.asarray(reference.arrays["input"])
    targets = jax.nn.one_hot(reference.arrays["labels"], reference.arguments["num_classes"])

    @jax.jit
    @jax.grad
    def gradient(params):
        logits, _ = nnx.merge(graphdef, params, statistics)(images)
        return classify(logits, targets, "softmax").mean()

    result, expected = (flatten_names(tree) for tree in (gradient(params), reference.load(theirs)[0]))
    assert result.keys() == expected.keys()
    largest = max(np.abs(b).max() for b in expected.values())
    for name, b in expected.items():
        a = result[name]
        if name == "blocks.layers.attention.key.bias":  # it cancels in the softmax: zero up to rounding
            assert max(np.abs(a).max(), np.abs(b).max()) < 100 * np.finfo(np.float32).eps * largest
        else:  # timm's own float32 is 2e-6 from its float64
            assert np.abs(a - b).max() / np.abs(b).max() < 2e-5, name


@pytest.mark.slow  # this and the next see whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize(("file", "name"), DISTILLED)
def test_tolerance_detects_swapped_tokens(file, name):
    reference = case(file, name)
    model = reference.build()
    model.cls_token, model.dist_token = model.dist_token, model.cls_token
    assert reference.error(model) > 1000 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("gamma", ["gamma1", "gamma2"])
@pytest.mark.parametrize(("file", "name"), [("vit_timm", "vit_tiny_scaled"), ("vit_huggingface", "dinov2")])
def test_tolerance_detects_unscaled_branch(file, name, gamma):
    reference = case(file, name)
    model = reference.build()
    scale = getattr(model.blocks.layers, gamma)
    scale[...] = jnp.ones_like(scale[...])
    assert reference.error(model) > 1000 * TOLERANCE
