"""Costs of a config, without training: `python -m leanformer.cost --config=A [--against=B | --mesh=M] [--json]`.

Parameters are exact. FLOPs are those of matmuls, 2 per multiply-add, per example. Memory is the peak of the training
step at the configured batch size, compiled for this machine's devices; nothing is allocated. Where --against has other
heads, a line gives what published models of the same kind lost or gained by that change (docs/published_models.md).

`--mesh=data=8,fsdp=4,tensor=2` prints memory, FLOPs and communication volume per device of such a mesh. The training
step is compiled for as many CPU devices and never run, so this machine does not need them.

`--device=h100 [--mesh=data=8]` compiles the step ahead of time for GPUs that are not attached. It prints their memory,
the launched kernels, and the overlap of collectives. It requires the extra `gpu-compile`. The exit status is 2 if the
step does not fit the device's memory; settings to try are printed.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("cost")  # imports this module again, once the command line is parsed


import collections
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer import config as configs
from leanformer.analysis import published, step
from leanformer.costs import count, hardware
from leanformer.errors import ConfigError
from leanformer.programs import communication
from leanformer.programs.communication import Collective, Loop
from leanformer.reports import costs as pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime import phases
from leanformer.runtime.jax_internals import backends_are_initialized
from leanformer.training import checks, progress, train_setup


COMPILING = "Compiling the training step"
NOTES = """\
The program is read after XLA's SPMD partitioner; backends later merge collectives and overlap them with matmuls.
Bytes moved: sent by each device of a ring of n; (n-1)/n of the result in an all-gather or all-to-all, 2(n-1)/n in an
all-reduce, all of it in a permute. "sliced": all-reduces of which a device keeps one slice; backends with
reduce-scatter move half, which the lower bounds assume. Temporaries are those of XLA for CPUs with attention "xla"; a
fused kernel stores no T x S matrices.
Lower bounds on step time: dense bfloat16 peaks; NVLink within hosts of eight, 450 GB/s in each direction (A100: 300);
between hosts, by assumption, one NIC per device with 50 GB/s (A100: 25). Real steps are slower.
"""


BOUNDS = {
    "products_s": "matmuls",
    "sending_s": "communication",
    "overlapped_s": "fully overlapped",
    "one_after_the_other_s": "not overlapped",
}


def cost(c: ConfigDict, *, memory: bool = True) -> dict[str, Any]:
    """Return a config's params, forward_flops, train_flops, train_memory_bytes, modules, batch_size and device.

    Args:
        c: config.
        memory: False to skip the compilation for train_memory_bytes, which is then None.
    """
    run = step.build(c, None)
    forward, training = run.flops_per_example
    return {
        "params": count.parameters(run.state.params),
        "forward_flops": forward,
        "train_flops": training,
        "train_memory_bytes": count.peak_memory(run.compile_train_step()) if memory else None,
        "batch_size": c.batch_size,
        "device": run.model.device.device_kind,
        "modules": count.by_module(run.state.params),
    }


def table(name: str, costs: dict[str, Any], other: dict[str, Any] | None = None, against: str = "") -> str:
    """Format the costs of a config for a terminal, with ratios to `other`, the costs of the config `against`."""

    def row(key: str, unit: str = "", of: str = "") -> str:
        text = f"{costs[key]:,}{unit}"
        return text if other is None else f"{text:<24} against {other[key]:,}{unit}{of}: {costs[key] / other[key]:.3f}"

    rows = {"parameters": row("params")}
    rows |= {f"  {module}": f"{number:,}" for module, number in costs["modules"].items()}
    rows["forward FLOPs per example"] = row("forward_flops")
    rows["training FLOPs per example"] = row("train_flops")
    of = f" at batch {other['batch_size']}" if other and other["batch_size"] != costs["batch_size"] else ""
    rows[f"training memory, batch {costs['batch_size']}"] = row("train_memory_bytes", " B", of)
    name = f"{name} against {against}" if other else name
    return progress.format_page(f"{name}, compiled for {costs['device']}", rows)


def mesh_cost(c: ConfigDict, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return memory, FLOPs and communication volume per device of a training step on `c.mesh`.

    Args:
        c: config.
        devices: as many devices as the mesh has, of any type.
    """
    run = train_setup.build(c, examples=step.NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh, devices=devices))
    program, text = communication.compile_and_read(run.lower_train_step())
    loops = communication.read(text, run.mesh.shape)
    everything = [x for loop in loops for x in loop.collectives]
    return {
        "mesh": dict(run.mesh.shape),
        "batch_size": c.batch_size,
        "dtype": c.dtype,
        "attention": run.model.backend,
        "params": count.parameters(run.state.params),
        "bytes_per_device": step.memory_by_content(run, program),
        "flops_per_device": sum(loop.flops * loop.turns for loop in loops),
        "collectives": _sum_collectives(everything),
        "bytes_moved": sum(x.moved() for x in everything),
        "bytes_moved_scattering": sum(x.moved(scatter=True) for x in everything),
        "loops": [_loop(loop) for loop in loops],
        "floors": {name: _floor(name, loops) for name in hardware.LINKED},
    }


