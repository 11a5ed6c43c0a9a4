"""Memory and launches of a step compiled for other devices; CPUs replace GPUs, except in the last test."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types

import jax
import pytest
from golden import check_page
from messages import mentions, refuses

from leanformer import cost, programs
from leanformer.programs import plugin
from leanformer.reports import costs as pages


needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="needs the extra gpu-compile: XLA's CUDA plugin"
)


@pytest.fixture
def small(plain):
    plain.model.update(num_heads=4, mlp_dim=24, remat="none")
    plain.mesh.update(data=2, fsdp=1, tensor=1)
    plain.probe.every = 0
    return plain


def test_costs_of_a_compiled_step(small, monkeypatch):
    monkeypatch.setattr(plugin, "devices", lambda name, count: jax.devices()[:count])
    monkeypatch.setattr(plugin, "memory", lambda name: 8_000_000_000)
    original, compiled = programs.compile_for_gpu, []
    monkeypatch.setattr(programs, "compile_for_gpu", lambda x: compiled.append(original(x)) or compiled[-1])
    costs = cost.gpu_cost(small, "h100")
    params, sizes = costs["params"], costs["bytes_per_device"]
    assert sizes["all"] == programs.peak_memory(compiled[0]) > sizes["temporaries"] > 0
    assert sizes["parameters"] == sizes["averages"] == 4 * params
    assert costs["limit_bytes"] == 6_000_000_000
    layers = [loop for loop in costs["loops"] if loop["turns"] == small.model.depth]
    assert [loop["name"] for loop in layers] == ["forward", "backward"]
    assert costs["launches"] == sum(costs["by_group"].values()) > sum(loop["launches_per_iteration"] for loop in layers)
    assert sum(x["times"] * x["size"] for x in costs["collectives"] if x["kind"] == "all-reduce") >= 4 * params
    assert json.loads(json.dumps(costs))["bytes_per_device"] == sizes
    page = pages.gpu_table("tiny", costs)
    assert all(source in page for source in pages.SOURCES.values())
    assert mentions(page, f"forward x {small.model.depth}", "all-reduce", "data", costs["launches"])

    # Rows of equal names: collectives of one size that overlap differently, and stacks of one depth.
    reduce = {"kind": "all-reduce", "axes": ["data"], "loop": "backward", "size": 7000, "times": 3}
    stacks = [layers[0] | {"launches_per_iteration": number} for number in (1234, 4321)]
    equal = [reduce | {"between": {"product": number}} for number in (5, 2, 5)] + [reduce | {"between": {}}]
    page = " ".join(pages.gpu_table("tiny", costs | {"collectives": equal, "loops": stacks}).split())
    assert "7 kB, 3 per step (x 4) overlapped with product 5 (x 2); overlapped with product 2; not overlapped" in page
    assert "1,234 per iteration" in page and "4,321 per iteration" in page


def test_cudnn_errors_are_explained_and_other_errors_are_not(monkeypatch, no_shape_checks):
    def fail(message):
        raise jax.errors.JaxRuntimeError(message)

    error = "INTERNAL: hidden_dim should be multiple of 8 in external/xla+/xla/stream_executor/cuda/cuda_dnn.cc(6979)"
    lowered = types.SimpleNamespace(compile=lambda options: fail(error))
    with refuses("cuDNN", "hidden_dim", 8):
        programs.compile_for_gpu(lowered)
    lowered = types.SimpleNamespace(compile=lambda options: fail("INTERNAL: of a bug in external/xla+/xla/x.cc"))
    with pytest.raises(jax.errors.JaxRuntimeError):
        programs.compile_for_gpu(lowered)


def test_too_large_step_reports_excess_and_suggestions(small):
    costs = {"bytes_per_device": {"all": 70_000_000_000}, "limit_bytes": 60_000_000_000, "device": "NVIDIA H100"}
    costs |= {"device_memory_bytes": 80_000_000_000, "mesh": {"data": 2, "fsdp": 1, "tensor": 1}}
    text = cost._too_large(small, costs)
    check_page("cost_too_large", text)
    assert mentions(text.splitlines()[0], "70 GB", "10 GB", "60 GB", "NVIDIA H100", "80 GB")
    assert mentions(text, "--config.accumulate=2", "--config.model.remat=block", "--config.mesh.fsdp=2")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in text
    costs["bytes_per_device"]["all"] = 77_000_000_000  # more than any share of the memory
    assert "MEM_FRACTION" not in cost._too_large(small, costs)
    costs["bytes_per_device"]["all"] = 60_000_000_000
    assert cost._too_large(small, costs) is None


@needs_plugin
def test_costs_of_a_cross_compiled_program(small):
    small.dtype = "bfloat16"
    small.model.update(backend="xla", width=128, mlp_dim=512)  # smaller gradients are reduced after the loop
    costs = cost.gpu_cost(small, "h100")
    assert costs["device"] == "NVIDIA H100 80GB HBM3" and costs["peak_flops"] == 989e12 and costs["products"]
    layers = [loop for loop in costs["loops"] if loop["turns"] == small.model.depth]
    assert [loop["name"] for loop in layers] == ["forward", "backward"]
    backward = [x for x in costs["collectives"] if x["loop"] == "backward"]
    assert {(x["kind"], x["axes"]) for x in backward} == {("all-reduce", ("data",))}


SCATTERS = """
from leanformer import config, cost, programs
c = config.load("quickstart_gpt").unlock()
c.dtype, c.model.backend = "bfloat16", "xla"
print(programs.compile_for_gpu(cost.step.build(c, "h100").lower_train_step()).as_text())
"""


@needs_plugin
@pytest.mark.parametrize("flag", ["", "--xla_gpu_deterministic_ops=true"])
def test_deterministic_programs_add_in_a_fixed_order(flag):
    # Gradients of embeddings add rows of the same token: with atomic additions unless no two rows have the same index.
    program = subprocess.run(
        [sys.executable, "-c", SCATTERS], env=os.environ | {"XLA_FLAGS": flag}, capture_output=True, text=True
    )
    assert program.returncode == 0, program.stderr[-2000:]
    scatters = re.findall(r"^.* scatter\(.*$", program.stdout, re.MULTILINE)
    assert scatters and {"unique_indices=true" in line for line in scatters} == {bool(flag)}
