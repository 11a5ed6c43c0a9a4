"""Page of a training step that is compiled for a GPU: memory, kernels and collectives."""

import collections
import math
from typing import Any

from ml_collections import ConfigDict

from leanformer.costs import count, hardware, remedies
from leanformer.training.report import page


MOST = 0.95  # of a GPU's memory, leaving what CUDA and its libraries hold
SOURCES = {
    "memory": "XLA's assignment of buffers in the compiled step; what is held, by its shapes",
    "limit": f"the plugin's description of the GPU; JAX takes {hardware.TAKEN:.0%} or XLA_PYTHON_CLIENT_MEM_FRACTION",
    "launches": "instructions of the scheduled program's text, times the turns of their loops as XLA found them",
    "products": "the same; library and tiles chosen without measuring, where a GPU would try several at start",
    "cuDNN": "the same; whether cuDNN has an engine for a call only cuDNN knows, if it was asked",
    "collectives": "the same; what lies between a collective's start and its end can run beside it",
    "peak": "the maker's data sheet, dense, sums in float32 (leanformer/costs/hardware.py)",
}


def too_large(c: ConfigDict, f: dict[str, Any]) -> str | None:
    """Return by how much a step does not fit its device and settings to try, None if it fits.

    Args:
        f: from `analysis.compiled.figures`.
    """
    peak, limit, memory = f["bytes_a_device"]["all"], f["limit_bytes"], f["device_memory_bytes"]
    if peak <= limit:
        return None
    lines = [
        f"The step needs {_gb(peak)} per device, {_gb(peak - limit)} more than the {_gb(limit)} that JAX takes of "
        f"{f['device']}'s {_gb(memory)}. Try one of:",
        *map(str, remedies.settings(c, math.prod(f["mesh"].values()))),
    ]
    if peak <= MOST * memory:
        lines.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST}: JAX takes more of the memory")
    return "\n  ".join(lines)


def table(name: str, f: dict[str, Any]) -> str:
    """Format the costs for a terminal."""
    axes = ", ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    rows = {"attention": f"{f['attention']} ({f['attention_reason']})", "parameters": f"{f['params']:,}"}
    rows |= {"precision": f"{f['dtype']} activations, float32 parameters"}
    rows |= {"note": f["without_bfloat16"]} if f["without_bfloat16"] else {}
    peak = f"{count.human(f['peak_flops'])}FLOP/s" if f["peak_flops"] else "none"
    rows |= {"peak of bfloat16 products": peak}
    title = f"{name} on {math.prod(f['mesh'].values())} x {f['device']} ({axes}), batch {f['batch_size']}"
    pages = [page(f"{title}, compiled by jax {f['jax']}", rows)]

    sizes = {key: f"{_gb(size)}" for key, size in f["bytes_a_device"].items() if size}
    sizes |= {"the device has": f"{_gb(f['device_memory_bytes'])}, and JAX takes {_gb(f['limit_bytes'])} of it"}
    pages.append(page("memory a device", sizes))

    rows = {"all": f"{f['launches']:,} ({', '.join(f'{key} {n:,}' for key, n in f['by_group'].items() if n)})"}
    for loop in f["loops"]:
        turns = loop["turns"] and f"{loop['name']} x {loop['turns']}"
        by = ", ".join(f"{key} {number}" for key, number in sorted(loop["by"].items()))
        rows |= {f"  {turns}": f"{loop['launches_a_turn']:,} a turn: {by}"} if turns else {}
    pages.append(page("kernels and copies launched in a step", rows))

    rows = {library: f"{number:,} a step" for library, number in f["products"].items()} or {"none": ""}
    pages.append(page("products by library", rows))
    asked = "cuDNN was asked, and takes it" if f["cudnn_asked"] else "cuDNN not asked (benchmarks/ask_cudnn.sh asks it)"
    rows = {call: f"{number:,} a step; {asked}" for call, number in f["cudnn"].items()} or {"none": ""}
    pages.append(page("calls of cuDNN", rows))
    endless = collections.Counter(loop["operation"] for loop in f["loops"] if loop["turns"] is None)
    rows = {operation: f"{number} of them" for operation, number in endless.items()} or {"none": ""}
    pages.append(page("loops of unknown length", rows))
    pages.append(page("collectives", _sent(f["collectives"]) or {"none": ""}))
    return "\n".join([*pages, page("where the figures come from", SOURCES)])


def _sent(collectives: list[dict[str, Any]]) -> dict[str, str]:
    """Return one row for all collectives that are equal."""
    alike = collections.Counter((*_what(x), _beside(x["between"])) for x in collectives)
    return {
        f"{kind} over {axes}, {loop}, {_gb(size)}, {times} a step" + (f" ({number} such)" if number > 1 else ""): beside
        for (kind, axes, loop, size, times, beside), number in alike.items()
    }


def _what(x: dict[str, Any]) -> tuple[Any, ...]:
    return x["kind"], " x ".join(x["axes"]) or "nothing", x["loop"], x["size"], x["times"]


def _beside(between: dict[str, int]) -> str:
    return "beside " + ", ".join(f"{key} {n}" for key, n in sorted(between.items())) if between else "alone"


def _gb(size: int) -> str:
    return f"{count.human(float(size))}B"
