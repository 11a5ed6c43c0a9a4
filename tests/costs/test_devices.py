"""Table of devices: lookup by JAX's device names, and consistent use by everything that depends on hardware."""

import types

import jax
import pytest
from messages import mentions

from leanformer.costs import devices
from leanformer.reports import pages


def make_device(kind, capability=None, platform="gpu"):
    attributes = {"device_kind": kind, "platform": platform}
    return types.SimpleNamespace(
        **attributes, **({} if capability is None else {"compute_capability": str(capability)})
    )


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200 141GB HBM3e", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("TPU v5 lite", 197e12),
        # Only float16 units: bfloat16 and float32 do not run at that peak.
        ("Tesla T4", None),
        # A partition of a device, and other devices with similar names.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_jax_device_name(kind, peak):
    assert devices.peak_flops(make_device(kind)) == peak


def test_gpus_without_bfloat16_are_named():
    amd = make_device("AMD Instinct MI300X", "gfx942")
    for device in (make_device("cpu", platform="cpu"), amd, make_device("NVIDIA L4", 8.9), jax.devices()[0]):
        assert devices.without_bfloat16(device) is None
    assert devices.capability(amd) is None and not devices.has_tensor_float32(amd)
    turing = make_device("Quadro RTX 8000", 7.5)
    assert mentions(devices.without_bfloat16(turing), "float32", 7.5, 8.0)
    assert mentions(pages.precision("bfloat16", turing), 7.5, "--config.dtype=float32")
