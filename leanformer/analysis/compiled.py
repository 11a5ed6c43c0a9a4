"""A training step compiled for a GPU that need not be here: its memory, and what it asks of the GPU.

Nothing is run and nothing is allocated; `plugin` has the devices, `launches` reads the program.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer.costs import communication, count, hardware, launches, plugin, remedies
from leanformer.costs.remedies import Setting
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.training import experiment, report


NOMINAL_EXAMPLES = 1_281_167  # an epoch's length changes no cost, but a schedule needs one
MOST = 0.95  # of a GPU's memory, leaving what CUDA itself and its libraries hold
# Has XLA ask cuDNN about its calls where no GPU is; not its default. benchmarks/ask_cudnn.sh brings what that needs.
ASK_CUDNN = "--xla_gpu_cudnn_deviceless_compilation_mode=CUDNN_DEVICELESS_COMPILATION_ALWAYS"
SOURCES = {
    "memory": "XLA's assignment of buffers in the compiled step; what is held, by its shapes",
    "limit": f"the plugin's description of the GPU; JAX takes {hardware.TAKEN:.0%} or XLA_PYTHON_CLIENT_MEM_FRACTION",
    "launches": "instructions of the scheduled program's text, times the turns of their loops as XLA found them",
    "products": "the same; library and tiles chosen without measuring, where a GPU would try several at start",
    "cuDNN": "the same; whether cuDNN has an engine for a call only cuDNN knows, if it was asked",
    "collectives": "the same; what lies between a collective's start and its end can run beside it",
    "peak": "the maker's data sheet, dense, sums in float32 (leanformer/costs/hardware.py)",
}


def figures(c: ConfigDict, name: str) -> dict[str, Any]:
    """The figures of one config's training step on the GPUs `name`, as many as `c.mesh` has.

    Raises:
        ConfigError: as `plugin.devices` and `experiment.build`.
    """
    run = build(c, name)
    compiled = compile_step(run)
    loops = launches.read(compiled.as_text(), run.mesh.shape)
    memory = plugin.memory(name)
    calls = launches.by_name(loops, launches.CUDNN)
    return {
        "device": run.device.device_kind,
        "jax": jax.__version__,
        "mesh": dict(run.mesh.shape),
        "batch_size": c.batch_size,
        "dtype": c.dtype,
        "without_bfloat16": hardware.without_bfloat16(run.device) if c.dtype == "bfloat16" else None,
        "peak_flops": hardware.peak_flops(run.device),
        "attention": run.backend,
        "attention_reason": run.backend_reason,
        "params": count.parameters(run.like.params),
        "bytes_a_device": held(run, compiled),
        "device_memory_bytes": memory,
        "limit_bytes": int(hardware.TAKEN * memory),
        "launches": launches.total(loops),
        "by_group": {group: launches.total(loops, group) for group in launches.GROUPS},
        "products": launches.by_name(loops, launches.PRODUCTS),
        "cudnn": calls,
        "cudnn_asked": ASK_CUDNN in os.environ.get("XLA_FLAGS", ""),
        "loops": [_loop(loop) for loop in loops],
        "collectives": [dataclasses.asdict(x) for loop in loops for x in loop.collectives],
        "sources": SOURCES,
    }


def build(c: ConfigDict, name: str | None) -> experiment.Experiment:
    """Return the experiment on `c.mesh` of GPUs `name`, or of this machine's devices if None. Raises as `figures`."""
    if name is None:
        return experiment.build(c, examples=NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh))
    shape = {axis: max(size, 1) for axis, size in c.mesh.items()}
    mesh = meshes.make_mesh(**shape, devices=plugin.devices(name, math.prod(shape.values())))
    return experiment.build(c, examples=NOMINAL_EXAMPLES, mesh=mesh)


def compile_step(run: Any) -> jax.stages.Compiled:
    """The training step as training compiles it.

    Raises:
        ConfigError: cuDNN was asked (ASK_CUDNN), and refuses one of its calls.
    """
    try:
        with communication.uncached():
            return run.compile_train_step()
    except jax.errors.JaxRuntimeError as error:
        reason, found, _ = str(error).partition(" in external/xla")
        if not found or "cuda_dnn" not in str(error):
            raise
        raise ConfigError(f'cuDNN refuses a call: {reason}. Use --config.model.backend="xla".') from error


