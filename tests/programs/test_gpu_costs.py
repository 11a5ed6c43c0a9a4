"""Memory and launches of a step compiled for other devices; CPUs replace GPUs, except in the last test."""

import importlib.util
import json
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


def test_cudnn_errors_are_explained_and_other_errors_are_not(monkeypatch, no_shape_checks):
    def fail(message):
        raise jax.errors.JaxRuntimeError(message)

    error = "INTERNAL: hidden_dim should be multiple of 8 in external/xla+/xla/stream_executor/cuda/cuda_dnn.cc(6979)"
    lowered = types.SimpleNamespace(compile=lambda: fail(error))
    with refuses("cuDNN", "hidden_dim", 8):
        programs.compile_for_gpu(lowered)
    lowered = types.SimpleNamespace(compile=lambda: fail("INTERNAL: of a bug in external/xla+/xla/x.cc"))
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
    small.model.backend = "xla"
    costs = cost.gpu_cost(small, "h100")
    assert costs["device"] == "NVIDIA H100 80GB HBM3" and costs["peak_flops"] == 989e12 and costs["products"]
    layers = [loop for loop in costs["loops"] if loop["turns"] == small.model.depth]
    assert [loop["name"] for loop in layers] == ["forward", "backward"]
    backward = [x for x in costs["collectives"] if x["loop"] == "backward"]
    assert {(x["kind"], x["axes"]) for x in backward} == {("all-reduce", ("data",))}
    v100 = cost.gpu_cost(small, "v100")
    assert v100["peak_flops"] is None and "--config.dtype=float32" in pages.gpu_table("tiny", v100)
