"""Devices: peak throughput by data sheet, memory, and what to change if a training step does not fit."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer.costs.count import format_number
from leanformer.errors import TrainingError


STEP = "step"  # name of the training step among programs
FIRST_BFLOAT16 = 8.0  # compute capability of the first GPUs with bfloat16 and TF32 units, Ampere
# Dense bfloat16 matmul throughput with accumulation in float32, in FLOP/s, by JAX's `device_kind` without manufacturer
# and brand. A partition of a device (MIG), a laptop GPU or another variant of a name is a different device.
PEAK_FLOPS = {
    r"B300( SXM6 AC)?": 2250e12,
    r"GB300": 2500e12,
    r"B200": 2250e12,
    r"GB200": 2500e12,
    r"H200( 141GB HBM3e)?": 989e12,
    r"H200 NVL": 835e12,
    r"GH200 \d+GB?( HBM3e?)?": 989e12,
    r"H100 \d+GB HBM\w+": 989e12,
    r"H100 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"A100-SXM4?-\d+GB": 312e12,
    r"A100-PCIE-\d+GB|A100 80GB PCIe": 312e12,
    r"A30": 165e12,
    r"A40": 149.7e12,
    r"A10": 125e12,
    r"A10G": 70e12,
    r"L40S": 362e12,
    r"L40": 181e12,
    r"L4": 121e12,
    r"RTX PRO 6000 Blackwell( Workstation Edition)?": 503.8e12,
    r"RTX 6000 Ada Generation": 364.2e12,
    r"RTX A6000": 154.8e12,
    r"RTX 5090": 209.5e12,
    r"RTX 4090": 165.2e12,
    r"RTX 3090": 71e12,
    r"TPU v4": 275e12,
    r"TPU v5 lite": 197e12,
    r"TPU v5p?": 459e12,
    r"TPU v6 lite": 918e12,
}


def peak_flops(device: Any) -> float | None:
    """Return a JAX device's peak dense bfloat16 matmul throughput in FLOP/s; None if it is not in the table."""
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", device.device_kind)
    return next((peak for pattern, peak in PEAK_FLOPS.items() if re.fullmatch(pattern, name)), None)


def capability(device: Any) -> float | None:
    """Return the CUDA compute capability of a JAX device, such as 9.0; None if it is not an NVIDIA GPU."""
    text = str(getattr(device, "compute_capability", ""))  # "gfx942" on a GPU of AMD
    known = device.platform in ("gpu", "cuda") and re.fullmatch(r"\d+\.\d+", text)
    return float(text) if known else None


def without_bfloat16(device: Any) -> str | None:
    """Return a message for a GPU without bfloat16 units, with the fix; None for any other device."""
    found = capability(device)
    if found is None or found >= FIRST_BFLOAT16:
        return None
    return (
        f"This GPU (compute capability {found}) has no bfloat16 units: XLA computes bfloat16 matmuls in float32 "
        "with conversions, and no utilisation is reported. Use --config.dtype=float32, or a GPU with compute "
        f"capability {FIRST_BFLOAT16} or higher"
    )


def has_tensor_float32(device: Any) -> bool:
    """Return whether a device is a GPU that by default multiplies float32 matrices in TF32 (10 bits of mantissa)."""
    found = capability(device)
    return found is not None and found >= FIRST_BFLOAT16


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
    """Raise TrainingError if a program, STEP or an evaluator, needs more bytes (`peaks`) than the device has."""
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
    """Raise TrainingError in place of JAX's error within a `with` block if a device is out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(f"Out of device memory. {_remedy(config, STEP)}") from error
