"""What the makers say of their devices, in one table: peaks of products, and links between devices."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any


HOST = 8  # devices of a host, in the makers' own
TAKEN = 0.75  # of a GPU's memory by JAX, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
FIRST_BFLOAT16 = 8.0  # compute capability of the first GPUs with bfloat16 units, Ampere


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A device by its maker's data sheet.

    kinds: what jax calls it, a pattern for the whole of `device_kind` after the maker's name and the brand. A slice of
        a device (MIG), a laptop's or another variant of the name is another device: it matches nothing.
    capability: of a GPU to compute, as CUDA numbers it.
    peak: of dense products of bfloat16 with sums in float32, FLOP/s; None where there are no units for them.
    links: bytes a second that a device sends, and receives at the same time: to devices of its own host, over NVLink
        (half of what the sheet gives for both ways); and to other hosts, an assumption: one network card a device,
        400 Gb/s and with the A100 200 Gb/s, as in the makers' own hosts. None: not known.
    """

    kinds: str
    capability: float | None
    peak: float | None
    links: tuple[float, float] | None = None


SHEETS = {
    "B300": Sheet(r"B300( SXM6 AC)?", 10.3, 2250e12),
    "GB300": Sheet(r"GB300", 10.3, 2500e12),
    "B200": Sheet(r"B200", 10.0, 2250e12, (900e9, 50e9)),
    "GB200": Sheet(r"GB200", 10.0, 2500e12),
    "H200": Sheet(r"H200( 141GB HBM3e)?", 9.0, 989e12, (450e9, 50e9)),
    "H200 NVL": Sheet(r"H200 NVL", 9.0, 835e12),
    "GH200": Sheet(r"GH200 \d+GB?( HBM3e?)?", 9.0, 989e12),
    "H100": Sheet(r"H100 \d+GB HBM\w+", 9.0, 989e12, (450e9, 50e9)),
    "H100 NVL": Sheet(r"H100 NVL", 9.0, 835e12),
    "H100 PCIe": Sheet(r"H100 PCIe", 9.0, 756e12),
    "A100": Sheet(r"A100-SXM4?-\d+GB", 8.0, 312e12, (300e9, 25e9)),
    "A100 PCIe": Sheet(r"A100-PCIE-\d+GB|A100 80GB PCIe", 8.0, 312e12),
    "A30": Sheet(r"A30", 8.0, 165e12),
    "A40": Sheet(r"A40", 8.6, 149.7e12),
    "A10": Sheet(r"A10", 8.6, 125e12),
    "A10G": Sheet(r"A10G", 8.6, 70e12),
    "L40S": Sheet(r"L40S", 8.9, 362e12),
    "L40": Sheet(r"L40", 8.9, 181e12),
    "L4": Sheet(r"L4", 8.9, 121e12),
    "RTX PRO 6000": Sheet(r"RTX PRO 6000 Blackwell( Workstation Edition)?", 12.0, 503.8e12),
    "RTX 6000 Ada": Sheet(r"RTX 6000 Ada Generation", 8.9, 364.2e12),
    "RTX A6000": Sheet(r"RTX A6000", 8.6, 154.8e12),
    "RTX 5090": Sheet(r"RTX 5090", 12.0, 209.5e12),
    "RTX 4090": Sheet(r"RTX 4090", 8.9, 165.2e12),
    "RTX 3090": Sheet(r"RTX 3090", 8.6, 71e12),
    "T4": Sheet(r"T4", 7.5, None),
    "V100": Sheet(r"V100-\S+", 7.0, None),
    "P100": Sheet(r"P100-\S+", 6.0, None),
    "TPU v4": Sheet(r"TPU v4", None, 275e12),
    "TPU v5 lite": Sheet(r"TPU v5 lite", None, 197e12),
    "TPU v5": Sheet(r"TPU v5p?", None, 459e12),
    "TPU v6 lite": Sheet(r"TPU v6 lite", None, 918e12),
}
LINKED = tuple(name for name, sheet in SHEETS.items() if sheet.links)


def sheet(kind: str) -> Sheet | None:
    """The line of the table for what jax calls a device's kind, None for one that is not in it."""
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", kind)
    return next((sheet for sheet in SHEETS.values() if re.fullmatch(sheet.kinds, name)), None)


def peak_flops(device: Any) -> float | None:
    """The device's dense bfloat16 peak in FLOP/s; None where it is not known, or has no bfloat16 units."""
    found = sheet(device.device_kind)
    return found and found.peak


def without_bfloat16(device: Any) -> str | None:
    """What becomes of bfloat16 on a GPU that has no units for it, and the remedy; None on any other device."""
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None or float(capability) >= FIRST_BFLOAT16:
        return None
    return (
        f"This GPU, of compute capability {capability}, has no bfloat16 units: XLA makes such products in float32, "
        "with conversions on the way, and there is no peak to take a share of. Use --config.dtype=float32, or a GPU of "
        f"compute capability {FIRST_BFLOAT16} or more"
    )


def bandwidth(name: str, group: Sequence[int]) -> float:
    """Bytes per second through each device of a ring over `group`, positions of devices that fill hosts in order.

    A ring that leaves hosts does so once a host, over the cards of all its devices there: rings over each card share
    the work. `name` is one of LINKED.
    """
    inside, between = SHEETS[name].links
    hosts = collections.Counter(position // HOST for position in group)
    return inside if len(hosts) == 1 else min(inside, between * min(hosts.values()))
