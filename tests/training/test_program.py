"""What a training step is made of, read from the text that the compiler gets."""

import re
import runpy
from pathlib import Path

import pytest

from leanformer.runtime import mesh, target
from leanformer.training import train_setup


CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = ["vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean", "nystromformer_retrieval"]


def built(name, device=None):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.unlock()
    c.update(batch_size=8, total_epochs=0.0, total_steps=100_000)
    if "erase" in c.get("augment", ()):
        c.augment.erase = 0.25
    return train_setup.build(c, examples=10_000, mesh=mesh.make_mesh(), device=device)


@pytest.mark.parametrize("name", FAMILIES)
def test_loops_have_lengths_and_activations_one_order_in_memory(name, unchecked):
    """A GPU's host waits for each turn of a loop of unknown length; one that counts up to a constant has a length. Held
    to no order, XLA for GPUs takes the one that suits one sum over the batch."""
    text = built(name).lower_train_step().as_text()
    conditions = re.findall(r"^( *)cond \{\n(.*?)^\1\} do", text, re.DOTALL | re.MULTILINE)
    assert len(conditions) == text.count("stablehlo.while") > 0
    counted = r"\s*(%\w+) = stablehlo\.constant dense<\d+> : tensor<i32>\s*"
    counted += r"(%\w+) = stablehlo\.compare +LT, %iterArg\w*, \1, .*\n\s*stablehlo\.return \2 .*\n"
    assert all(re.fullmatch(counted, condition) for _, condition in conditions)
    assert re.search(r"@LayoutConstraint\(.*result_layouts = \[dense<\[(3, )?2, 1, 0\]>", text)


def test_gpus_update_a_leaf_in_one_kernel():
    """A barrier would part its moments, its parameter, the check of that and the average from one another."""
    texts = [built("vit_b_7x16", device).lower_train_step().as_text() for device in (None, target.Gpu("9.0"))]
    head = [[line for line in text.splitlines() if "barrier" in line and "<768x1000xf32>" in line] for text in texts]
    assert list(map(len, head)) == [2, 0]


def test_several_gpus_compute_while_they_send(monkeypatch):
    gpu, shared = target.Gpu("9.0"), mesh.make_mesh(data=2, fsdp=4)
    options = mesh.compiler_options(shared, gpu)
    assert options.pop("xla_gpu_enable_latency_hiding_scheduler") is True
    gradient = 2 * 768 * 16 * 64  # bytes of queries' weights in vit_b_7x16, in bfloat16
    assert len(options) == 3 and all(size < gradient for size in options.values())
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] < gradient / 4  # its result is a device's share
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_reduce_combine_threshold_bytes=7")
    assert "xla_gpu_all_reduce_combine_threshold_bytes" not in mesh.compiler_options(shared, gpu)


def test_one_gpu_and_cpus_are_told_nothing():
    shared, device = mesh.make_mesh(), mesh.make_mesh().devices.flat[0]
    assert mesh.compiler_options(shared, device) == {}
    assert mesh.compiler_options(mesh.make_mesh(devices=[device]), target.Gpu("9.0")) == {}


def test_the_compiler_of_a_step_is_told(monkeypatch):
    monkeypatch.setattr(mesh, "compiler_options", lambda *_: {"xla_no_such_option": True})
    with pytest.raises(Exception, match="xla_no_such_option"):
        built("nystromformer_image").compile_train_step()
