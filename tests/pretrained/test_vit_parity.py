"""ViT, DeiT and DINOv2 against timm and Hugging Face: same weights, same logits, and timm's gradients.

Fixtures by experiments/fixtures/make_vit_fixture.py and make_huggingface_fixture.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import check_back, definition, distance, layout, load, stored

from leanformer import pretrained
from leanformer.tasks import losses


TIMM = (
    *("vit_tiny", "vit_tiny_wide", "vit_tiny_grey", "vit_tiny_rect"),
    *("deit_tiny_distilled", "vit_tiny_mean", "vit_tiny_scaled"),
)
HUGGINGFACE = ("vit", "deit", "dinov2")
CASES = [("timm", case) for case in TIMM] + [("huggingface", case) for case in HUGGINGFACE]
DISTILLED = [("timm", "deit_tiny_distilled"), ("huggingface", "deit")]
TOLERANCE = 1e-5  # of the largest logit; float32 against float64 differs by 4e-7, a wrong LayerNorm epsilon by 1e-4
TOLERANCE_64 = 1e-9


@functools.cache
def fixture(source, case):
    """Arguments of our model, their weights, what is no weight, and their gradients; images are B H W C."""
    about, tensors = stored(f"vit_{source}", case)
    arguments = about["cases"][case]
    if isinstance(arguments["image_size"], list):  # JSON has no tuples
        arguments["image_size"] = tuple(arguments["image_size"])
    grads = {name: tensors.pop(f"grad/{name}") for name in list(tensors) if f"grad/{name}" in tensors}
    others = ("input", "labels", "logits", "logits64", "class", "class64", "distilled", "distilled64")
    others = {name: tensors.pop(name) for name in others if name in tensors}
    others["input"] = others["input"].transpose(0, 2, 3, 1)
    return arguments, tensors, others, grads


def ours(source, case, tensors):
    """Our weights from tensors in the names and shapes of `source`."""
    arguments, *_ = fixture(source, case)
    allowed = pretrained.Allowed(new_head=case == "dinov2")
    _, (params, statistics) = load("vit", arguments, tensors, source, allowed)
    if case == "dinov2":  # a backbone: the head hands on what it is given
        width = arguments["width"]
        params["head"] = {"kernel": np.eye(width, dtype=np.float32), "bias": np.zeros(width, np.float32)}
    return params, statistics


@functools.cache
def weights(source, case):
    return ours(source, case, fixture(source, case)[1])


def build(source, case, **other):
    """The model of a case with their weights."""
    graphdef, *_ = definition("vit", fixture(source, case)[0], **other)
    return nnx.merge(graphdef, *weights(source, case))


def logits_of(model, images):
    """The mean over heads, as `logits`, and of two heads the logits of each."""

    @jax.jit
    def run(images):
        own = model.heads(images)[0] if hasattr(model, "head_dist") else {}
        return own | {"logits": model(images)[0]}

    return run(images)


def error(model, source, case):
    *_, others, _ = fixture(source, case)
    return distance(logits_of(model, others["input"])["logits"], others["logits"])


def heads(others):
    """The logits that a fixture has: of one head only their mean."""
    return [name for name in ("logits", "class", "distilled") if name in others]


@pytest.mark.parametrize("backend", ["xla", "naive"])
@pytest.mark.parametrize(("source", "case"), CASES)
def test_logits(source, case, backend):
    *_, others, _ = fixture(source, case)
    found = logits_of(build(source, case, backend=backend), others["input"])
    for name in heads(others):
        assert distance(found[name], others[name]) < TOLERANCE, name


@pytest.mark.parametrize(("source", "case"), CASES)
def test_logits_in_float64(source, case):
    arguments, _, others, _ = fixture(source, case)
    single = weights(source, case)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: np.asarray(x, np.float64), single)
        model = nnx.merge(definition("vit", arguments, dtype=jnp.float64)[0], *double)
        found = logits_of(model, others["input"].astype(np.float64))
        for name in heads(others):
            assert distance(found[name], others[f"{name}64"]) < TOLERANCE_64, name


@pytest.mark.parametrize(("source", "case"), CASES)
def test_weights_go_back_as_they_came(source, case):
    arguments, tensors, *_ = fixture(source, case)
    # A backbone has no head, and we no mask token.
    alone = {"classifier.weight", "classifier.bias", "embeddings.mask_token"} if case == "dinov2" else ()
    check_back(weights(source, case), layout("vit", arguments, source), tensors, alone=alone)


def test_gradients():
    arguments, _, others, theirs = fixture("timm", "vit_tiny")
    graphdef, *_ = definition("vit", arguments)
    params, statistics = jax.tree.map(jnp.asarray, weights("timm", "vit_tiny"))
    images, targets = jnp.asarray(others["input"]), jax.nn.one_hot(others["labels"], arguments["num_classes"])

    @jax.jit
    @jax.grad
    def gradient(params):
        logits, _ = nnx.merge(graphdef, params, statistics)(images)
        return losses.classify(logits, targets, "softmax").mean()

    found, expected = (pretrained.named(tree) for tree in (gradient(params), ours("timm", "vit_tiny", theirs)[0]))
    assert found.keys() == expected.keys()
    largest = max(np.abs(b).max() for b in expected.values())
    for name, b in expected.items():
        a = found[name]
        if name == "blocks.layers.attention.key.bias":  # the softmax does not see it: zero but for rounding
            assert max(np.abs(a).max(), np.abs(b).max()) < 100 * np.finfo(np.float32).eps * largest
        else:  # timm's own float32 is 2e-6 from its float64
            assert np.abs(a - b).max() / np.abs(b).max() < 2e-5, name


@pytest.mark.parametrize(("source", "case"), [("timm", "vit_tiny"), *(("huggingface", case) for case in HUGGINGFACE)])
def test_the_tolerance_sees_a_wrong_epsilon(source, case):
    model = build(source, case)
    for norm in (model.norm, model.blocks.layers.norm1, model.blocks.layers.norm2):
        norm.epsilon = 1e-5
    assert error(model, source, case) > 5 * TOLERANCE


@pytest.mark.parametrize(("source", "case"), DISTILLED)
def test_the_tolerance_sees_one_head_of_two(source, case):
    *_, others, _ = fixture(source, case)
    found = logits_of(build(source, case), others["input"])
    assert distance(found["class"], others["logits"]) > 1000 * TOLERANCE
    assert distance(found["distilled"], others["class"]) > 1000 * TOLERANCE


@pytest.mark.parametrize(("source", "case"), DISTILLED)
def test_the_tolerance_sees_the_two_tokens_changed_over(source, case):
    model = build(source, case)
    model.cls_token, model.dist_token = model.dist_token, model.cls_token
    assert error(model, source, case) > 1000 * TOLERANCE


def test_the_tolerance_sees_a_norm_before_the_mean():
    case = "timm", "vit_tiny_mean"
    model = build(*case)

    class Before(nnx.Module):
        def __init__(self, stack, norm):
            self.stack, self.norm = stack, norm

        def __call__(self, x, context):
            x, taps = self.stack(x, context)
            return self.norm(x), taps

    model.blocks, model.norm = Before(model.blocks, model.norm), lambda x: x
    assert error(model, *case) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", ["gamma1", "gamma2"])
@pytest.mark.parametrize(("source", "case"), [("timm", "vit_tiny_scaled"), ("huggingface", "dinov2")])
def test_the_tolerance_sees_a_branch_that_is_not_scaled(source, case, name):
    model = build(source, case)
    gamma = getattr(model.blocks.layers, name)
    gamma[...] = jnp.ones_like(gamma[...])
    assert error(model, source, case) > 1000 * TOLERANCE