def _sum_collectives(collectives: list[Collective]) -> list[dict[str, Any]]:
    """Return one row per type of collective and axes, the largest communication volume first."""
    rows: dict[Any, dict[str, Any]] = {}
    for x in collectives:
        row = rows.setdefault((x.kind, x.axes, x.sliced), {"kind": x.kind, "axes": x.axes, "sliced": x.sliced})
        row["times"] = row.get("times", 0) + x.times
        row["bytes_moved"] = row.get("bytes_moved", 0) + x.moved()
    return sorted(rows.values(), key=lambda row: -row["bytes_moved"])


def _loop(loop: Loop) -> dict[str, Any]:
    sent = collections.Counter({x.kind: 0 for x in loop.collectives})
    for x in loop.collectives:
        sent[x.kind] += x.moved(scatter=True) / loop.turns
    return {
        "name": loop.name,
        "turns": loop.turns,
        "flops_per_iteration": loop.flops,
        "bytes_moved_per_iteration": dict(sent),
    }


def _floor(name: str, loops: list[Loop]) -> dict[str, Any]:
    """Return lower bounds on the time of a step, in seconds, and the ratio of communication to matmul time per loop.

    If the ratio is below 1, collectives can be overlapped with the matmuls of the previous or the next iteration.
    """
    peak = hardware.DATA_SHEETS[name].peak

    def sending_seconds(loop: Loop) -> float:
        return sum((x.moved(scatter=True) / hardware.bandwidth(name, x.group) for x in loop.collectives), 0.0)

    products = sum(loop.flops * loop.turns for loop in loops) / peak
    sending = sum(map(sending_seconds, loops))
    shares = [
        {
            "name": loop.name,
            "turns": loop.turns,
            "sending_to_products": sending_seconds(loop) / (loop.flops * loop.turns / peak),
        }
        for loop in loops
        if loop.flops
    ]
    total = {
        "products": products,
        "sending": sending,
        "overlapped": max(products, sending),
        "one_after_the_other": products + sending,
    }
    return {f"{key}_s": value for key, value in total.items()} | {"loops": shares}


