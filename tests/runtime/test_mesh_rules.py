"""Meshes that cannot be are refused, with the nearest that can."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from leanformer import config
from leanformer.errors import ConfigError
from leanformer.layers.blocks import Stack
from leanformer.runtime import mesh as sharding
from leanformer.runtime.sharing import key_heads
from leanformer.training import checks, experiment, state


CONFIGS = Path(__file__).parents[2] / "configs"
IMPOSSIBLE = [
    ({"mesh.tensor": 0}, "mesh.tensor=0 must be at least 1"),
    ({"mesh.data": 3, "mesh.fsdp": 5}, "batch_size is 1024, which 15 devices cannot.*Nearest: 1020 or 1035"),
    ({"mesh.data": 32, "mesh.fsdp": 2, "accumulate": 32}, "batch_size / accumulate is 32, which 64 .*Nearest: 64"),
    ({"mesh.data": 8, "eval.batch_size": 100}, "eval.batch_size is 100, which 8 devices cannot.*Nearest: 96 or 104"),
    ({"mesh.data": 32}, "probe.examples is 16, which 32 devices cannot share out evenly. Nearest: 32"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_impossible_meshes_are_refused_by_check(changes, message):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        config.check(c)


# All but the number changed could be split.
SPLIT = [
    ("vit_b", {}, 5, r"The 12 heads of blocks.layers.attention.out.kernel .* mesh.tensor=5 .*that can: 4 or 6\."),
    ("vit_b", {"num_heads": 15}, 2, r"The 15 heads of blocks.layers.attention.* cannot .*that can: 1 or 3\."),
    ("vit_b", {"mlp_dim": 3070}, 4, r"The 3070 hidden channels of blocks.layers.mlp.* mesh.tensor=4 .*that can: 2\."),
    ("volo_d3_lean", {"class_heads": 12}, 8, r"The 12 heads of class_blocks.layers.class_attention.* .*can: 4\."),
    ("volo_d3_lean", {"num_heads": (16, 32, 30, 32)}, 4, r"The 30 heads of stage3.layers.attention.* .*can: 2\."),
    ("xcit_m_12x16", {"class_heads": 6}, 4, r"The 6 heads of class_blocks.* mesh.tensor=4 .*can: 2\."),
    ("xcit_m_12x16", {"class_mlp_dim": 2046}, 4, r"The 2046 hidden channels of class_blocks.* .*can: 2\."),
    ("tnt_b_8x16", {}, 8, r"The 4 heads of blocks.layers.inner.attention.* mesh.tensor=8 .*can: 4\."),
    ("davit_b_lean", {}, 8, r"The 4 heads of stage1.layers.* mesh.tensor=8 .*can: 4\."),
]


def axes_of(run):
    return state.axes(run.graphdef, run.like.weights)


def family(name, **changes):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.model.update(changes)
    return c


@pytest.mark.parametrize(("name", "changes", "tensor", "message"), SPLIT)
def test_every_number_of_heads_and_hidden_channels_must_be_divisible(name, changes, tensor, message):
    c = family(name, **changes)
    c.mesh.tensor = tensor
    with pytest.raises(ConfigError, match=message):
        checks.check(c)


@pytest.mark.parametrize("name", ["vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean"])
def test_check_allows_the_meshes_that_split_every_leaf(name):
    """What layers say that `tensor` splits, against what the keys of the config say."""
    c = family(name)
    axes = axes_of(experiment.build(c, examples=10**6, mesh=None))
    keys = [value for key, value in c.model.items() if key.endswith(("heads", "mlp_dim")) and value]
    split = {size for value in keys for size in (value if isinstance(value, tuple) else (value,))}
    assert len(split) > 1
    for tensor in range(1, 49):
        if all(size % tensor == 0 for size in split):
            sharding.check_split(axes, tensor)
        else:
            with pytest.raises(ConfigError, match="cannot be split over mesh.tensor"):
                sharding.check_split(axes, tensor)


def test_a_run_that_nobody_checked_is_not_held_whole_in_silence(tiny, meshes):
    with pytest.raises(ConfigError, match=r"The 3 heads of blocks.layers.attention.* mesh.tensor=2 "):
        experiment.build(tiny, examples=64, mesh=meshes(1, 1, 2))


class Unsaid(nnx.Module):
    """A block of which nothing is said, but of its keys."""

    branches, dropout = 0, 0.0

    def __init__(self, rngs):
        self.query, self.norm = nnx.Linear(16, 48, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.key = nnx.LinearGeneral(
            16, (3, 4), **{f"{leaf}_metadata": key_heads(-2) for leaf in ("kernel", "bias")}, rngs=rngs
        )


class Holder(nnx.Module):
    def __init__(self, rngs):
        self.blocks, self.head = Stack(Unsaid, 2, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)


def test_what_no_layer_says_is_refused_and_never_held_whole_in_silence():
    """Of two axes and more, in blocks: whatever its name, and that the keys are few is no error."""
    graphdef, _, weights = state.split(Holder)
    axes = state.axes(graphdef, weights)
    assert sharding.unsaid(axes) == {"blocks.layers.query.kernel": (2, 16, 48)}
    sharding.check_split(axes, 1)
    with pytest.raises(
        ConfigError, match=r"mesh.tensor=2: nothing says how devices share blocks.layers.query.kernel of"
    ):
        sharding.check_split(axes, 2)
    sharding.check_split({name: own for name, own in axes.items() if "query" not in name}, 2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((16, 1, 1), "mesh.data=16 x mesh.fsdp=1 x mesh.tensor=1 cannot be laid over 8 .*: data=8,fsdp=1,tensor=1 or "),
        ((-1, 3, 1), "mesh.data=-1 x mesh.fsdp=3 x mesh.tensor=1 .*: data=2,fsdp=4,tensor=1 or data=4,fsdp=2,tensor=1"),
        ((2, 2, 4), "Nearest that can: data=1,fsdp=2,tensor=4 or data=2,fsdp=1,tensor=4"),
        ((1, 1, 16), "Nearest that can: data=1,fsdp=1,tensor=8"),
    ],
)
def test_a_mesh_that_does_not_fit_names_those_that_do(asked, message):
    with pytest.raises(ConfigError, match=message):
        sharding.make_mesh(*asked)


@pytest.mark.parametrize(("asked", "made"), [((-1, 2, 2), (2, 2, 2)), ((2, -1, 1), (2, 4, 1)), ((8, 1, 1), (8, 1, 1))])
def test_what_is_left_is_taken(asked, made):
    mesh = sharding.make_mesh(*asked)
    assert tuple(mesh.shape.values()) == made and tuple(mesh.shape) == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sharding.shares(mesh) == made[0] * made[1]


def test_activations_are_left_alone_without_a_mesh():
    x = np.zeros((3, 2))
    assert sharding.keep_shared({"x": x})["x"] is x
