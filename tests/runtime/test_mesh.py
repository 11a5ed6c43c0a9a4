"""Meshes of eight devices compute what one does, every array lives where it was asked to, and none is impossible."""

import runpy
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from messages import mentions
from small_runs import fresh_state

from leanformer import config
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.runtime import mesh as sharding
from leanformer.runtime.sharing import REPLICATED, hidden
from leanformer.training import state as states
from leanformer.training import train_setup


STEPS = 5
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
    tiny.update(total_steps=20, log_every=1)
    tiny.model.update(width=16, num_heads=4, mlp_dim=24)
    return tiny


def batch_of(c, step):
    rng = np.random.default_rng(step)
    shape = (c.batch_size, c.model.image_size, c.model.image_size, c.model.channels)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, c.model.num_classes, c.batch_size).astype(np.int32)}


def specs(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.sharding.spec for path, leaf in leaves}


@pytest.mark.parametrize(("shape", "column"), [((8, 1, 1), None), ((1, 8, 1), 0), ((2, 2, 2), 1)])
def test_every_leaf_has_its_place(splittable, meshes, shape, column):
    """Parameters, both moments and averages as in SPECS; all else on every device. That a step returns them there:
    tests/training/test_sharding.py."""
    run = train_setup.build(splittable, examples=64, mesh=meshes(*shape))
    asked = {name: P() if column is None else pair[column] for name, pair in SPECS.items()}
    state, adam = run.state, run.state.moments[0]
    for tree in (state.params, adam.mu, adam.nu, state.ema[0]):
        assert specs(tree) == asked
    rest = (state.step, state.skipped, state.skipped_in_row, state.window, adam.count)
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(rest)} == {True}
    batch = sharding.put_batch(run.mesh, batch_of(splittable, 0))
    assert set(specs(batch).values()) == {P(("data", "fsdp"))}
    shares = shape[0] * shape[1]
    assert batch["image"].addressable_shards[0].data.shape[0] == splittable.batch_size // shares


def train(c, mesh):
    """Return the losses and the gradients' norms of some steps."""
    run = train_setup.build(c, examples=64, mesh=mesh)
    state, step, key, result = fresh_state(run), run.compile_train_step(), run.run_key(), []
    for i in range(STEPS):
        state, metrics = step(state, sharding.put_batch(run.mesh, batch_of(c, i)), key)
        assert {leaf.sharding.is_fully_replicated for leaf in metrics.values()} == {True}
        result.append([float(metrics["last_loss"]), float(metrics["grad_norm"])])
    return np.array(result).T


@pytest.mark.slow
def test_steps_on_eight_devices_are_those_on_one(splittable, meshes, unchecked):
    """Mixing, erasing, drop path, clipping and averaging on; one step of every task: tests/training/test_sharding.py.

    A gradient is rounded by 1e-5 of itself (rounding.py), and moves the weights along their way by about as much: after
    five steps losses and norms are known to 1e-4, where two steps differ by a hundredth.
    """
    expected = train(splittable, meshes(1, 1, 1))
    assert np.abs(np.diff(expected[0])).min() > 1e-3
    for shape in ((8, 1, 1), (1, 8, 1)):
        np.testing.assert_allclose(train(splittable, meshes(*shape)), expected, rtol=1e-4, err_msg=str(shape))


HEADS = {
    "one key head": {"num_kv_heads": 1},
    "latents": {
        **{"attention": "latent", "kv_rank": 8, "query_rank": 8, "latent_norm": "rmsnorm"},
        **{"rotary": 100.0, "rotary_width": 4},
    },
}
HELD = {  # what every device of `tensor` has whole, and what they share out
    "one key head": (["key"], ["query"]),
    "latents": (["latent", "turned"], ["key_up", "value_up", "query_up"]),
}


@pytest.fixture
def of_heads(splittable):
    """Builds a run with one of HEADS, without what has nothing to do with heads."""

    def changed(name):
        with splittable.unlocked():
            splittable.model.update(HEADS[name])
        splittable.augment.update(mixup=0.0, cutmix=0.0, erase=0.0)
        config.check(splittable)
        return splittable

    return changed


