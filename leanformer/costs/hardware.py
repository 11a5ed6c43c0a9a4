"""Table of devices from the manufacturers' data sheets: peak matmul throughput, and bandwidth between devices."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any


HOST = 8  # devices per host in the manufacturers' servers
JAX_MEMORY_FRACTION = 0.75  # fraction of a GPU's memory that JAX uses, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set
# Names of devices in XLA's CUDA plugin, by their names on the command line. Older ones need an assembler of CUDA 12,
# without which the plugin crashes.
DEVICES = {
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "h200": "NVIDIA H200 141GB HBM3e",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-pcie": "NVIDIA A100 80GB PCIe",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell",
    "rtx-a6000": "NVIDIA RTX A6000",
}
FIRST_BFLOAT16 = 8.0  # compute capability of the first GPUs with bfloat16 and TF32 units, Ampere


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """Device according to its manufacturer's data sheet.

    Attributes:
        kinds: regular expression for JAX's `device_kind` without the manufacturer and the brand. A partition of a
            device (MIG), a laptop GPU or another variant of the name is a different device and does not match.
        capability: CUDA compute capability of a GPU; None for a TPU.
        peak: dense bfloat16 matmul throughput with accumulation in float32, in FLOP/s; None without bfloat16 units.
        links: bytes/s that a device sends and receives at the same time. The first number is within a host, over
            NVLink (half of the sheet's bidirectional number). The second is between hosts, by assumption one NIC per
            device with 400 Gb/s, or 200 Gb/s for the A100, as in the manufacturers' servers. None if not known.
    """

    kinds: str
    capability: float | None
    peak: float | None
    links: tuple[float, float] | None = None


DATA_SHEETS = {
    "B300": DataSheet(r"B300( SXM6 AC)?", 10.3, 2250e12),
    "GB300": DataSheet(r"GB300", 10.3, 2500e12),
    "B200": DataSheet(r"B200", 10.0, 2250e12, (900e9, 50e9)),
    "GB200": DataSheet(r"GB200", 10.0, 2500e12),
    "H200": DataSheet(r"H200( 141GB HBM3e)?", 9.0, 989e12, (450e9, 50e9)),
    "H200 NVL": DataSheet(r"H200 NVL", 9.0, 835e12),
    "GH200": DataSheet(r"GH200 \d+GB?( HBM3e?)?", 9.0, 989e12),
    "H100": DataSheet(r"H100 \d+GB HBM\w+", 9.0, 989e12, (450e9, 50e9)),
    "H100 NVL": DataSheet(r"H100 NVL", 9.0, 835e12),
    "H100 PCIe": DataSheet(r"H100 PCIe", 9.0, 756e12),
    "A100": DataSheet(r"A100-SXM4?-\d+GB", 8.0, 312e12, (300e9, 25e9)),
    "A100 PCIe": DataSheet(r"A100-PCIE-\d+GB|A100 80GB PCIe", 8.0, 312e12),
    "A30": DataSheet(r"A30", 8.0, 165e12),
    "A40": DataSheet(r"A40", 8.6, 149.7e12),
    "A10": DataSheet(r"A10", 8.6, 125e12),
    "A10G": DataSheet(r"A10G", 8.6, 70e12),
    "L40S": DataSheet(r"L40S", 8.9, 362e12),
    "L40": DataSheet(r"L40", 8.9, 181e12),
    "L4": DataSheet(r"L4", 8.9, 121e12),
    "RTX PRO 6000": DataSheet(r"RTX PRO 6000 Blackwell( Workstation Edition)?", 12.0, 503.8e12),
    "RTX 6000 Ada": DataSheet(r"RTX 6000 Ada Generation", 8.9, 364.2e12),
    "RTX A6000": DataSheet(r"RTX A6000", 8.6, 154.8e12),
    "RTX 5090": DataSheet(r"RTX 5090", 12.0, 209.5e12),
    "RTX 4090": DataSheet(r"RTX 4090", 8.9, 165.2e12),
    "RTX 3090": DataSheet(r"RTX 3090", 8.6, 71e12),
    "T4": DataSheet(r"T4", 7.5, None),
    "V100": DataSheet(r"V100-\S+", 7.0, None),
    "P100": DataSheet(r"P100-\S+", 6.0, None),
    "TPU v4": DataSheet(r"TPU v4", None, 275e12),
    "TPU v5 lite": DataSheet(r"TPU v5 lite", None, 197e12),
    "TPU v5": DataSheet(r"TPU v5p?", None, 459e12),
    "TPU v6 lite": DataSheet(r"TPU v6 lite", None, 918e12),
}
LINKED = tuple(name for name, sheet in DATA_SHEETS.items() if sheet.links)


def data_sheet(kind: str) -> DataSheet | None:
    """Return the data sheet of a device by JAX's `device_kind`; None if the table does not list it."""
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", kind)
    return next((sheet for sheet in DATA_SHEETS.values() if re.fullmatch(sheet.kinds, name)), None)


def peak_flops(device: Any) -> float | None:
    """Return the peak dense bfloat16 matmul throughput of a JAX device or a `programs.Gpu`, in FLOP/s.

    None if the table does not list its `device_kind`, or if it has no bfloat16 units.
    """
    entry = data_sheet(device.device_kind)
    return None if entry is None else entry.peak


def without_bfloat16(device: Any) -> str | None:
    """Return a message for a GPU without bfloat16 units, with the fix; None for any other device."""
    capability = _capability(device)
    if capability is None or capability >= FIRST_BFLOAT16:
        return None
    return (
        f"This GPU (compute capability {capability}) has no bfloat16 units: XLA computes bfloat16 matmuls in float32 "
        "with conversions, and no utilisation is reported. Use --config.dtype=float32, or a GPU with compute "
        f"capability {FIRST_BFLOAT16} or higher"
    )


def has_tensor_float32(device: Any) -> bool:
    """Return whether a device is a GPU that by default multiplies float32 matrices in TF32 (10 bits of mantissa)."""
    capability = _capability(device)
    return capability is not None and capability >= FIRST_BFLOAT16


def _capability(device: Any) -> float | None:
    """Return the CUDA compute capability, 9.0 for "9.0"; None if the device is not an NVIDIA GPU."""
    text = str(getattr(device, "compute_capability", ""))  # "gfx942" on a GPU of AMD
    known = device.platform in ("gpu", "cuda") and re.fullmatch(r"\d+\.\d+", text)
    return float(text) if known else None


def bandwidth(name: str, group: Sequence[int]) -> float:
    """Return the bytes/s that each device of a ring sends.

    A ring over several hosts leaves each host once. It uses the NICs of all its devices on that host, because parallel
    rings over the NICs divide the work.

    Args:
        name: device, one of LINKED.
        group: positions of the ring's devices on the mesh, from 0; every HOST (8) consecutive positions are one host.

    Raises:
        ValueError: the table has no bandwidth of this device.
    """
    if (links := DATA_SHEETS[name].links) is None:
        raise ValueError(f"The bandwidth of {name} is not in the table.")
    inside, between = links
    hosts = collections.Counter(position // HOST for position in group)
    return inside if len(hosts) == 1 else min(inside, between * min(hosts.values()))
