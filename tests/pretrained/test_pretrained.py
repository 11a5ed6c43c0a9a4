"""Import and export of weights: layouts are inverted bit for bit, and every mismatch is listed."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses
from random_weights import fill_weights
from safetensors.flax import save_file

from leanformer import models, pretrained
from leanformer.errors import WeightsError
from leanformer.pretrained import Allowed, layouts
from leanformer.pretrained.layouts.entries import Entry, same
from leanformer.training import model_setup, train_setup


ARGUMENTS = {"image_size": 12, "patch_size": 3, "channels": 1, "num_classes": 5, "width": 13, "depth": 3}
ARGUMENTS |= {"num_heads": 2, "head_dim": 7, "mlp_dim": 17}
VARIANTS = {
    "plain": {},
    "values": {"value_dim": 5},
    "mean": {"pool": "mean"},
    "distilled": {"distilled": True},
    "scaled": {"layer_scale": 0.1},
}


def draw_weights(**changes):
    _, _, shapes = model_setup.split_model(lambda rngs: models.build("vit", **ARGUMENTS, **changes, rngs=rngs))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)


def make_layout(source="timm", **changes):
    return layouts.layout(source, {"name": "vit", **ARGUMENTS, **changes})


@pytest.mark.parametrize("source", ["timm", "huggingface"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_then_import_is_the_identity(variant, source):
    changes = VARIANTS[variant]
    if source == "huggingface" and variant == "mean":
        pytest.skip("Hugging Face publishes no such model")
    weights, layout = draw_weights(**changes), make_layout(source, **changes)
    tensors = pretrained.export(weights, layout)
    zeros = jax.tree.map(np.zeros_like, weights)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(tensors, layout, zeros), weights)


def test_written_file_is_read_unchanged(tmp_path):
    weights = draw_weights()
    layout = pretrained.native_layout(weights)
    pretrained.write(tmp_path / "deep" / "w.safetensors", pretrained.export(weights, layout))
    read = pretrained.read(tmp_path / "deep" / "w.safetensors")
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(read, layout, draw_weights()), weights)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["w.safetensors"]


def test_half_precision_becomes_float32(tmp_path):
    save_file({"a": jnp.full(3, 1.5, jnp.bfloat16), "b": jnp.full(2, 2.5, jnp.float16)}, tmp_path / "w.safetensors")
    read = pretrained.read(tmp_path / "w.safetensors")
    assert {name: (x.dtype, x[0]) for name, x in read.items()} == {"a": (np.float32, 1.5), "b": (np.float32, 2.5)}


def test_files_without_weights_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with refuses(path, error=WeightsError):
        pretrained.read(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with refuses(path, "pickle", "safetensors.torch.save_file", error=WeightsError):
        pretrained.read(path)
    pretrained.write(path, {"a": np.ones(1000, np.float32)})
    path.write_bytes(path.read_bytes()[:-9])
    with refuses(path, error=WeightsError):
        pretrained.read(path)


def test_mismatches_are_listed():
    weights, layout = draw_weights(), make_layout()
    tensors = pretrained.export(weights, layout)
    del tensors["blocks.1.attn.qkv.bias"]
    tensors["stranger"] = np.zeros(3)
    tensors["blocks.2.mlp.fc1.weight"] = np.zeros((2, 2))
    with refuses("stranger", "(3,)", error=WeightsError) as error:
        pretrained.load(tensors, layout, weights)
    lines = str(error.value).splitlines()
    for parts in (
        ("blocks.1.attn.qkv.bias", "blocks.layers.attention.query.bias"),
        ("stranger", "(3,)"),
        ("blocks.2.mlp.fc1.weight", "(2, 2)", "blocks.layers.mlp.up.kernel", "(13, 17)"),
    ):
        assert [line for line in lines if mentions(line, *parts)], (parts, lines)
    with refuses("blocks.{i}.attn.qkv.weight", "3 of 3", error=WeightsError):  # one line for all layers
        pretrained.load({}, layout, weights)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_integers_in_place_of_numbers_are_refused(tmp_path, dtype):
    weights, layout = draw_weights(), make_layout()
    tensors = pretrained.export(weights, layout)
    for i in range(2):
        tensors[f"blocks.{i}.mlp.fc1.bias"] = tensors[f"blocks.{i}.mlp.fc1.bias"].astype(dtype)
    pretrained.write(tmp_path / "w.safetensors", tensors)
    with refuses("blocks.0.mlp.fc1.bias", np.dtype(dtype).name, "blocks.layers.mlp.up.bias", error=WeightsError):
        pretrained.load(pretrained.read(tmp_path / "w.safetensors"), layout, weights)
    tensors = pretrained.export(weights, layout) | {"extra": np.zeros(1, dtype)}
    pretrained.load(tensors, [*layout, Entry("extra", (), same)], weights)  # not read


def test_head_is_replaced_only_if_allowed():
    weights, layout = draw_weights(), make_layout()
    tensors = pretrained.export(weights, layout)
    tensors["head.weight"], tensors["head.bias"] = np.zeros((9, 13), np.float32), np.zeros(9, np.float32)
    fresh = jax.tree.map(lambda x: np.full_like(x, 7), weights)
    with refuses("head.weight", "(9, 13)", error=WeightsError):
        pretrained.load(tensors, layout, fresh)
    params, _ = pretrained.load(tensors, layout, fresh, Allowed(new_head=True))
    without = {name: x for name, x in tensors.items() if not name.startswith("head")}
    with refuses("head.weight", error=WeightsError):
        pretrained.load(without, layout, fresh)
    same, _ = pretrained.load(without, layout, fresh, Allowed(new_head=True))
    jax.tree.map(np.testing.assert_array_equal, params, same)
    assert (params["head"]["kernel"] == 7).all() and (params["head"]["bias"] == 7).all()
    np.testing.assert_array_equal(params["norm"]["scale"], weights[0]["norm"]["scale"])


def test_extra_classifier_is_ignored_only_if_allowed():
    weights, layout = draw_weights(), make_layout()
    tensors = pretrained.export(weights, layout) | {"head.fc.weight": np.zeros((9, 13), np.float32)}
    fresh = jax.tree.map(np.zeros_like, weights)
    with refuses("head.fc.weight", "(9, 13)", error=WeightsError):
        pretrained.load(tensors, layout, fresh)
    params, _ = pretrained.load(tensors, layout, fresh, Allowed(new_head=True))
    jax.tree.map(np.testing.assert_array_equal, params, weights[0] | {"head": fresh[0]["head"]})
    with refuses("head.fc.weight", error=WeightsError):
        pretrained.load(tensors, layout, fresh, Allowed(new_head=True, heads=("classifier",)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused(value, tmp_path):
    pretrained.write(tmp_path / "w.safetensors", {"a": np.ones(3), "b": np.array([1.0, value])})
    with refuses(tmp_path / "w.safetensors", "b", error=WeightsError):
        pretrained.read(tmp_path / "w.safetensors")


def test_positions_are_resized_only_if_allowed():
    small, large = draw_weights(), draw_weights()
    layout = make_layout()
    large[0]["pos_embed"] = np.zeros((1, 1 + 64, 13), np.float32)
    tensors = pretrained.export(small, layout)
    with refuses("pos_embed", "(1, 17, 13)", error=WeightsError):
        pretrained.load(tensors, layout, large)
    params, _ = pretrained.load(tensors, layout, large, Allowed(resize_positions=True))
    np.testing.assert_array_equal(params["pos_embed"][:, 0], tensors["pos_embed"][:, 0])
    grid = params["pos_embed"][0, 1:].reshape(8, 8, 13)
    # A linear ramp stays linear away from the edges for every kernel.
    ramp = np.zeros((1, 17, 13), np.float32)
    ramp[0, 1:] = np.arange(16, dtype=np.float32)[:, None] // 4
    resized = pretrained.resize_positions(ramp, (1, 65, 13))[0, 1:].reshape(8, 8, 13)
    np.testing.assert_allclose(np.diff(resized[2:6, 3, 0]), 0.5, atol=0.05)
    assert grid.shape == (8, 8, 13)
    # Next to a single peak a cubic kernel gives negative values, and a linear one does not.
    peak = np.zeros((1, 17, 1), np.float32)
    peak[0, 6] = 1
    assert pretrained.resize_positions(peak, (1, 65, 1)).min() < -0.01
    with refuses("(1, 14, 13)", "8 x 8", error=WeightsError):
        pretrained.resize_positions(ramp[:, :14], (1, 65, 13))


def test_training_starts_from_weights(tiny, meshes, tmp_path):
    run = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
    weights = jax.tree.map(np.asarray, fill_weights(run.state.weights))
    pretrained.write(tmp_path / "w.safetensors", pretrained.export(weights, run.model.layout("timm")))
    tiny.unlock()
    tiny.init_from.update(path=str(tmp_path / "w.safetensors"), layout="timm")
    state = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1)).initial_state()
    jax.tree.map(np.testing.assert_array_equal, state.weights, weights)
    jax.tree.map(np.testing.assert_array_equal, state.ema, weights)
    assert int(state.step) == 0