@pytest.mark.parametrize("name", HEADS)
def test_what_heads_have_in_common_is_held_by_all_that_split_them(of_heads, meshes, name):
    places = specs(train_setup.build(of_heads(name), examples=64, mesh=meshes(2, 1, 4)).state.params)
    for split, layers in enumerate(HELD[name]):
        for layer in layers:
            assert ("tensor" in places[f"blocks.layers.attention.{layer}.kernel"]) == split, layer


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_heads_in_common_give_the_same_losses(of_heads, meshes, name, unchecked):
    """As above."""
    result = [train(of_heads(name), meshes(*shape)) for shape in ((1, 1, 1), (2, 1, 4))]
    np.testing.assert_allclose(*result, rtol=1e-4)


def test_a_run_is_looked_at_on_whatever_devices_there_are(capsys):
    assert dict(sharding.make_fitting_mesh(data=2, fsdp=4).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert not capsys.readouterr().out
    assert dict(sharding.make_fitting_mesh(data=16, fsdp=4).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert mentions(capsys.readouterr().out, "mesh.data=16", "mesh.fsdp=4")


def held(tree):
    """Numbers on one device, and in all."""
    leaves = jax.tree.leaves(tree)
    whole = sum(leaf.size for leaf in leaves)
    return sum(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) for leaf in leaves), whole


@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), (2, 4), (4, 2)])
def test_a_device_holds_its_share_of_parameters_and_moments(meshes, data, fsdp):
    """Of a real model: at most 1 / fsdp and 5 %, small leaves being whole."""
    c = runpy.run_path(str(CONFIGS / "vit_b_7x16.py"))["get_config"]()
    like = train_setup.build(c, examples=50_000, mesh=meshes(data, fsdp)).state
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
        self.query = nnx.Linear(16, 24, kernel_metadata=REPLICATED, rngs=rngs)


class Holder(nnx.Module):
    def __init__(self, rngs):
        self.many, self.alone = Stack(Named, 8, rngs=rngs), Named(rngs)
        self.layers = nnx.Linear(8, 11, rngs=rngs)  # no stack, whatever its name


def test_layers_say_what_tensor_splits_whatever_the_names_and_moments_follow(meshes):
    """From the end, so layers may be stacked or not. What is said to be whole, and heads of keys too few, are whole."""
    graphdef, _, weights = states.split(Holder)
    axes = states.declared_axes(graphdef, weights)
    result = specs(states.with_shardings(jax.eval_shape(optax.adam(1.0).init, weights[0]), meshes(1, 1, 4), axes))
    for where, first in (("many.layers", (None,)), ("alone", ())):
        for moment in ("0.mu", "0.nu"):
            of = {
                name.removeprefix(f"{moment}.{where}."): spec
                for name, spec in result.items()
                if name.startswith(f"{moment}.{where}.") and spec != P()
            }
            assert of == {
                "mixing.query.kernel": P(*first, None, "tensor"),
                "mixing.query.bias": P(*first, "tensor"),
                "mixing.out.kernel": P(*first, "tensor"),
                "one.kernel": P(*first, None, "tensor"),
            }
    split = specs(states.with_shardings(weights[0], meshes(1, 1, 2), axes))
    assert split["alone.mixing.key.kernel"] == split["alone.mixing.value.kernel"] == P(None, "tensor")


def test_the_axis_of_stacked_layers_is_never_split(meshes, monkeypatch):
    monkeypatch.setattr(sharding, "SMALL", 1)
    graphdef, _, weights = states.split(Holder)
    result = specs(states.with_shardings(weights[0], meshes(1, 8), states.declared_axes(graphdef, weights)))
    assert result["many.layers.query.bias"] == P(None, "fsdp") and result["alone.query.bias"] == P("fsdp")
    assert result["many.layers.mixing.key.bias"] == P()  # 8 layers, 2 heads of 6
    assert result["layers.kernel"] == P("fsdp") and result["layers.bias"] == P()
