"""Report on a training step that is compiled for a GPU: memory, kernels and collectives."""

import collections
import math
from typing import Any

from ml_collections import ConfigDict

from leanformer.costs import count, hardware, oom_suggestions
from leanformer.training.progress import format_page


MOST = 0.95  # usable fraction of a GPU's memory; CUDA and its libraries need the rest
SOURCES = {
    "memory": "XLA's buffer assignment of the compiled step; parameters, moments and batch by their shapes",
    "limit": f"the plugin's description of the GPU; JAX uses {hardware.JAX_MEMORY_FRACTION:.0%} by default, or "
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "launches": "instructions of the scheduled program's text, times the trip counts of their loops",
    "matmuls": "the scheduled program's text; library and tiles are chosen with GEMM autotuning off",
    "cuDNN": "the scheduled program's text; only cuDNN can tell if it has an engine for a call",
    "collectives": "the scheduled program's text; work between a collective's start and end can overlap with it",
    "peak": "the manufacturer's data sheet, dense, accumulation in float32 (leanformer/costs/hardware.py)",
}


def too_large(c: ConfigDict, f: dict[str, Any]) -> str | None:
    """Return a message with the memory that a step lacks and settings to try, or None if the step fits its device.

    `f` are the costs from `cost.gpu_cost`.
    """
    peak, limit, memory = f["bytes_per_device"]["all"], f["limit_bytes"], f["device_memory_bytes"]
    if peak <= limit:
        return None
    lines = [
        f"The step needs {_gb(peak)} per device, {_gb(peak - limit)} more than the {_gb(limit)} that JAX uses of the "
        f"{_gb(memory)} of {f['device']}. Try one of:",
        *map(str, oom_suggestions.suggest(c, math.prod(f["mesh"].values()))),
    ]
    if peak <= MOST * memory:
        lines.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST}: JAX uses more of the memory")
    return "\n  ".join(lines)


def table(name: str, f: dict[str, Any]) -> str:
    """Format the costs of a compiled step, from `cost.gpu_cost`, for a terminal."""
    axes = ", ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    rows = {"attention": f"{f['attention']} ({f['attention_reason']})", "parameters": f"{f['params']:,}"}
    rows |= {"precision": f"{f['dtype']} activations, float32 parameters"}
    rows |= {"note": f["without_bfloat16"]} if f["without_bfloat16"] else {}
    peak = f"{count.format_number(f['peak_flops'])}FLOP/s" if f["peak_flops"] else "none"
    rows |= {"peak bfloat16 matmul throughput": peak}
    title = f"{name} on {math.prod(f['mesh'].values())} x {f['device']} ({axes}), batch {f['batch_size']}"
    pages = [format_page(f"{title}, compiled by jax {f['jax']}", rows)]

    sizes = {key: f"{_gb(size)}" for key, size in f["bytes_per_device"].items() if size}
    sizes |= {"device memory": f"{_gb(f['device_memory_bytes'])}, of which JAX uses {_gb(f['limit_bytes'])}"}
    pages.append(format_page("memory per device", sizes))

    rows = {"all": f"{f['launches']:,} ({', '.join(f'{key} {n:,}' for key, n in f['by_group'].items() if n)})"}
    for loop in f["loops"]:
        label = loop["turns"] and f"{loop['name']} x {loop['turns']}"
        by = ", ".join(f"{key} {number}" for key, number in sorted(loop["by"].items()))
        rows |= {f"  {label}": f"{loop['launches_per_iteration']:,} per iteration: {by}"} if label else {}
    pages.append(format_page("kernels and copies launched per step", rows))

    rows = {library: f"{number:,} per step" for library, number in f["products"].items()} or {"none": ""}
    pages.append(format_page("matmuls by library", rows))
    support = "supported by cuDNN" if f["cudnn_asked"] else "support by cuDNN not checked (use benchmarks/ask_cudnn.sh)"
    rows = {call: f"{number:,} per step; {support}" for call, number in f["cudnn"].items()} or {"none": ""}
    pages.append(format_page("calls of cuDNN", rows))
    dynamic = collections.Counter(loop["operation"] for loop in f["loops"] if loop["turns"] is None)
    rows = {operation: f"{number} loops" for operation, number in dynamic.items()} or {"none": ""}
    pages.append(format_page("while loops with dynamic trip count", rows))
    pages.append(format_page("collectives", _collective_rows(f["collectives"]) or {"none": ""}))
    return "\n".join([*pages, format_page("sources of the numbers", SOURCES)])


def _collective_rows(collectives: list[dict[str, Any]]) -> dict[str, str]:
    """Return one row per group of equal collectives."""
    groups = collections.Counter(
        (x["kind"], " x ".join(x["axes"]) or "no axis", x["loop"], x["size"], x["times"], _overlap(x["between"]))
        for x in collectives
    )
    return {
        f"{kind} over {axes}, {loop}, {_gb(size)}, {times} per step" + (f" (x {number})" if number > 1 else ""): overlap
        for (kind, axes, loop, size, times, overlap), number in groups.items()
    }


def _overlap(between: dict[str, int]) -> str:
    if not between:
        return "not overlapped"
    return "overlapped with " + ", ".join(f"{key} {n}" for key, n in sorted(between.items()))


def _gb(size: int) -> str:
    return f"{count.format_number(float(size))}B"
