"""What a program is built for where that is not the machine at hand: tracing and lowering for a GPU that is not here.

What decides by hardware takes a device as an argument, and reads its platform, device_kind and compute_capability.
It may be a live one, one of `jax.experimental.topologies`, whose programs can be compiled too, or a `Gpu`, for which
they can be traced and lowered without any CUDA package.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from leanformer.runtime.jax_internals import cudnn_checks as checks


CUDNN = 91100  # taken for a GPU that is not here: from 9.11 on, JAX lets all of compute capability 8.0 and more use it


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU by what programs are decided by."""

    compute_capability: str  # "9.0"
    device_kind: str = "NVIDIA GPU"
    platform: str = "gpu"


def capability(device: Any) -> tuple[int, ...]:
    """(9, 0) of compute capability 9.0; () of what is no NVIDIA GPU."""
    return tuple(map(int, getattr(device, "compute_capability", "").split(".") if device.platform == "gpu" else ()))


@contextlib.contextmanager
def seen_by(device: Any) -> Iterator[None]:
    """Within it JAX's checks before a cuDNN call are those of `device`; by default they ask the machine's own GPU.

    A device of this machine, and one that is no GPU, change nothing.
    """
    if device.platform != "gpu" or any(device is own for own in jax.devices()):
        yield
        return
    found = capability(device)
    answers = {
        "check_cudnn_version": lambda: CUDNN,
        "check_compute_capability": lambda least: found >= tuple(map(int, least.split("."))),
        "is_cuda_compute_capability_equal": lambda one: found == tuple(map(int, one.split("."))),
    }
    own = {name: getattr(checks, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(checks, name, answer)
        yield
    finally:
        for name, answer in own.items():
            setattr(checks, name, answer)


def lower(jitted: Any, *args: Any, device: Any, live: Any) -> jax.stages.Lowered:
    """What the compiler for `device` gets of a jitted function; `live` is one of those that `args` are placed on."""
    with seen_by(device):
        platform = {"gpu": "cuda"}.get(device.platform, device.platform)
        return jitted.trace(*args).lower(lowering_platforms=None if device.platform == live.platform else (platform,))
