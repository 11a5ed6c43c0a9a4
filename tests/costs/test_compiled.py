"""Memory and launches of a step compiled for other devices; CPUs stand in for GPUs, except in the last test."""

import importlib.util
import json
import types

import jax
import pytest
from golden import check_page
from messages import mentions, refuses

from leanformer.analysis import compiled
from leanformer.costs import count, plugin, remedies


installed = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="needs the extra gpu-compile: XLA's CUDA plugin"
)


@pytest.fixture
def small(plain):
    plain.model.update(num_heads=4, mlp_dim=24, remat="none")
    plain.mesh.update(data=2, fsdp=1, tensor=1)
    plain.probe.every = 0
    return plain


def test_the_figures_of_a_step(small, monkeypatch):
    monkeypatch.setattr(plugin, "devices", lambda name, count: jax.devices()[:count])
    monkeypatch.setattr(plugin, "memory", lambda name: 8_000_000_000)
    held, kept = compiled.held, []
    monkeypatch.setattr(compiled, "held", lambda run, program: kept.append(program) or held(run, program))
    f = compiled.figures(small, "h100")
    params, sizes = f["params"], f["bytes_a_device"]
    assert sizes["all"] == count.peak_memory(kept[0]) > sizes["temporaries"] > 0
    assert sizes["parameters"] == sizes["averages"] == 4 * params
    assert f["limit_bytes"] == 6_000_000_000 and compiled.excess(f) == sizes["all"] - 6_000_000_000
    layers = [loop for loop in f["loops"] if loop["turns"] == small.model.depth]
    assert [loop["name"] for loop in layers] == ["forward", "backward"]
    assert f["launches"] == sum(f["by_group"].values()) > sum(loop["launches_a_turn"] for loop in layers)
    assert sum(x["times"] * x["size"] for x in f["collectives"] if x["kind"] == "all-reduce") >= 4 * params
    assert json.loads(json.dumps(f))["bytes_a_device"] == sizes
    page = compiled.table("tiny", f)
    assert all(source in page for source in compiled.SOURCES.values())
    assert mentions(page, f"forward x {small.model.depth}", "all-reduce", "data", f["launches"])


def test_what_cudnn_refuses_is_one_message_and_other_failures_are_not(monkeypatch):
    def fail(message):
        raise jax.errors.JaxRuntimeError(message)

    refused = "INTERNAL: hidden_dim should be multiple of 8 in external/xla+/xla/stream_executor/cuda/cuda_dnn.cc(6979)"
    run = types.SimpleNamespace(compile_train_step=lambda: fail(refused))
    with refuses("cuDNN", "hidden_dim", 8):
        compiled.compile_step(run)
    run = types.SimpleNamespace(compile_train_step=lambda: fail("INTERNAL: of a bug in external/xla+/xla/x.cc"))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compiled.compile_step(run)


def test_a_step_that_is_too_large_says_by_how_much_and_what_would_fit(small):
    f = {"bytes_a_device": {"all": 70_000_000_000}, "limit_bytes": 60_000_000_000, "device": "NVIDIA H100"}
    f["device_memory_bytes"] = 80_000_000_000
    tried = [(remedies.remat(small), 61_500_000_000), (next(remedies.accumulations(small, 2)), 40_000_000_000)]
    text = compiled.too_large(f, tried)
    check_page("cost_too_large", text)
    first, block, accumulate, share = text.splitlines()
    assert mentions(first, "70 GB", "10 GB", "60 GB", "NVIDIA H100", "80 GB")
    assert mentions(block, "--config.model.remat=block", "61.5 GB", "1.5 GB")
    assert mentions(accumulate, "--config.accumulate=2", "40 GB")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in share
    f["bytes_a_device"]["all"] = 77_000_000_000  # more than any share of the memory
    assert "MEM_FRACTION" not in compiled.too_large(f, tried)


def test_micro_batches_until_they_fit_and_for_one_device_eight(small, monkeypatch):
    """By hand: 100 held, 20 of them parameters, 80 at a time in 48 examples; the guess is checked, and was too low."""
    small.mesh.update(data=1)
    small.update(batch_size=48)
    peaks = {2: 150, 3: 146, 4: 139, 6: 135}
    monkeypatch.setattr(compiled, "peak", lambda c, name: 99 if c.mesh.fsdp == 8 else peaks.get(c.accumulate, 160))
    sizes = {"parameters": 20, "temporaries": 80, "all": 180}
    f = {"mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "bytes_a_device": sizes, "limit_bytes": 140}
    tried = [(setting.changes, peak) for setting, peak in compiled.remedies_of(small, "h100", f)]
    assert tried == [({"accumulate": 4}, 139), ({"model.remat": "block"}, 160), ({"mesh.fsdp": 8}, 99)]
    f["limit_bytes"] = 147  # three would be guessed to need 100 + 20 + 80 / 3
    (changes, peak), *_ = ((setting.changes, peak) for setting, peak in compiled.remedies_of(small, "h100", f))
    assert (changes, peak) == ({"accumulate": 3}, 146)


@installed
def test_a_program_of_gpus_that_are_not_here(small):
    small.dtype = "bfloat16"
    small.model.backend = "xla"
    f = compiled.figures(small, "h100")
    assert f["device"] == "NVIDIA H100 80GB HBM3" and f["peak_flops"] == 989e12 and f["products"]
    layers = [loop for loop in f["loops"] if loop["turns"] == small.model.depth]
    assert [loop["name"] for loop in layers] == ["forward", "backward"]
    backward = [x for x in f["collectives"] if x["loop"] == "backward"]
    assert {(x["kind"], x["axes"]) for x in backward} == {("all-reduce", ("data",))}
    v100 = compiled.figures(small, "v100")
    assert v100["peak_flops"] is None and "--config.dtype=float32" in compiled.table("tiny", v100)
