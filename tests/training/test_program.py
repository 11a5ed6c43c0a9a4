"""Program of a training step: the text that the compiler receives, and the compiler options."""

import re
import runpy
from pathlib import Path

import pytest
from flax import nnx

from leanformer.layers.stack import Stack
from leanformer.runtime import mesh
from leanformer.training import train_setup
from tools.gpu.absent import Gpu, pretend_attached


CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = ["vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean", "nystromformer_retrieval"]


def build_setup(name, device=None):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.unlock()
    c.update(batch_size=8, total_epochs=0.0, total_steps=100_000)
    if "erase" in c.get("augment", ()):
        c.augment.erase = 0.25
    return train_setup.set_up_training(c, examples=10_000, mesh=mesh.make_mesh(), device=device)


FAST = "vit_b_7x16"  # the others take longer to trace, and have the same stacks of layers
LOOPED = [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in FAMILIES]


@pytest.mark.parametrize("name", LOOPED)
def test_loops_have_static_lengths_and_fixed_layouts(name, no_shape_checks):
    """Loops count up to a constant, and the memory layout of activations is fixed.

    For a while loop with a dynamic trip count, the host of a GPU waits for each iteration. Without a layout constraint,
    XLA for GPUs takes the layout that suits one sum over the batch.
    """
    text = build_setup(name).lower_train_step().as_text()
    conditions = re.findall(r"^( *)cond \{\n(.*?)^\1\} do", text, re.DOTALL | re.MULTILINE)
    assert len(conditions) == text.count("stablehlo.while") > 0
    static_condition = r"\s*(%\w+) = stablehlo\.constant dense<\d+> : tensor<i32>\s*"
    static_condition += r"(%\w+) = stablehlo\.compare +LT, %iterArg\w*, \1, .*\n\s*stablehlo\.return \2 .*\n"
    assert all(re.fullmatch(static_condition, condition) for _, condition in conditions)
    assert re.search(r"@LayoutConstraint\(.*result_layouts = \[dense<\[(3, )?2, 1, 0\]>", text)


@pytest.mark.slow
def test_gpus_update_a_leaf_in_one_kernel():
    """A barrier would split the moments, the parameter, its check and its EMA into separate kernels."""
    with pretend_attached(Gpu("9.0")) as gpu:
        texts = [build_setup("vit_b_7x16", device).lower_train_step().as_text() for device in (None, gpu)]
    barriers = [
        [line for line in text.splitlines() if "barrier" in line and "<768x1000xf32>" in line] for text in texts
    ]
    assert list(map(len, barriers)) == [2, 0]


@pytest.mark.parametrize(
    ("name", "changes", "unrolled"),
    [
        *(("vit_b_7x16", {}, 7), ("vit_b_7x16", {"depth": 12}, 12), ("vit_b_7x16", {"depth": 13}, 1)),
        *(("vit_b_7x16", {"unroll": 1}, 1), ("davit_b_lean", {}, 1)),
    ],
)
def test_one_gpu_runs_up_to_twelve_layers_without_a_loop(name, changes, unrolled):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.model.update(changes)
    for device, expected in ((Gpu("9.0"), unrolled), (None, changes.get("unroll", 1))):
        with pretend_attached(Gpu("9.0")):
            model = train_setup.set_up_training(c, examples=10_000, device=device).model
        stacks = [module for _, module in nnx.iter_modules(model.merge(model.weights)) if isinstance(module, Stack)]
        assert stacks and {stack.unroll for stack in stacks} == {expected}


def test_several_gpus_run_layers_in_a_loop():
    """Unrolled, a data-parallel step of vit_b_7x16 needs 41 % more memory and overlaps less."""
    with pretend_attached(Gpu("9.0")) as gpu:
        model = build_setup("vit_b_7x16", gpu).model
    assert model.mesh.size == 8 and model.merge(model.weights).blocks.unroll == 1


def test_several_gpus_overlap_communication(monkeypatch):
    gpu, device_mesh = Gpu("9.0"), mesh.make_mesh(data=2, fsdp=4)
    options = mesh.compiler_options(device_mesh, gpu)
    assert options.pop("xla_gpu_enable_latency_hiding_scheduler") is True
    gradient = 2 * 768 * 16 * 64  # bytes of the query weights of vit_b_7x16 in bfloat16
    assert len(options) == 3 and all(size < gradient for size in options.values())
    # The result of a reduce-scatter is the shard of one device.
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] < gradient / 4
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_reduce_combine_threshold_bytes=7")
    assert "xla_gpu_all_reduce_combine_threshold_bytes" not in mesh.compiler_options(device_mesh, gpu)


def test_no_compiler_options_for_cpus_or_one_gpu():
    device_mesh, device = mesh.make_mesh(), mesh.make_mesh().devices.flat[0]
    assert mesh.compiler_options(device_mesh, device) == {}
    assert mesh.compiler_options(mesh.make_mesh(devices=[device]), Gpu("9.0")) == {}


def test_compiler_options_reach_the_compiler_of_a_step(monkeypatch):
    monkeypatch.setattr(mesh, "compiler_options", lambda *_: {"xla_no_such_option": True})
    with pytest.raises(Exception, match="xla_no_such_option"):
        build_setup("nystromformer_image").compile_train_step()
