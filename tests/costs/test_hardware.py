"""Table of devices: lookup by JAX's device names, and consistent use by everything that depends on hardware."""

import types

import jax
import pytest
from messages import mentions

from leanformer.costs import hardware
from leanformer.layers import backends
from leanformer.programs import target
from leanformer.reports import pages


def make_device(kind, capability=None, platform="gpu"):
    attributes = {"device_kind": kind, "platform": platform}
    return types.SimpleNamespace(
        **attributes, **({} if capability is None else {"compute_capability": str(capability)})
    )


EXAMPLES = {  # JAX's names, if longer than those in the table
    "GH200": "NVIDIA GH200 480GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100 PCIe": "NVIDIA A100 80GB PCIe",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX 5090": "NVIDIA GeForce RTX 5090",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "RTX 3090": "NVIDIA GeForce RTX 3090",
    "T4": "Tesla T4",
    "V100": "Tesla V100-SXM2-32GB",
    "P100": "Tesla P100-PCIE-16GB",
}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H200 141GB HBM3e", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("TPU v5 lite", 197e12),
        # Only float16 units: bfloat16 and float32 do not run at that peak.
        ("Tesla T4", None),
        # A partition of a device, and other devices with similar names.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_jax_device_name(kind, peak):
    assert hardware.peak_flops(make_device(kind)) == peak


def test_every_device_matches_one_row():
    kinds = [sheet.kinds for sheet in hardware.DATA_SHEETS.values()]
    plain = ["B200", "GB200", "H100 NVL", "H200 NVL", "H100 80GB HBM3", "A10", "A10G", "L4", "L40", "L40S", "RTX A6000"]
    for name in plain:
        assert sum(hardware.re.fullmatch(pattern, name) is not None for pattern in kinds) == 1, name


def test_gpus_without_bfloat16_have_advice_and_no_peak():
    """Capabilities are those of the table; there is no advice for other devices."""
    for name, sheet in hardware.DATA_SHEETS.items():
        if sheet.capability is None:
            continue
        advice = hardware.without_bfloat16(make_device(f"NVIDIA {name}", sheet.capability))
        assert (sheet.peak is None) == (advice is not None) == (sheet.capability < 8)
        assert advice is None or mentions(advice, "float32", 8.0)
    assert hardware.without_bfloat16(make_device("Quadro RTX 8000", 7.5)) is not None  # in no table
    assert hardware.without_bfloat16(make_device("cpu", platform="cpu")) is None
    amd = make_device("AMD Instinct MI300X", "gfx942")
    assert hardware.without_bfloat16(amd) is None and not hardware.has_tensor_float32(amd)
    assert target.capability(amd) == ()
    assert hardware.without_bfloat16(jax.devices()[0]) is None


@pytest.mark.parametrize("name", [name for name, sheet in hardware.DATA_SHEETS.items() if sheet.capability])
def test_header_attention_and_peak_agree_on_every_gpu(name):
    """With bfloat16 units there is fused attention and a peak; without, the run header has advice."""
    sheet = hardware.DATA_SHEETS[name]
    gpu = target.Gpu(str(sheet.capability), EXAMPLES.get(name, f"NVIDIA {name}"))
    backend, _ = backends.resolve("auto", device=gpu, dtype="bfloat16", head_dim=64)
    row = pages.precision("bfloat16", gpu)
    assert hardware.peak_flops(gpu) == sheet.peak
    if sheet.peak:
        assert backend == "cudnn" and hardware.without_bfloat16(gpu) is None
    else:
        assert backend == "xla" and mentions(row, sheet.capability, "--config.dtype=float32")


def test_link_bandwidth_by_placement_of_devices():
    assert hardware.bandwidth("H100", range(8)) == 450e9
    assert hardware.bandwidth("H100", range(0, 64, 8)) == 50e9  # one device per host
    assert hardware.bandwidth("H100", range(64)) == 400e9  # eight NICs per host share the traffic
    assert hardware.bandwidth("A100", (0, 1, 8, 9)) == 50e9
