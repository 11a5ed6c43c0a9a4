"""Training on meshes of eight devices: the results of one device, and the expected sharding of every array."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from small_runs import make_image_batch

from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import Stack
from leanformer.runtime import mesh as sharding
from leanformer.runtime.mesh import REPLICATED, flatten_names, over_hidden
from leanformer.training import model_setup, train_setup


CONFIGS = Path(__file__).parents[2] / "configs"
# Written by hand for width 16, 4 heads, head_dim 8, MLP 24, 5 tokens, 5 classes; every leaf sharded that can be.
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
def shardable(tiny, monkeypatch):
    """Return the tiny config with sizes that 8 and 2 x 2 x 2 devices can shard; every leaf is sharded that can be."""
    monkeypatch.setattr(sharding, "MIN_FSDP_ELEMENTS", 1)
    tiny.update(total_steps=20, log_every=1)
    tiny.model.update(width=16, num_heads=4, mlp_dim=24)
    return tiny


def get_specs(tree):
    return {name: leaf.sharding.spec for name, leaf in flatten_names(tree).items()}


@pytest.mark.parametrize(("shape", "column"), [((8, 1, 1), None), ((1, 8, 1), 0), ((2, 2, 2), 1)])
def test_every_leaf_has_the_expected_sharding(shardable, meshes, shape, column):
    """Parameters, both moments and EMA weights are sharded as in SPECS, everything else is replicated. The shardings
    after a step are checked in tests/training/test_sharding.py."""
    run = train_setup.set_up_training(shardable, examples=64, mesh=meshes(*shape))
    expected = {name: P() if column is None else pair[column] for name, pair in SPECS.items()}
    state, adam = run.state, run.state.moments[0]
    for tree in (state.params, adam.mu, adam.nu, state.ema[0]):
        assert get_specs(tree) == expected
    rest = (state.step, state.skipped, state.skipped_in_row, state.window, adam.count)
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(rest)} == {True}
    batch = sharding.put_batch(run.model.mesh, make_image_batch(np.random.default_rng(0), shardable))
    assert set(get_specs(batch).values()) == {P(("data", "fsdp"))}
    shards = shape[0] * shape[1]
    assert batch["image"].addressable_shards[0].data.shape[0] == shardable.batch_size // shards


LATENT = {"attention": "latent", "kv_rank": 8, "query_rank": 8, "latent_norm": "rmsnorm", "rotary": 100.0}


@pytest.mark.parametrize(
    ("changes", "replicated", "split"),
    [
        ({"num_kv_heads": 1}, ["key"], ["query"]),
        (LATENT | {"rotary_width": 4}, ["latent", "turned"], ["key_up", "value_up", "query_up"]),
    ],
    ids=["one key head", "latents"],
)
def test_layers_shared_by_heads_are_replicated_over_tensor(shardable, meshes, changes, replicated, split):
    with shardable.unlocked():
        shardable.model.update(changes)
    shardings = get_specs(train_setup.set_up_training(shardable, examples=64, mesh=meshes(2, 1, 4)).state.params)
    for layer in (*replicated, *split):
        assert ("tensor" in shardings[f"blocks.layers.attention.{layer}.kernel"]) == (layer in split), layer


class MisnamedBlock(nnx.Module):
    """Block whose parameters have uninformative or misleading names."""

    branches, dropout = 0, 0.0

    def __init__(self, rngs):
        self.mixing = MultiHeadAttention(16, 4, 6, num_kv_heads=2, rngs=rngs)
        self.one = nnx.Linear(16, 24, kernel_metadata=over_hidden(-1), rngs=rngs)
        self.query = nnx.Linear(16, 24, kernel_metadata=REPLICATED, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.many, self.alone = Stack(MisnamedBlock, 8, rngs=rngs), MisnamedBlock(rngs)
        self.layers = nnx.Linear(8, 11, rngs=rngs)  # not a stack, despite its name


def test_tensor_sharding_follows_layers_and_not_names(meshes):
    """Axes count from the last, so layers may be stacked or not; moments follow.

    Layers that are declared replicated, and keys with too few heads, are replicated.
    """
    graphdef, _, weights = model_setup.split_model(Model)
    axes = model_setup.declared_axes(graphdef, weights)
    result = get_specs(
        model_setup.with_shardings(jax.eval_shape(optax.adam(1.0).init, weights[0]), meshes(1, 1, 4), axes)
    )
    for prefix, leading in (("many.layers", (None,)), ("alone", ())):
        for moment in ("0.mu", "0.nu"):
            sharded = {
                name.removeprefix(f"{moment}.{prefix}."): spec
                for name, spec in result.items()
                if name.startswith(f"{moment}.{prefix}.") and spec != P()
            }
            assert sharded == {
                "mixing.query.kernel": P(*leading, None, "tensor"),
                "mixing.query.bias": P(*leading, "tensor"),
                "mixing.out.kernel": P(*leading, "tensor"),
                "one.kernel": P(*leading, None, "tensor"),
            }
    split = get_specs(model_setup.with_shardings(weights[0], meshes(1, 1, 2), axes))
    assert split["alone.mixing.key.kernel"] == split["alone.mixing.value.kernel"] == P(None, "tensor")


def test_axis_of_stacked_layers_is_never_sharded(meshes, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_FSDP_ELEMENTS", 1)
    graphdef, _, weights = model_setup.split_model(Model)
    result = get_specs(
        model_setup.with_shardings(weights[0], meshes(1, 8), model_setup.declared_axes(graphdef, weights))
    )
    assert result["many.layers.query.bias"] == P(None, "fsdp") and result["alone.query.bias"] == P("fsdp")
    assert result["many.layers.mixing.key.bias"] == P()  # 8 layers, 2 heads of 6
    assert result["layers.kernel"] == P("fsdp") and result["layers.bias"] == P()
