"""Pages of costs for a terminal: of a config, of its training step on a mesh, and of the step compiled for a GPU."""

import collections
import math
from typing import Any

from leanformer.costs import count, hardware
from leanformer.runtime import text
from leanformer.training.progress import format_page


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


NOTES = """\
The program is read after XLA's SPMD partitioner; backends later merge collectives and overlap them with matmuls.
Bytes moved: sent by each device of a ring of n; (n-1)/n of the result in an all-gather or all-to-all, 2(n-1)/n in an \
all-reduce, all of it in a permute. "sliced": all-reduces of which a device keeps one slice; backends with \
reduce-scatter move half, which the lower bounds assume. Temporaries are those of XLA for CPUs with attention "xla"; a \
fused kernel stores no T x S matrices.
Lower bounds on step time: dense bfloat16 peaks; NVLink within hosts of eight, 450 GB/s in each direction (A100: 300); \
between hosts, by assumption, one NIC per device with 50 GB/s (A100: 25). Real steps are slower."""


BOUNDS = {
    "products_s": "matmuls",
    "sending_s": "communication",
    "overlapped_s": "fully overlapped",
    "one_after_the_other_s": "not overlapped",
}


def table(name: str, costs: dict[str, Any], other: dict[str, Any] | None = None, against: str = "") -> str:
    """Format the costs of a config for a terminal, with ratios to those of another config if given.

    Args:
        name: name of the config.
        costs: costs of the config, from `leanformer.cost.cost`.
        other: costs of the other config.
        against: name of the other config.
    """

    def row(key: str, unit: str = "", of: str = "") -> str:
        value = f"{costs[key]:,}{unit}"
        return (
            value if other is None else f"{value:<24} against {other[key]:,}{unit}{of}: {costs[key] / other[key]:.3f}"
        )

    rows = {"parameters": row("params")}
    rows |= {f"  {module}": f"{number:,}" for module, number in costs["modules"].items()}
    rows["forward FLOPs per example"] = row("forward_flops")
    rows["training FLOPs per example"] = row("train_flops")
    of = f" at batch {other['batch_size']}" if other and other["batch_size"] != costs["batch_size"] else ""
    rows[f"training memory, batch {costs['batch_size']}"] = row("train_memory_bytes", " B", of)
    name = f"{name} against {against}" if other else name
    return format_page(f"{name}, compiled for {costs['device']}", rows)


def mesh_table(name: str, costs: dict[str, Any]) -> str:
    """Format the costs of a training step on a mesh for a terminal: memory, communication and lower bounds on its time.

    Args:
        name: name of the config.
        costs: costs of the step, from `leanformer.cost.mesh_cost`.
    """
    sizes = costs["bytes_per_device"]
    devices = math.prod(costs["mesh"].values())
    axes = ",".join(f"{axis}={size}" for axis, size in costs["mesh"].items())
    title = f"{name} on {axes}: per device of {devices}, batch {costs['batch_size']}, {costs['dtype']}"
    pages = [format_page(title, {key: format_bytes(size) for key, size in sizes.items() if size})]
    rows = {}
    for row in costs["collectives"]:
        over = f"{row['kind']} over {' x '.join(row['axes']) or 'no axis'}{', sliced' if row['sliced'] else ''}"
        rows[over] = f"{row['times']:>5} times {format_bytes(row['bytes_moved']):>9}"
    rows["all"] = format_bytes(costs["bytes_moved"])
    if costs["bytes_moved_scattering"] < costs["bytes_moved"]:
        rows["all, sliced ones as reduce-scatter"] = format_bytes(costs["bytes_moved_scattering"])
    pages.append(format_page("communication volume per step", rows))
    rows = {}
    for kind, floor in costs["floors"].items():
        rows[kind] = ", ".join(f"{label} {1e3 * floor[key]:.3g} ms" for key, label in BOUNDS.items())
        for loop in floor["loops"]:
            ratio = f"communication takes {loop['sending_to_products']:.3f} of the matmul time"
            rows[f"  {kind} {loop['name']} x {loop['turns']}"] = ratio
    pages.append(format_page("lower bounds on step time (peak matmul throughput and bandwidth)", rows))
    return "\n".join([*pages, text.wrap(NOTES) + "\n"])


def gpu_table(name: str, f: dict[str, Any]) -> str:
    """Format the costs of a training step compiled for GPUs for a terminal: memory, kernels and collectives.

    Args:
        name: name of the config.
        f: costs of the step, from `leanformer.cost.gpu_cost`.
    """
    axes = ", ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    rows = {"attention": f"{f['attention']} ({f['attention_reason']})", "parameters": f"{f['params']:,}"}
    rows |= {"precision": f"{f['dtype']} activations, float32 parameters"}
    peak = f"{count.format_number(f['peak_flops'])}FLOP/s" if f["peak_flops"] else "none"
    rows |= {"peak bfloat16 matmul throughput": peak}
    title = f"{name} on {math.prod(f['mesh'].values())} x {f['device']} ({axes}), batch {f['batch_size']}"
    pages = [format_page(f"{title}, compiled by jax {f['jax']}", rows)]

    sizes = {key: format_bytes(size) for key, size in f["bytes_per_device"].items() if size}
    sizes |= {
        "device memory": f"{format_bytes(f['device_memory_bytes'])}, of which JAX uses {format_bytes(f['limit_bytes'])}"
    }
    pages.append(format_page("memory per device", sizes))

    rows = {"all": f"{f['launches']:,} ({', '.join(f'{key} {n:,}' for key, n in f['by_group'].items() if n)})"}
    for loop in f["loops"]:
        if loop["turns"] is not None:
            label = f"  {loop['name']} x {loop['turns']}"
            by = ", ".join(f"{key} {number}" for key, number in sorted(loop["by"].items()))
            text = f"{loop['launches_per_iteration']:,} per iteration: {by}"
            rows[label] = f"{rows[label]}; {text}" if label in rows else text  # stacks of equal depth
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
    """Return one row per group of collectives of the same kind and size, with the overlaps of all of them."""
    groups: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for x in collectives:
        group = (x["kind"], " x ".join(x["axes"]) or "no axis", x["loop"], x["size"], x["times"])
        groups.setdefault(group, collections.Counter())[_overlap(x["between"])] += 1
    return {
        f"{kind} over {axes}, {loop}, {format_bytes(size)}, {times} per step"
        + f" (x {overlaps.total()})" * (overlaps.total() > 1): "; ".join(
            text + f" (x {number})" * (1 < number < overlaps.total()) for text, number in overlaps.items()
        )
        for (kind, axes, loop, size, times), overlaps in groups.items()
    }


def _overlap(between: dict[str, int]) -> str:
    if not between:
        return "not overlapped"
    return "overlapped with " + ", ".join(f"{key} {n}" for key, n in sorted(between.items()))


def format_bytes(size: float | int) -> str:
    """Format a number of bytes: 1234567 as "1.23 MB"."""
    return f"{count.format_number(float(size))}B"
