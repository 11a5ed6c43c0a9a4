"""Meshes of eight devices compute what one does, every array lives where it was asked to, and none is impossible."""

import contextlib
import runpy
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from leanformer import config, tasks
from leanformer.layers.blocks import Stack
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.runtime import mesh as sharding
from leanformer.runtime.sharing import WHOLE, hidden
from leanformer.training import experiment, streams
from leanformer.training import state as states
from leanformer.training.checkpoint import Checkpoints


STEPS = 20
CONFIGS = Path(__file__).parents[2] / "configs"
# By hand, for width 16, 4 heads of width 8, MLP 24, 5 tokens, 5 classes, every leaf split that can be.
LAYERS = {  # fsdp 8; data 2 x fsdp 2 x tensor 2
    "attention.key.bias": (P(None, None, "fsdp"), P(None, "tensor", "fsdp")),  # L N H
    "attention.key.kernel": (P(None, "fsdp"), P(None, "fsdp", "tensor")),  # L D N H
    "attention.out.bias": (P(None, "fsdp"), P(None, "fsdp")),  # L D
    "attention.out.kernel": (P(None, None, None, "fsdp"), P(None, "tensor", None, "fsdp")),  # L N H D
    "attention.query.bias": (P(None, None, "fsdp"), P(None, "tensor", "fsdp")),
    "attention.query.kernel": (P(None, "fsdp"), P(None, "fsdp", "tensor")),
    "attention.value.bias": (P(None, None, "fsdp"), P(None, "tensor", "fsdp")),
    "attention.value.kernel": (P(None, "fsdp"), P(None, "fsdp", "tensor")),
    "mlp.down.bias": (P(None, "fsdp"), P(None, "fsdp")),
    "mlp.down.kernel": (P(None, "fsdp"), P(None, "tensor", "fsdp")),  # L F D
    "mlp.up.bias": (P(None, "fsdp"), P(None, "tensor")),  # L F
    "mlp.up.kernel": (P(None, None, "fsdp"), P(None, "fsdp", "tensor")),  # L D F
    **{f"norm{i}.{leaf}": (P(None, "fsdp"), P(None, "fsdp")) for i in (1, 2) for leaf in ("bias", "scale")},
}
SPECS = {f"blocks.layers.{name}": specs for name, specs in LAYERS.items()} | {
    "cls_token": (P(None, None, "fsdp"), P(None, None, "fsdp")),
    "head.bias": (P(), P()),  # 5 classes
    "head.kernel": (P("fsdp"), P("fsdp")),
    "norm.bias": (P("fsdp"), P("fsdp")),
    "norm.scale": (P("fsdp"), P("fsdp")),
    "patch_embed.bias": (P("fsdp"), P("fsdp")),
    "patch_embed.kernel": (P(None, "fsdp"), P(None, "fsdp")),  # 49 pixels
    "pos_embed": (P(None, None, "fsdp"), P(None, None, "fsdp")),
}


@pytest.fixture
def splittable(tiny, monkeypatch):
    """The tiny config with widths that eight devices, and two with two, can split; and every leaf split that can be."""
    monkeypatch.setattr(sharding, "SMALL", 1)
    tiny.update(total_steps=STEPS, log_every=1)
    tiny.model.update(width=16, num_heads=4, mlp_dim=24)
    return tiny


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def compiled(splittable, meshes, kept, unchecked):
    """The splittable run on a mesh and its training step, compiled once for all tests here."""

    def program(*shape):
        if shape not in kept:
            run = experiment.build(splittable, examples=64, mesh=meshes(*shape))
            kept[shape] = run, run.compile_train_step()
        return kept[shape]

    return program


def batch_of(c, step):
    rng = np.random.default_rng(step)
    shape = (c.batch_size, c.model.image_size, c.model.image_size, c.model.channels)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, c.model.num_classes, c.batch_size).astype(np.int32)}


def specs(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.sharding.spec for path, leaf in leaves}


def check_places(state, batch, column):
    """Parameters, both moments and averages as in SPECS; the batch and all else."""
    asked = {name: pair[column] for name, pair in SPECS.items()}
    adam = state.moments[0]
    for tree in (state.params, adam.mu, adam.nu, state.ema[0]):
        assert specs(tree) == asked
    rest = (state.step, state.skipped, state.skipped_in_row, state.window, adam.count)
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(rest)} == {True}
    assert set(specs(batch).values()) == {P(("data", "fsdp"))}


