"""VOLO against timm: training, and what is computed otherwise is seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, distance, other_epsilon

from leanformer import pretrained
from leanformer.layers import mlp, norms, outlook
from leanformer.layers.convolution import BatchNorm
from leanformer.models import volo
from leanformer.tasks import losses


TOLERANCE_64 = 1e-9


@jax.enable_x64(True)
def test_training_in_float64():
    """Logits from the batch's own statistics, the running ones after it, and the gradient in every weight."""
    it = case("volo_timm", "volo_tiny")
    result, (graphdef, (params, statistics)) = it.arrays, it.doubled()
    images, targets = jnp.asarray(result["input"], jnp.float64), jax.nn.one_hot(result["labels"], 11)
    keys = jax.random.split(jax.random.key(0), len(images))

    def loss(params):
        model = nnx.merge(graphdef, params, statistics)
        logits, _ = model(images, key=keys)
        moved = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        return losses.classify(logits, targets, "softmax").mean(), (logits, moved)

    gradient, (logits, moved) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert distance(logits, result["train/logits64"]) < TOLERANCE_64
    got = pretrained.export((gradient, moved), it.layout)
    names = [name.removeprefix("grad/") for name in result if name.startswith("grad/")]
    running = [name.removeprefix("train/") for name in result if "running" in name]
    tracked = {f"patch_embed.conv.{i}.num_batches_tracked" for i in (1, 4, 7)}
    assert {*names, *running} == got.keys() - tracked
    for name in running:
        assert distance(got[name], result[f"train/{name}"]) < TOLERANCE_64, name
    for name in names:
        assert np.abs(result[f"grad/{name}"]).max() > 0, name
        assert distance(got[name], result[f"grad/{name}"].astype(np.float64)) < 1e-7, name  # the file has float32


# What the tolerance must see: each detail done the other way.


def changed(monkeypatch, change, name):
    it = case("volo_timm", name)
    model = it.build()
    change(model, monkeypatch)
    return it.error(model)


def layer_norm_epsilon(model, _):
    other_epsilon(model, norms.LayerNorm, 1e-6)


def batch_norm_epsilon(_, patch):
    patch.setattr(BatchNorm, "EPSILON", 1e-3)


def tanh_gelu(_, patch):
    patch.setitem(mlp.ACTIVATIONS, "gelu", jax.nn.gelu)  # the tanh form, by default


@pytest.mark.parametrize("change", [layer_norm_epsilon, batch_norm_epsilon, tanh_gelu])
def test_the_tolerance_sees(change, monkeypatch):
    assert changed(monkeypatch, change, "volo_tiny") > 5 * TOLERANCE


def gelu_in_the_stem(_, patch):
    patch.setattr(jax.nn, "relu", functools.partial(jax.nn.gelu, approximate=False))


def folds_averaged(_, patch):
    add = outlook.overlap_add
    patch.setattr(outlook, "overlap_add", lambda y, *size: add(y, *size) / add(jnp.ones_like(y), *size))


def unscaled_outlook(model, _):
    model.stage1.layers.attention.scale = 1.0


def head_index_fastest(_, patch):
    """The weights' channels read as 81 x N instead of N x 81."""
    einsum = jnp.einsum

    def wrong(text, x, *rest, **options):
        if text.startswith("bijnpq"):
            x = jnp.moveaxis(x.reshape(*x.shape[:3], 9, 9, x.shape[3]), -1, 3)
        return einsum(text, x, *rest, **options)

    patch.setattr(jnp, "einsum", wrong)


def positions_at_the_end(model, patch):
    positions = model.pos_embed[...].reshape(1, -1, 12)
    model.pos_embed[...] = jnp.zeros_like(model.pos_embed[...])
    stage = model.stage2

    def late(self, x, context):
        x, taps = volo.Stack.__call__(stage, x, context)
        return x + positions, taps

    model.stage2 = type("Late", (nnx.Module,), {"__call__": late})()


CHANGES = (gelu_in_the_stem, folds_averaged, unscaled_outlook, head_index_fastest, positions_at_the_end)


@pytest.mark.parametrize("change", CHANGES)
def test_the_tolerance_sees_by_far(change, monkeypatch):
    assert changed(monkeypatch, change, "volo_tiny_odd") > 200 * TOLERANCE


def test_the_rule_of_the_two_heads():
    """What timm's heads return makes what its forward returns; another rule would be seen."""
    result = case("volo_timm", "volo_tiny").arrays
    one, other = result["class64"], result["tokens64"]
    assert distance(one + 0.5 * other.max(axis=1), result["logits64"]) < TOLERANCE_64
    for wrong in (one, one + 0.5 * other.mean(axis=1), one + other.max(axis=1)):
        assert distance(wrong, result["logits64"]) > 200 * TOLERANCE
