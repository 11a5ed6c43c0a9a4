"""Tracing and lowering of programs for a GPU that is not attached.

Functions that depend on the hardware take a device as an argument and read its platform, device_kind and
compute_capability. The device may be an attached one, one of `jax.experimental.topologies` (programs can be compiled
too), or a `Gpu` (programs can be traced and lowered without a CUDA package).
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from leanformer.runtime.jax_internals import cudnn_checks, require


CUDNN = 91100  # version assumed for a GPU that is not attached; JAX uses 9.11 on all of compute capability >= 8.0


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Description of an NVIDIA GPU with those attributes of a JAX device that programs depend on.

    Attributes:
        compute_capability: CUDA compute capability, such as "9.0".
        device_kind: name of the GPU, as JAX reports it.
        platform: platform, as JAX reports it.
    """

    compute_capability: str
    device_kind: str = "NVIDIA GPU"
    platform: str = "gpu"


def capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability as a tuple, (9, 0) for 9.0; () if the device is not an NVIDIA GPU."""
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return tuple(map(int, version.groups())) if version and device.platform in ("gpu", "cuda") else ()


@contextlib.contextmanager
def pretend_attached(device: Any) -> Iterator[None]:
    """Make JAX's checks before a cuDNN call answer for `device` instead of for the attached GPU, within a `with` block.

    The checks are replaced in the whole process, and restored at the end of the block. Does nothing for an attached
    device and for a device that is not a GPU. Raises ConfigError if this version of JAX has moved its checks.
    """
    if device.platform != "gpu" or any(device is attached for attached in jax.devices()):
        yield
        return
    actual = capability(device)
    answers = {
        "check_cudnn_version": lambda: CUDNN,
        "check_compute_capability": lambda least: actual >= tuple(map(int, least.split("."))),
        "is_cuda_compute_capability_equal": lambda one: actual == tuple(map(int, one.split("."))),
    }
    checks = cudnn_checks()
    originals = {name: require(getattr(checks, name, None), f"cudnn's {name}") for name in answers}
    try:
        for name, answer in answers.items():
            setattr(checks, name, answer)
        yield
    finally:
        for name, answer in originals.items():
            setattr(checks, name, answer)


def lower(jitted: Any, *args: Any, device: Any, live: Any) -> jax.stages.Lowered:
    """Return a jitted function lowered for a device that need not be attached.

    Args:
        jitted: result of `jax.jit`.
        args: arguments to trace it with: arrays or shapes.
        device: device to lower for.
        live: one of the devices on which `args` are placed.

    Raises:
        ConfigError: `device` is a GPU that is not attached, and this version of JAX has moved its checks of cuDNN.
    """
    with pretend_attached(device):
        platform = {"gpu": "cuda"}.get(device.platform, device.platform)
        return jitted.trace(*args).lower(lowering_platforms=None if device.platform == live.platform else (platform,))