def train(run, step):
    """Losses of every step and the gradients' norms, the last state, the last batch and the last metrics."""
    state, key = run.initial_state(), run.run_key()
    losses, norms = [], []
    for i in range(STEPS):
        batch = sharding.put_batch(run.mesh, batch_of(run.config, i))
        state, metrics = step(state, batch, key)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return np.asarray(losses), np.asarray(norms), state, batch, metrics


def test_twenty_steps_on_eight_devices_are_those_on_one(compiled):
    """Mixing, erasing, drop path, clipping and averaging on; and what the last step returns lives where it should."""
    expected, lengths, last, *_ = train(*compiled(1, 1, 1))
    assert len(set(expected)) == STEPS
    for shape in ((8, 1, 1), (1, 8, 1), (2, 2, 2)):
        run, step = compiled(*shape)
        losses, norms, state, batch, metrics = train(run, step)
        np.testing.assert_allclose(losses, expected, rtol=2e-6, err_msg=str(shape))
        np.testing.assert_allclose(norms, lengths, rtol=2e-5, err_msg=str(shape))
        for x, y in zip(jax.tree.leaves(last.moments), jax.tree.leaves(state.moments), strict=True):
            np.testing.assert_allclose(jax.device_get(x), jax.device_get(y), atol=1e-5, rtol=1e-4, err_msg=str(shape))
        assert {leaf.sharding.is_fully_replicated for leaf in metrics.values()} == {True}
        shares = shape[0] * shape[1]
        assert batch["image"].addressable_shards[0].data.shape[0] == run.config.batch_size // shares
        if shape == (8, 1, 1):
            assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state)} == {True}
        else:
            check_places(state, batch, [(1, 8, 1), (2, 2, 2)].index(shape))


def test_few_heads_of_keys_are_held_by_all_that_split_the_queries(splittable, meshes):
    with splittable.unlocked():
        splittable.model.num_kv_heads = 1
    places = specs(_equal_losses(splittable, meshes).like.params)
    assert "tensor" in places["blocks.layers.attention.query.kernel"]
    assert "tensor" not in places["blocks.layers.attention.key.kernel"]


def _equal_losses(c, meshes):
    """Of three steps on one device and on eight; the run on eight."""
    c.augment.update(mixup=0.0, cutmix=0.0, erase=0.0)  # which have nothing to do with heads
    config.check(c)
    losses = []
    for shape in ((1, 1, 1), (2, 1, 4)):
        run = experiment.build(c, examples=64, mesh=meshes(*shape))
        state, found = run.initial_state(), []
        step = jax.jit(run.train_step)
        for i in range(3):
            state, metrics = step(state, sharding.put_batch(run.mesh, batch_of(run.config, i)), run.run_key())
            found.append(float(metrics["loss"]))
        losses.append(found)
    np.testing.assert_allclose(*losses, rtol=2e-6)
    return run


def test_latents_are_held_by_all_that_split_the_heads(splittable, meshes):
    with splittable.unlocked():
        splittable.model.update(attention="latent", kv_rank=8, query_rank=8, latent_norm="rmsnorm")
        splittable.model.update(rotary=100.0, rotary_width=4)
    places = specs(_equal_losses(splittable, meshes).like.params)
    for name, split in (("latent", False), ("turned", False), ("key_up", True), ("value_up", True), ("query_up", True)):
        assert ("tensor" in places[f"blocks.layers.attention.{name}.kernel"]) == split