def mesh_table(name: str, costs: dict[str, Any]) -> str:
    """Format the result of `mesh_cost` for a terminal."""
    sizes, human = costs["bytes_per_device"], count.format_number
    devices = math.prod(costs["mesh"].values())
    axes = ",".join(f"{axis}={size}" for axis, size in costs["mesh"].items())
    title = f"{name} on {axes}: per device of {devices}, batch {costs['batch_size']}, {costs['dtype']}"
    pages = [progress.format_page(title, {key: f"{human(float(size))}B" for key, size in sizes.items() if size})]
    rows = {}
    for row in costs["collectives"]:
        over = f"{row['kind']} over {' x '.join(row['axes']) or 'no axis'}{', sliced' if row['sliced'] else ''}"
        rows[over] = f"{row['times']:>5} times {human(row['bytes_moved']):>8}B"
    rows["all"] = f"{human(float(costs['bytes_moved']))}B"
    if costs["bytes_moved_scattering"] < costs["bytes_moved"]:
        rows["all, sliced ones as reduce-scatter"] = f"{human(float(costs['bytes_moved_scattering']))}B"
    pages.append(progress.format_page("communication volume per step", rows))
    rows = {}
    for kind, floor in costs["floors"].items():
        rows[kind] = ", ".join(f"{label} {1e3 * floor[key]:.3g} ms" for key, label in BOUNDS.items())
        for loop in floor["loops"]:
            ratio = f"communication takes {loop['sending_to_products']:.3f} of the matmul time"
            rows[f"  {kind} {loop['name']} x {loop['turns']}"] = ratio
    pages.append(progress.format_page("lower bounds on step time (peak matmul throughput and bandwidth)", rows))
    return "\n".join([*pages, NOTES])


def cpus(number: int) -> list[jax.Device]:
    """Return `number` virtual CPU devices, independent of the number of cores.

    Raises:
        ConfigError: JAX is already initialised with fewer devices in this process.
    """
    if not backends_are_initialized():
        _use_cpu_only()
        jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices("cpu")
    if len(devices) < number:
        raise ConfigError(
            f"--mesh needs {number} devices, but JAX is already initialised with {len(devices)} CPU devices in this "
            "process. Use a separate process: python -m leanformer.cost ..."
        )
    return devices[:number]


def _use_cpu_only() -> None:
    """Make JAX use only the CPU: compilation needs no accelerator, and an attached GPU may be in use."""
    if not backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


def on_device(c: ConfigDict, name: str, device: str, *, as_json: bool) -> None:
    """Print the costs of the step compiled for `device`.

    Raises:
        ConfigError: the step does not fit the device's memory.
    """
    _use_cpu_only()
    with phases.announce(COMPILING):
        costs = step.compiled_costs(c, device)
    print(json.dumps(costs) if as_json else pages.table(name, costs), flush=True)
    if reason := pages.too_large(c, costs):
        raise ConfigError(reason)


@cli.body("cost")
def main(f: cli.Values) -> None:
    c, name = f.config, f.files["config"]
    if f.mesh is not None or f.device is not None:
        if f.against is not None:
            raise ConfigError("--against cannot be combined with --mesh or --device. Run one command per config.")
        c.mesh.update(configs.arguments(f.mesh or "", data=1, fsdp=1, tensor=1))
        if min(c.mesh.values()) < 1:
            raise ConfigError(f"--mesh={f.mesh}: every axis must have a size of at least 1.")
        c.probe.update(every=0, every_epochs=0.0)  # the probe is not part of a step, so its batch need not fit the mesh
        checks.check(c)
        if f.device is not None:
            on_device(c, name, f.device, as_json=f.json)
            return
        with phases.announce(COMPILING):
            costs = mesh_cost(c, cpus(math.prod(c.mesh.values())))
        print(json.dumps(costs) if f.json else mesh_table(name, costs))
        return
    with phases.announce(COMPILING):
        costs = cost(c)
        other = cost(f.against) if f.against else None
    step = None
    if other:
        sections = (model.model.to_dict() for model in (f.against, c))
        step = published.compare(*sections, (other["params"], costs["params"]))
    if f.json:
        ratios = (
            {key: costs[key] / other[key] for key in costs if key.startswith(("params", "forward", "train"))}
            if other
            else None
        )
        more = {"against": other, "ratios": ratios, "published": step and dataclasses.asdict(step)} if other else {}
        print(json.dumps(costs | more))
    else:
        print(table(name, costs, other, f.files.get("against", "")))
        if step:
            print(step)
