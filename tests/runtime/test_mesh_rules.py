"""Refusal of invalid meshes."""

import runpy
from pathlib import Path

import pytest
from flax import nnx
from jax.sharding import AxisType
from messages import refuses

from leanformer import config
from leanformer.config.rules import sharded_batches
from leanformer.layers.stack import Stack
from leanformer.runtime import mesh as sharding
from leanformer.runtime.mesh import over_key_heads
from leanformer.training import model_setup


CONFIGS = Path(__file__).parents[2] / "configs"
UNEVEN = [  # batches on 8 devices
    ({"batch_size": 1020}, "batch_size=1020"),
    ({"accumulate": 256}, "batch_size / accumulate=4"),
    ({"eval.batch_size": 100}, "eval.batch_size=100"),
    ({"probe.examples": 12}, "probe.examples=12"),
]


@pytest.mark.parametrize(("changes", "part"), UNEVEN)
def test_batches_that_devices_do_not_share_evenly_are_refused(changes, part, meshes):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with refuses(part, 8):
        sharding.check_batches(meshes(4, 2), sharded_batches(c))


# Only the changed number is not divisible by mesh.tensor. The message has the number and its layer.
INDIVISIBLE = [
    ("vit_b", {}, 5, ["12 heads", "blocks.layers.attention"]),
    ("volo_d3_lean", {"num_heads": (16, 32, 30, 32)}, 4, ["30 heads", "stage3.layers.attention"]),
    ("tnt_b_8x16", {}, 8, ["4 heads", "blocks.layers.inner.attention"]),
]


def load_config(name, **changes):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.model.update(changes)
    return c


@pytest.mark.parametrize(("name", "changes", "tensor", "parts"), INDIVISIBLE)
def test_heads_and_hidden_channels_must_be_divisible(name, changes, tensor, parts):
    graphdef, _, weights = model_setup.abstract_model(load_config(name, **changes))
    with refuses(f"mesh.tensor={tensor}", *parts):
        sharding.check_split(model_setup.declared_axes(graphdef, weights), tensor)


@pytest.mark.parametrize("name", ["vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean"])
def test_check_split_accepts_exactly_the_divisible_meshes(name):
    """The `tensor` axes that layers declare agree with the sizes in the config."""
    c = load_config(name)
    graphdef, _, weights = model_setup.abstract_model(c)
    axes = model_setup.declared_axes(graphdef, weights)
    values = [value for key, value in c.model.items() if key.endswith(("heads", "mlp_dim")) and value]
    split = {size for value in values for size in (value if isinstance(value, tuple) else (value,))}
    assert len(split) > 1
    for tensor in range(1, 49):
        if all(size % tensor == 0 for size in split):
            sharding.check_split(axes, tensor)
        else:
            with refuses(f"mesh.tensor={tensor}"):
                sharding.check_split(axes, tensor)


class UndeclaredBlock(nnx.Module):
    """Block that declares `tensor` axes for its keys only."""

    branches, dropout = 0, 0.0

    def __init__(self, rngs):
        self.query, self.norm = nnx.Linear(16, 48, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.key = nnx.LinearGeneral(
            16, (3, 4), **{f"{leaf}_metadata": over_key_heads(-2) for leaf in ("kernel", "bias")}, rngs=rngs
        )


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks, self.head = Stack(UndeclaredBlock, 2, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)


def test_parameters_without_declared_axes_are_refused():
    """This holds for parameters of blocks with two or more axes, whatever the names. Too few key heads are no error."""
    graphdef, _, weights = model_setup.split_model(Model)
    axes = model_setup.declared_axes(graphdef, weights)
    assert sharding.undeclared_parameters(axes) == {"blocks.layers.query.kernel": (2, 16, 48)}
    sharding.check_split(axes, 1)
    with refuses("mesh.tensor=2", "blocks.layers.query.kernel", (2, 16, 48)):
        sharding.check_split(axes, 2)
    sharding.check_split({name: axis for name, axis in axes.items() if "query" not in name}, 2)


@pytest.mark.parametrize("requested", [(16, 1, 1), (-1, 3, 1), (2, 2, 4)])
def test_mesh_of_another_number_of_devices_is_refused(requested):
    with refuses("mesh.data", "mesh.fsdp", "8 devices"):
        sharding.make_mesh(*requested)


@pytest.mark.parametrize(
    ("requested", "expected"), [((-1, 2, 2), (2, 2, 2)), ((2, -1, 1), (2, 4, 1)), ((8, 1, 1), (8, 1, 1))]
)
def test_minus_one_takes_the_remaining_devices(requested, expected):
    mesh = sharding.make_mesh(*requested)
    assert tuple(mesh.shape.values()) == expected and tuple(mesh.shape) == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sharding.count_batch_shards(mesh) == expected[0] * expected[1]
