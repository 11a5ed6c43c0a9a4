"""Costs on a mesh: collectives of known programs, and those of the training step against closed forms."""

import json
import math
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import check_refused, command, run_in_process
from golden import check_page
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import mentions

from leanformer import cost
from leanformer.costs import hardware
from leanformer.programs import bounds, communication, compilation, hlo, plugin
from leanformer.programs.communication import Collective
from leanformer.reports.costs import table
from leanformer.runtime import mesh as sharding
from leanformer.training import train_setup


def read_collectives(function, mesh, *args):
    compiled, text = compilation.compile_and_read(jax.jit(function).lower(*args))
    return compiled, communication.read(text, mesh.shape)


def make_abstract(mesh, shape, *spec, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize(
    ("kind", "size", "moved"),  # in a ring of 4, for the result's size
    [
        ("all-gather", 12, 9),  # each device receives the 3 other quarters
        ("all-reduce", 12, 18),  # a reduce-scatter and an all-gather
        ("reduce-scatter", 3, 9),
        ("all-to-all", 12, 9),
        ("collective-permute", 12, 12),
    ],
)
def test_bytes_moved_in_a_ring(kind, size, moved):
    once = Collective(kind, (0, 1, 2, 3), ("data",), size, times=1, sliced=False)
    five = Collective(kind, (0, 1, 2, 3), ("data",), size, times=5, sliced=True)
    assert once.moved() == moved and once.moved(scatter=True) == moved
    assert five.moved() == 5 * moved and five.moved(scatter=True) == 2.5 * moved


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=3] {'data','tensor'}, x=1", (0, 1, 2, 6, 7, 8)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=3] {'axis_0'}, x=1", (0, 3, 6, 9)),
        ("replica_groups=[6,2]<=[2,2,3]T(1,2,0), x=1", (0, 6)),
        ("replica_groups=[3,4]<=[12], x=1", (0, 1, 2, 3)),
        ("replica_groups={{0,5},{1,2}}, x=1", (0, 5)),
        ("replica_groups={}, x=1", tuple(range(12))),
        ("source_target_pairs={{0,0},{1,7},{7,1}}, x=1", (1, 7)),
    ],
)
def test_device_groups_are_parsed_in_every_notation(text, group):
    assert hlo.group(text, 12) == group


def test_loop_of_matmuls_and_all_reduces(meshes):
    """Seven iterations of a matmul of a device's 6 rows and an all-reduce of 5 x 5 numbers over `data`."""
    mesh = meshes(2, 2, 2)

    def run(x, w):
        return jax.lax.scan(lambda w, _: (w + x.T @ (x @ w), None), w, length=7)[0]

    _, loops = read_collectives(run, mesh, make_abstract(mesh, (12, 5), "data"), make_abstract(mesh, (5, 5)))
    (loop,) = loops
    (reduce,) = loop.collectives
    assert (loop.name, loop.turns, loop.flops) == ("loop", 7, 2 * 2 * 6 * 5 * 5)
    assert (reduce.kind, reduce.axes, reduce.group, reduce.times) == ("all-reduce", ("data",), (0, 4), 7)
    assert reduce.size == 5 * 5 * 4 and not reduce.sliced


def test_both_branches_of_a_conditional_are_counted(meshes):
    mesh = meshes(8, 1)

    def run(x, flag):
        return jax.lax.cond(flag, lambda x: x @ jnp.ones((5, 3)), lambda x: 2 * x @ jnp.ones((5, 3)), x)

    _, loops = read_collectives(run, mesh, make_abstract(mesh, (16, 5), "data"), make_abstract(mesh, (), dtype=bool))
    assert sum(loop.flops * loop.turns for loop in loops) == 2 * 2 * 2 * 5 * 3


def test_sliced_all_reduce_is_counted_as_reduce_scatter(meshes):
    mesh = meshes(1, 8)
    place = NamedSharding(mesh, P("fsdp"))

    def run(x, y):
        return jax.lax.with_sharding_constraint(x.T @ y, place)

    _, loops = read_collectives(run, mesh, make_abstract(mesh, (16, 24), "fsdp"), make_abstract(mesh, (16, 3), "fsdp"))
    result = [x for loop in loops for x in loop.collectives]
    assert sum(x.moved(scatter=True) for x in result) == 24 * 3 * 4 * 7 / 8


