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
    """Return descriptions of GPUs that are not attached, for a mesh of which programs are compiled.

    Args:
        name: key of `hardware.DEVICES`.
        number: number of devices, the length of the result.

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
    """Compile a program for the devices it was lowered for, which may be GPUs that are not attached.

    Raises ConfigError if XLA_FLAGS contains `launches.ASK_CUDNN`, and cuDNN does not support a call of the program.
    """
    from leanformer.programs import compilation

    return compilation.compile_for_gpu(lowered)


def read_kernels(compiled: jax.stages.Compiled, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Return kernel launches, matmuls, calls of cuDNN, loops and collectives of a program compiled for GPUs.

    The keys are launches (number per step), by_group {type of work: launches per step}, products {library: matmuls per
    step}, cudnn {call: number per step}, cudnn_asked (True if cuDNN was asked whether it supports them), loops and
    collectives. A loop is a dict of name, operation, turns, launches_per_iteration, and by {type and name: launches per
    iteration}. A collective is a dict with the attributes of `launches.Overlap`. Launches in loops with dynamic trip
    count are not in the numbers per step.

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

    The keys are:
        flops_per_device: FLOPs of the matmuls per step.
        collectives: a dict per type and axes, with kind, axes, sliced, times and bytes_moved (both per step).
        bytes_moved: bytes that a device sends per step.
        bytes_moved_scattering: the same with sliced all-reduces as reduce-scatters.
        loops: a dict per loop, with name, turns, flops_per_iteration and bytes_moved_per_iteration {kind: bytes}.
        floors: {device: `bounds.lower_bounds`} for the types of GPU in `hardware.LINKED`.

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