def held(run: experiment.Experiment, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on each device during a step, by what they hold; "all" is the peak."""
    like = run.like
    parts = {"parameters": like.params, "batch statistics": like.statistics, "moments": like.moments}
    parts |= {"averages": like.ema, "batch": run.abstract_batch()}
    sizes = {name: _bytes_a_device(tree) for name, tree in parts.items()}
    return sizes | {"temporaries": compiled.memory_analysis().temp_size_in_bytes, "all": count.peak_memory(compiled)}


def _bytes_a_device(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _loop(loop: launches.Loop) -> dict[str, Any]:
    by = {f"{launch.group} {launch.name}": number for launch, number in loop.launches.items()}
    own = {"name": loop.name, "operation": loop.operation, "turns": loop.turns}
    return own | {"launches_a_turn": sum(by.values()), "by": by}


def excess(f: dict[str, Any]) -> int:
    """Bytes of the peak that a device has no room for; 0 or less where the step fits."""
    return f["bytes_a_device"]["all"] - f["limit_bytes"]


def remedies_of(c: ConfigDict, name: str, f: dict[str, Any]) -> list[tuple[Setting, int]]:
    """Settings that could make the step of `figures(c, name)` fit, and the peak that each one has: all are compiled."""
    devices = math.prod(f["mesh"].values())
    split = remedies.split(c, devices)
    if devices == 1 and remedies.shared(c, hardware.HOST):
        split = Setting({"mesh.fsdp": hardware.HOST}, f"on {hardware.HOST} such GPUs, which share all of it out")
    rest = [setting for setting in (remedies.remat(c), split) if setting]
    return [*_accumulated(c, name, f), *((setting, peak(setting.of(c), name)) for setting in rest)]


def _accumulated(c: ConfigDict, name: str, f: dict[str, Any]) -> Iterator[tuple[Setting, int]]:
    """The fewest micro-batches that fit: guessed from what shrinks with them, and compiled until one does."""
    sizes = f["bytes_a_device"]
    fixed = sizes["all"] - sizes["temporaries"] + sizes["parameters"]  # the sums of gradients are one more copy
    for setting in remedies.accumulations(c, math.prod(f["mesh"].values())):
        share = sizes["temporaries"] * c.accumulate / setting.changes["accumulate"]
        if fixed + share > f["limit_bytes"]:
            continue
        found = peak(setting.of(c), name)
        if found <= f["limit_bytes"]:
            yield setting, found
            return


def peak(c: ConfigDict, name: str | None) -> int:
    """Return the bytes that a step of `c` needs at its most on each device of `build`. Raises as `figures`."""
    return count.peak_memory(compile_step(build(c, name)))


def too_large(f: dict[str, Any], tried: list[tuple[Setting, int]]) -> str:
    """By how much a step does not fit, and what each setting that was tried would come to."""
    peak, limit = f["bytes_a_device"]["all"], f["limit_bytes"]
    lines = [
        f"The step needs {_gb(peak)} a device, {_gb(excess(f))} more than the {_gb(limit)} that JAX takes of "
        f"{f['device']}'s {_gb(f['device_memory_bytes'])}. By the compiled step:"
    ]
    for setting, found in tried:
        verdict = "fits" if found <= limit else f"still {_gb(found - limit)} too much"
        lines.append(f"{setting.words}: {_gb(found)} a device, {verdict}; {setting.why}")
    if peak <= MOST * f["device_memory_bytes"]:
        lines.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST}: JAX takes more of the memory, if nobody else needs it")
    return "\n  ".join(lines)


def table(name: str, f: dict[str, Any]) -> str:
    """The figures for a terminal."""
    axes = ", ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    rows = {"attention": f"{f['attention']} ({f['attention_reason']})", "parameters": f"{f['params']:,}"}
    rows |= {"precision": f"{f['dtype']} activations, float32 parameters"}
    rows |= {"note": f["without_bfloat16"]} if f["without_bfloat16"] else {}
    peak = f"{count.human(f['peak_flops'])}FLOP/s" if f["peak_flops"] else "none"
    rows |= {"peak of bfloat16 products": peak}
    title = f"{name} on {math.prod(f['mesh'].values())} x {f['device']} ({axes}), batch {f['batch_size']}"
    pages = [report.page(f"{title}, compiled by jax {f['jax']}", rows)]

    sizes = {key: f"{_gb(size)}" for key, size in f["bytes_a_device"].items() if size}
    sizes |= {"the device has": f"{_gb(f['device_memory_bytes'])}, and JAX takes {_gb(f['limit_bytes'])} of it"}
    pages.append(report.page("memory a device", sizes))

    rows = {"all": f"{f['launches']:,} ({', '.join(f'{key} {n:,}' for key, n in f['by_group'].items() if n)})"}
    for loop in f["loops"]:
        turns = loop["turns"] and f"{loop['name']} x {loop['turns']}"
        by = ", ".join(f"{key} {number}" for key, number in sorted(loop["by"].items()))
        rows |= {f"  {turns}": f"{loop['launches_a_turn']:,} a turn: {by}"} if turns else {}
    pages.append(report.page("kernels and copies launched in a step", rows))

    rows = {library: f"{number:,} a step" for library, number in f["products"].items()} or {"none": ""}
    pages.append(report.page("products by library", rows))
    asked = "cuDNN was asked, and takes it" if f["cudnn_asked"] else "cuDNN not asked (benchmarks/ask_cudnn.sh asks it)"
    rows = {call: f"{number:,} a step; {asked}" for call, number in f["cudnn"].items()} or {"none": ""}
    pages.append(report.page("calls of cuDNN", rows))
    endless = collections.Counter(loop["operation"] for loop in f["loops"] if loop["turns"] is None)
    rows = {operation: f"{number} of them" for operation, number in endless.items()} or {"none": ""}
    pages.append(report.page("loops of unknown length", rows))
    pages.append(report.page("collectives", _sent(f["collectives"]) or {"none": ""}))
    return "\n".join([*pages, report.page("where the figures come from", f["sources"])])


def _sent(collectives: list[dict[str, Any]]) -> dict[str, str]:
    """One row for all that are alike."""
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