def test_all_gather_is_counted_in_its_original_dtype(meshes):
    """It is bfloat16 in the source, and float32 after XLA's conversion for CPUs."""
    mesh = meshes(1, 8)

    def run(x, w):
        return x @ w.astype(jnp.bfloat16)

    shapes = make_abstract(mesh, (16, 24), "fsdp", dtype=jnp.bfloat16), make_abstract(mesh, (24, 8), "fsdp")
    compiled, loops = read_collectives(run, mesh, *shapes)
    assert [x.size for loop in loops for x in loop.collectives] == [24 * 8 * 2]
    assert "f32[24,8]" in compiled.as_text()


def test_loop_of_unknown_length_is_refused(meshes):
    mesh = meshes(8, 1)

    def run(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + x.sum(), x)

    with pytest.raises(NotImplementedError):
        read_collectives(run, mesh, make_abstract(mesh, (16, 4), "data"))


def test_single_device_has_no_communication(meshes):
    _, loops = read_collectives(lambda x: x @ x, meshes(1, 1), make_abstract(meshes(1, 1), (3, 3)))
    assert [(x.name, x.turns, x.flops, x.collectives) for x in loops] == [("outside", 1, 2 * 3**3, ())]


def test_cached_program_is_read_again(meshes, cache_all_programs):
    mesh = meshes(8, 1)
    shapes = make_abstract(mesh, (16, 5), "data"), make_abstract(mesh, (5, 3))
    first, second = (read_collectives(lambda x, w: (x @ w).sum(axis=0), mesh, *shapes)[1] for _ in range(2))
    assert first == second and sum(len(loop.collectives) for loop in first) == 1
    assert jax.config.jax_enable_compilation_cache  # restored for later compilations


@pytest.fixture
def small(tiny, monkeypatch):
    """Return a float32 config with widths that eight devices can split; all divisible leaves are split."""
    monkeypatch.setattr(sharding, "SMALL", 1)
    tiny.probe.every = 0
    tiny.model.update(width=16, num_heads=4, mlp_dim=24, remat="none")
    return tiny


def sum_bytes_by_kind(costs):
    result = {}
    for row in costs["collectives"]:
        key = (row["kind"], *row["axes"])
        result[key] = result.get(key, 0) + row["bytes_moved"]
    return result


