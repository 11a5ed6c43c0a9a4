"""Device memory: what a program needs, what a device has, and what to change if a training step does not fit."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer.costs.count import format_number
from leanformer.errors import TrainingError


STEP = "step"  # name of the training step among programs
NCCL = {  # remedies by what NCCL's errors contain
    "/dev/shm": "/dev/shm is too small for NCCL; containers have 64 MiB. Start them with --shm-size=8g, or mount a "
    "volume of memory there as launch/kubernetes.yaml does.",
    "out of memory": "NCCL found no GPU memory outside JAX's pool, which has 75 % of it by default. Set "
    "XLA_PYTHON_CLIENT_MEM_FRACTION=0.7, or lower if it is set already.",
}


def peak_memory(compiled: jax.stages.Compiled) -> int:
    """Return the bytes that a compiled program needs per device: arguments, non-donated outputs and temporaries."""
    memory: Any = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def count_bytes(tree: Any) -> int:
    """Return the bytes per device of a tree of arrays or shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def memory_limit(device: Any) -> int | None:
    """Return the bytes of a device's memory that JAX may use; None if the device does not report them."""
    return (device.memory_stats() or {}).get("bytes_limit")


def check_memory(config: ConfigDict, peaks: Mapping[str, int], device: Any) -> None:
    """Raise TrainingError if a compiled program needs more memory than the device has.

    `peaks` are bytes per device by name of the program: STEP for the training step, else an evaluator such as "probe".
    """
    limit = memory_limit(device)
    for name, peak in peaks.items():
        if limit and peak > limit:
            needed, available = (f"{format_number(float(size))}B" for size in (peak, limit))
            problem = f"The compiled {name} needs {needed} per device, of which {available} are available."
            raise TrainingError(f"{problem} {_remedy(config, name)}")


def _remedy(config: ConfigDict, program: str) -> str:
    if program == STEP:
        return (
            f"Raise accumulate={config.accumulate} (smaller micro-batches, the same result except with batch norm), "
            f'set model.remat="block" (a third slower), mesh.fsdp={config.mesh.fsdp} to the number of devices, or '
            f"lower batch_size={config.batch_size}."
        )
    if program == "probe":
        return f"Lower probe.examples={config.probe.examples}."
    return f"Lower eval.batch_size={config.eval.batch_size}."


@contextlib.contextmanager
def explained(config: ConfigDict) -> Iterator[None]:
    """Raise TrainingError in place of JAX's error within a `with` block if a device, or NCCL, is out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "NCCL" in text and (remedy := next((r for sign, r in NCCL.items() if sign in text), None)):
            raise TrainingError(remedy) from error
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        raise TrainingError(f"Out of device memory. {_remedy(config, STEP)}") from error
