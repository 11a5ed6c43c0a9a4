"""What the makers say of their devices: peaks of products, and links between devices."""

import collections
from collections.abc import Sequence

import jax


# Dense bfloat16 peaks in FLOP/s by a part of jax's device kind, from the makers' data sheets (SXM where there are two).
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
}

# Bytes per second that a device sends, and receives at the same time: to devices of its own host of HOST, over NVLink,
# from the makers' data sheets (half of the figure for both ways); and to other hosts, an assumption: one network card a
# device, 400 Gb/s with the H100 and H200 and 200 Gb/s with the A100, as in the makers' own hosts of eight.
LINKS = {"H200": (450e9, 50e9), "H100": (450e9, 50e9), "A100": (300e9, 25e9)}
HOST = 8


def bandwidth(name: str, group: Sequence[int]) -> float:
    """Bytes per second through each device of a ring over `group`, positions of devices that fill hosts in order.

    A ring that leaves hosts does so once a host, over the cards of all its devices there: rings over each card share
    the work.
    """
    inside, between = LINKS[name]
    hosts = collections.Counter(position // HOST for position in group)
    return inside if len(hosts) == 1 else min(inside, between * min(hosts.values()))


def peak_flops(device: jax.Device) -> float | None:
    """The device's dense bfloat16 peak in FLOP/s, or None where it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device.device_kind), None)