def test_data_parallel_all_reduces_every_gradient_once(small):
    """Sends 4 bytes x parameters x 2 (n - 1) / n, the mean loss, and images, labels and keys of mixing partners."""
    small.mesh.update(data=8, fsdp=1)
    costs = cost.mesh_cost(small, jax.devices()[: math.prod(small.mesh.values())])
    params, examples = costs["params"], small.batch_size // 8
    scalars = 4
    assert sum_bytes_by_kind(costs) == {
        ("all-reduce", "data"): 4 * (params + 1) * 2 * 7 / 8,
        ("collective-permute", "data"): examples * (14 * 14 + 4 + 8),
    }
    assert costs["bytes_moved_scattering"] == costs["bytes_moved"]
    sizes = costs["bytes_per_device"]
    assert sizes["parameters"] == 4 * params and sizes["moments"] == 2 * 4 * params + scalars
    assert sizes["averages"] == 4 * params and sizes["batch"] == examples * (14 * 14 + 4)
    # Eight devices compute each matmul of the model once, except Q Kᵀ, which attention's gradient recomputes.
    _, training = train_setup.build(small, examples=64, mesh=None).flops_per_example
    tokens, m = (small.model.image_size // small.model.patch_size) ** 2 + 1, small.model
    recomputed = m.depth * m.num_heads * 2 * tokens**2 * m.head_dim
    assert costs["flops_per_device"] * 8 == (training + recomputed) * small.batch_size


def test_fully_sharded_moves_parameters_and_never_activations(small, monkeypatch):
    """Each split leaf is gathered for the forward and backward pass, and its gradient is reduced and sliced."""
    small.augment.update(mixup=0.0, cutmix=0.0, erase=0.0)  # the test above covers their communication
    original, programs = compilation.compile_and_read, []
    monkeypatch.setattr(compilation, "compile_and_read", lambda x: programs.append(original(x)) or programs[-1])
    small.mesh.update(data=1, fsdp=8)
    costs = cost.mesh_cost(small, jax.devices()[: math.prod(small.mesh.values())])
    params = costs["params"]
    moved = sum_bytes_by_kind(costs)
    ring = 4 * params * 7 / 8
    assert 1.5 * ring < moved["all-gather", "fsdp"] < 2.1 * ring
    assert 0.9 * ring < costs["bytes_moved_scattering"] - moved["all-gather", "fsdp"] < 1.3 * ring
    unsplit = small.model.num_classes  # the head's bias cannot be split
    assert costs["bytes_per_device"]["parameters"] == 4 * ((params - unsplit) / 8 + unsplit)
    # The largest array a layer may send is its largest weight; its activations, 16 x 5 x 16, are larger.
    layers = [loop for loop in communication.read(programs[0][1], costs["mesh"]) if loop.turns == small.model.depth]
    assert [loop.name for loop in layers] == ["forward", "backward"]
    assert max(x.size for loop in layers for x in loop.collectives) == 4 * 16 * 4 * 8 < 4 * 16 * 5 * 16


def test_lower_bound_on_step_time():
    gather = Collective("all-gather", tuple(range(8)), ("fsdp",), size=8 * 450_000, times=7, sliced=False)
    loops = [communication.Loop("forward", 7, 989_000_000, (gather,)), communication.Loop("outside", 1, 0, ())]
    bound = bounds.lower_bounds("H100", loops)
    assert math.isclose(bound["products_s"], 7e-6) and math.isclose(bound["sending_s"], 7 * 7e-6)
    assert bound["overlapped_s"] == bound["sending_s"]
    assert math.isclose(bound["one_after_the_other_s"], 8 * 7e-6)
    assert math.isclose(bound["loops"][0]["sending_to_products"], 7) and len(bound["loops"]) == 1


@pytest.mark.slow
def test_mesh_larger_than_this_machine():
    words = ["--mesh=data=16,fsdp=4,tensor=2", "--config.batch_size=128", "--config.eval.batch_size=128", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    process = subprocess.run(command("cost") + words, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    costs = json.loads(process.stdout)
    assert costs["mesh"] == {"data": 16, "fsdp": 4, "tensor": 2} and costs["batch_size"] == 128
    assert {axis for row in costs["collectives"] for axis in row["axes"]} == {"data", "fsdp", "tensor"}
    assert set(costs["floors"]) == set(hardware.LINKED)


def test_too_large_step_for_another_device_is_reported(monkeypatch):
    """Eight devices of this machine replace GPUs of very little memory."""
    monkeypatch.setattr(plugin, "devices", lambda name, count: jax.devices()[:count])
    monkeypatch.setattr(plugin, "memory", lambda name: 4_000_000)
    words = ["--device=h100", "--mesh=data=2", "--config.batch_size=16", "--config.eval.batch_size=16", "--json"]
    status, out, err = run_in_process(command("cost") + words)
    result = json.loads(out)
    assert status == 2 and result["mesh"]["data"] == 2 and result["limit_bytes"] == 3_000_000
    assert mentions(err, "3 MB", "4 MB", "--config.model.remat=block", "--config.mesh.fsdp=2")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--mesh=data=7"], ["batch_size", 128, 7, 126, 133]),
        (["--mesh=pipeline=7"], ["pipeline", "data", "fsdp", "tensor"]),
        (["--mesh=data=-1"], ["--mesh=data=-1", 1]),
        (["--mesh=data=16"], ["--mesh", 16, 8]),
        (["--mesh=data=2", "--against=configs/quickstart.py"], ["--against", "--mesh"]),
        (["--device=h100", "--against=configs/quickstart.py"], ["--against", "--device"]),
        (["--device=h100", "--mesh=data=7"], ["batch_size", 128, 7, 126, 133]),
        (["--device=abacus"], ["--device=abacus", "b200", "h100"]),
    ],
)
def test_impossible_meshes_are_one_message(words, parts):
    check_refused(command("cost") + words, *parts)


def make_costs(**changes):
    defaults = {"params": 6, "forward_flops": 20, "train_flops": 60, "train_memory_bytes": 5000, "batch_size": 128}
    return defaults | {"modules": {"head": 6}, "device": "cpu"} | changes


def test_table_of_two_configs():
    check_page("cost", table("quickstart", make_costs(), make_costs(params=3), "vit_b:depth=8,heads=14"))


def test_memory_of_another_batch_size_is_marked():
    """Memory at different batch sizes has no ratio."""
    other, same = (table("quickstart", make_costs(), make_costs(batch_size=size), "vit_b") for size in (1024, 128))
    assert mentions(other, "5,000 B", 1024, "1.000") and not mentions(same, 1024)
    assert mentions(table("quickstart", make_costs(), make_costs(params=3), "vit_b"), "2.000")
