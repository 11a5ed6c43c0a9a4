"""Start page, advice when out of memory, and significant digits of the summary."""

import re
import types

import jax
import pytest
from messages import mentions, refuses

from leanformer.costs import devices
from leanformer.errors import TrainingError
from leanformer.reports import pages
from leanformer.text import format_float
from leanformer.training import train_setup


@pytest.fixture
def small(tiny):
    tiny.update(batch_size=48, accumulate=3)
    tiny.model.update(num_heads=4, mlp_dim=24)
    tiny.probe.every = 0
    return tiny


def parse_batch_row(page):
    """Return the numbers in the page's row about the batch per device."""
    (row,) = [line for line in page.splitlines() if line.split()[:1] == ["batch"]]
    return [int(number) for number in re.findall(r"\d+", row)]


def test_devices_of_a_tensor_group_share_their_examples(small, meshes, tmp_path):
    setup = train_setup.set_up_training(small, examples=480, mesh=meshes(2, 2, 2))
    # Examples read by the process, batch size, examples and devices of a group, groups, micro-batches
    assert parse_batch_row(pages.dry_run(setup, tmp_path)) == [48, 48, 4, 2, 4, 3]


def test_header_names_the_precision_of_float32_on_gpus():
    ampere = types.SimpleNamespace(device_kind="NVIDIA A30", platform="gpu", compute_capability="8.0")
    assert mentions(pages.precision("float32", ampere), "TF32", 10, "JAX_DEFAULT_MATMUL_PRECISION=highest")
    assert "TF32" not in pages.precision("bfloat16", ampere)
    with jax.default_matmul_precision("highest"):
        assert "TF32" not in pages.precision("float32", ampere)


def test_step_that_exceeds_memory_is_refused_before_training(small):
    def make_device(limit):
        return types.SimpleNamespace(memory_stats=lambda: limit and {"bytes_limit": limit})

    peaks = {devices.STEP: 70_000_000_000, "probe": 50_000_000_000}
    for enough in (70_000_000_000, None):  # a CPU reports no limit
        devices.check_memory(small, peaks, make_device(enough))
    with refuses("70 GB", "60 GB", "batch_size", "accumulate", "model.remat", "mesh.fsdp", error=TrainingError):
        devices.check_memory(small, peaks, make_device(60_000_000_000))
    with refuses("probe", "50 GB", "40 GB", "probe.examples", error=TrainingError):
        devices.check_memory(small, {"probe": 50_000_000_000}, make_device(40_000_000_000))


def test_only_out_of_memory_errors_are_explained(small):
    with refuses("accumulate", error=TrainingError), devices.explained(small):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    with refuses("INTERNAL", error=jax.errors.JaxRuntimeError), devices.explained(small):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.46707453155517575, "0.4671"), (1.23456e-7, "1.235e-07"), (1234567.8, "1,234,568"), (9876.54321, "9877")],
)
def test_numbers_are_rounded_to_significant_digits(number, text):
    assert format_float(number) == text
