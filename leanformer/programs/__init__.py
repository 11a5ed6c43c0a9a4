"""Compiled programs, for devices that need not be attached: memory, kernels and collectives. Nothing is run.

Other packages use the functions here and no other module of this package. A module is loaded when it is first needed,
because training needs `target` and `memory` only.
"""

from collections.abc import Mapping
from typing import Any

import jax

from leanformer.programs.memory import count_bytes, memory_by_content, peak_memory
from leanformer.programs.target import Gpu, capability, lower, pretend_attached


__all__ = ["Gpu", "capability", "count_bytes", "lower", "memory_by_content", "peak_memory", "pretend_attached"]


def gpus(name: str, number: int) -> list[Any]:
    """Return GPUs to compile for that are not attached, for a mesh.

    Args:
        name: key of `hardware.DEVICES`.
        number: number of devices.

    Raises:
        ConfigError: the name is unknown, or XLA's CUDA plugin is missing or does not match this jaxlib.
    """
    from leanformer.programs import plugin

    return plugin.devices(name, number)


def gpu_memory(name: str) -> int:
    """Return the bytes of memory of a GPU by its name in `hardware.DEVICES`. Raises the errors of `gpus`."""
    from leanformer.programs import plugin

    return plugin.memory(name)


def compile_for_gpu(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program for GPUs that need not be attached.

    Raises ConfigError if cuDNN was consulted (`launches.ASK_CUDNN` in XLA_FLAGS) and does not support a call.
    """
    from leanformer.programs import compilation

    return compilation.compile_for_gpu(lowered)


def read_kernels(compiled: jax.stages.Compiled, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Return kernel launches, matmuls, calls of cuDNN, loops and collectives of a program compiled for GPUs.

    The keys are launches (number per step), by_group, products (matmuls by library), cudnn (number by call),
    cudnn_asked (True if cuDNN was consulted), loops (launches per iteration) and collectives (with their overlap).

    Args:
        compiled: program compiled for GPUs.
        mesh: sizes by axis; devices are numbered with the last axis fastest.
    """
    from leanformer.programs import launches

    return launches.describe(compiled, mesh)


def read_communication(
    lowered: jax.stages.Lowered, mesh: Mapping[str, int]
) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Compile a program for CPU devices; return it with its FLOPs, collectives and lower bounds on its time.

    The keys are flops_per_device, collectives (one row per type and axes), bytes_moved (per device and step),
    bytes_moved_scattering (with reduce-scatters), loops, and floors (bounds in seconds by type of GPU).

    Args:
        lowered: program, lowered for CPU devices.
        mesh: sizes by axis; devices are numbered with the last axis fastest.

    Raises:
        NotImplementedError: this version of XLA does not write the partitioned program, or the trip count of a loop
            with collectives or matmuls is dynamic.
    """
    from leanformer.programs import bounds, communication, compilation

    compiled, text = compilation.compile_and_read(lowered)
    return compiled, bounds.describe(communication.read(text, mesh))
