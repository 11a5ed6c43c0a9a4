"""VOLO against timm: training, and detection of wrong details."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, relative_difference

from leanformer import pretrained
from leanformer.tasks.classification import classify


TOLERANCE_64 = 1e-9


@pytest.mark.slow  # long to compile; faster tests compare logits
@jax.enable_x64(True)
def test_training_matches_timm_in_float64():
    """Logits from batch statistics, the updated running statistics, and the gradient of every weight."""
    reference = case("volo_timm", "volo_tiny")
    expected, (graphdef, (params, statistics)) = reference.arrays, reference.doubled()
    images, targets = jnp.asarray(expected["input"], jnp.float64), jax.nn.one_hot(expected["labels"], 11)
    keys = jax.random.split(jax.random.key(0), len(images))

    def loss(params):
        model = nnx.merge(graphdef, params, statistics)
        logits, _ = model(images, key=keys)
        new_statistics = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        return classify(logits, targets, "softmax").mean(), (logits, new_statistics)

    gradient, (logits, new_statistics) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert relative_difference(logits, expected["train/logits64"]) < TOLERANCE_64
    result = pretrained.export((gradient, new_statistics), reference.layout)
    names = [name.removeprefix("grad/") for name in expected if name.startswith("grad/")]
    running = [name.removeprefix("train/") for name in expected if "running" in name]
    tracked = {f"patch_embed.conv.{i}.num_batches_tracked" for i in (1, 4, 7)}
    assert {*names, *running} == result.keys() - tracked
    for name in running:
        assert relative_difference(result[name], expected[f"train/{name}"]) < TOLERANCE_64, name
    for name in names:
        assert np.abs(expected[f"grad/{name}"]).max() > 0, name
        theirs = expected[f"grad/{name}"].astype(np.float64)  # the file has float32
        assert relative_difference(result[name], theirs) < 1e-7, name


# Wrong details that the tolerance must detect.


def gelu_in_the_stem(_, patch):
    patch.setattr(jax.nn, "relu", functools.partial(jax.nn.gelu, approximate=False))


def unscaled_outlook(model, _):
    model.stage1.layers.attention.scale = 1.0


def head_index_fastest(_, patch):
    """Read the weights' channels as 81 x N instead of N x 81."""
    einsum = jnp.einsum

    def wrong(text, x, *rest, **options):
        if text.startswith("bijnpq"):
            x = jnp.moveaxis(x.reshape(*x.shape[:3], 9, 9, x.shape[3]), -1, 3)
        return einsum(text, x, *rest, **options)

    patch.setattr(jnp, "einsum", wrong)


CHANGES = (gelu_in_the_stem, unscaled_outlook, head_index_fastest)


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize("change", CHANGES)
def test_tolerance_detects_large_changes(change, monkeypatch):
    reference = case("volo_timm", "volo_tiny_odd")
    model = reference.build()
    change(model, monkeypatch)
    assert reference.error(model) > 200 * TOLERANCE