def test_a_run_is_looked_at_on_whatever_devices_there_are(capsys):
    assert dict(sharding.fitting(data=2, fsdp=4).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert not capsys.readouterr().out
    assert dict(sharding.fitting(data=16, fsdp=4).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert "Not on the mesh of the run: mesh.data=16 x mesh.fsdp=4" in capsys.readouterr().out


def go_on(run, step, folder, source, steps):
    """Trains from what is in `folder`, or from scratch, and saves. The loss and the examples of each step."""
    losses, examples = {}, {}
    with Checkpoints(folder) as saved:
        state, _ = saved.restore(run.like) or (run.initial_state(), {})
        start, key = int(state.step), run.run_key()
        with contextlib.closing(streams.train(run, source, start)) as batches:
            for number, host in zip(range(start + 1, start + steps + 1), batches, strict=False):
                state, metrics = step(state, streams.put(run, host), key)
                losses[number], examples[number] = float(metrics["loss"]), host["index"].tolist()
        saved.save(start + steps, state)
    return losses, examples


@pytest.mark.slow
def test_saved_on_eight_devices_restored_on_one_two_four_and_eight(tmp_path, compiled):
    """The next ten losses and examples are those of the run that stays where it was, whatever the new mesh."""
    run, step = compiled(1, 8, 1)
    source, _ = tasks.open_data(run.task, run.config)
    go_on(run, step, tmp_path / "saved", source, 3)
    others = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (8, 1, 1), (2, 2, 2)]
    copies = {shape: shutil.copytree(tmp_path / "saved", tmp_path / str(shape)) for shape in others}
    losses, examples = go_on(run, step, tmp_path / "saved", source, 10)
    assert [*losses] == [*range(4, 14)] and len(set(losses.values())) == 10
    for shape, folder in copies.items():
        found, seen = go_on(*compiled(*shape), folder, source, 10)
        assert [*found] == [*losses] and seen == examples
        np.testing.assert_allclose([*found.values()], [*losses.values()], rtol=2e-6, err_msg=str(shape))


def held(tree):
    """Numbers on one device, and in all."""
    leaves = jax.tree.leaves(tree)
    whole = sum(leaf.size for leaf in leaves)
    return sum(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) for leaf in leaves), whole


@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), (2, 4), (4, 2)])
def test_a_device_holds_its_share_of_parameters_and_moments(meshes, data, fsdp):
    """Of a real model: at most 1 / fsdp and 5 %, small leaves being whole."""
    c = runpy.run_path(str(CONFIGS / "vit_b_7x16.py"))["get_config"]()
    like = experiment.build(c, examples=50_000, mesh=meshes(data, fsdp)).like
    for tree in (like.params, like.moments):
        part, whole = held(tree)
        assert whole / fsdp <= part <= 1.05 * whole / fsdp
    assert held(like.params)[1] == 40_112_872


class Named(nnx.Module):
    """A block whose parameters have names that say nothing, or the wrong thing."""

    branches, dropout = 0, 0.0

    def __init__(self, rngs):
        self.mixing = MultiHeadAttention(16, 4, 6, num_kv_heads=2, rngs=rngs)
        self.one = nnx.Linear(16, 24, kernel_metadata=hidden(-1), rngs=rngs)
        self.query = nnx.Linear(16, 24, kernel_metadata=WHOLE, rngs=rngs)


class Holder(nnx.Module):
    def __init__(self, rngs):
        self.many, self.alone = Stack(Named, 8, rngs=rngs), Named(rngs)
        self.layers = nnx.Linear(8, 11, rngs=rngs)  # no stack, whatever its name


def test_layers_say_what_tensor_splits_whatever_the_names_and_moments_follow(meshes):
    """From the end, so layers may be stacked or not. What is said to be whole, and heads of keys too few, are whole."""
    graphdef, _, weights = states.split(Holder)
    axes = states.axes(graphdef, weights)
    found = specs(states.placed(jax.eval_shape(optax.adam(1.0).init, weights[0]), meshes(1, 1, 4), axes))
    for where, first in (("many.layers", (None,)), ("alone", ())):
        for moment in ("0.mu", "0.nu"):
            of = {
                name.removeprefix(f"{moment}.{where}."): spec
                for name, spec in found.items()
                if name.startswith(f"{moment}.{where}.") and spec != P()
            }
            assert of == {
                "mixing.query.kernel": P(*first, None, "tensor"),
                "mixing.query.bias": P(*first, "tensor"),
                "mixing.out.kernel": P(*first, "tensor"),
                "one.kernel": P(*first, None, "tensor"),
            }
    split = specs(states.placed(weights[0], meshes(1, 1, 2), axes))
    assert split["alone.mixing.key.kernel"] == split["alone.mixing.value.kernel"] == P(None, "tensor")


def test_the_axis_of_stacked_layers_is_never_split(meshes, monkeypatch):
    monkeypatch.setattr(sharding, "SMALL", 1)
    graphdef, _, weights = states.split(Holder)
    found = specs(states.placed(weights[0], meshes(1, 8), states.axes(graphdef, weights)))
    assert found["many.layers.query.bias"] == P(None, "fsdp") and found["alone.query.bias"] == P("fsdp")
    assert found["many.layers.mixing.key.bias"] == P()  # 8 layers, 2 heads of 6
    assert found["layers.kernel"] == P("fsdp") and found["layers.bias"] == P()
