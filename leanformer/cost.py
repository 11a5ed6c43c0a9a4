"""What a config costs, without training: `python -m leanformer.cost --config=A [--against=B | --mesh=M] [--json]`.

Parameters are exact. FLOPs count matrix products, 2 a multiply-add, per example. Memory is that of the training step
at the configured batch, from the program compiled for this machine's devices; shapes only, nothing is allocated.

`--mesh=data=8,fsdp=4,tensor=2` prints what each device of such a mesh holds, computes and sends, however few devices
this machine has: the training step is compiled for as many CPU devices, and never run.

`--device=h100 [--mesh=data=8]` compiles the step for GPUs that need not be here, and prints what it holds there, what
it has them launch, and what runs beside its collectives. It needs the extra `gpu-compile`. Exit status 2 if a device
has no room for the step, with settings to try.
"""

import collections
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer import config as configs
from leanformer.analysis import compiled
from leanformer.costs import communication, count, hardware, plugin
from leanformer.costs.communication import Collective, Loop
from leanformer.errors import ConfigError
from leanformer.reports import compiled as pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime.jax_internals import backends_are_initialized
from leanformer.training import checks, report, train_setup


NOTES = """\
Read from the program as XLA's SPMD partitioner leaves it; backends merge collectives and run them beside products.
Bytes moved go through each device in rings of n: of the result, (n-1)/n in an all-gather or all-to-all, 2(n-1)/n in an
all-reduce, all in a permute. "sliced": all-reduces of which a device keeps one slice; backends with reduce-scatter move
half, and the least times count them so. Temporaries are those of XLA for CPUs with attention "xla": a fused kernel has
no T x S matrices to keep. Least times: at dense bfloat16 peaks; NVLink inside hosts of eight, 450 GB/s each way (A100
300); between hosts one card a device, 50 GB/s (A100 25), assumed. No real step reaches them.
"""


def cost(c: ConfigDict, *, memory: bool = True) -> dict[str, Any]:
    """Return a config's params, forward_flops, train_flops, train_memory_bytes, modules, batch_size and device.

    Args:
        memory: False skips the compilation that train_memory_bytes, then None, needs.
    """
    run = compiled.build(c, None)
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
    """Rows for a terminal, with the ratio to `other`, the costs of `against`, where there is one."""

    def row(key: str, unit: str = "", of: str = "") -> str:
        text = f"{costs[key]:,}{unit}"
        return text if other is None else f"{text:<24} against {other[key]:,}{unit}{of}: {costs[key] / other[key]:.3f}"

    rows = {"parameters": row("params")}
    rows |= {f"  {module}": f"{number:,}" for module, number in costs["modules"].items()}
    rows["forward FLOPs an example"] = row("forward_flops")
    rows["training FLOPs an example"] = row("train_flops")
    of = f" of batch {other['batch_size']}" if other and other["batch_size"] != costs["batch_size"] else ""
    rows[f"training memory, batch {costs['batch_size']}"] = row("train_memory_bytes", " B", of)
    name = f"{name} against {against}" if other else name
    return report.page(f"{name}, compiled for {costs['device']}", rows)


def mesh_cost(c: ConfigDict, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """What a device of `c.mesh` holds, computes and sends in a training step. Takes as many devices, of any kind."""
    run = train_setup.build(c, examples=compiled.NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh, devices=devices))
    program, text = communication.compile_and_read(run.lower_train_step())
    loops = communication.read(text, run.mesh.shape)
    everything = [x for loop in loops for x in loop.collectives]
    return {
        "mesh": dict(run.mesh.shape),
        "batch_size": c.batch_size,
        "dtype": c.dtype,
        "attention": run.model.backend,
        "params": count.parameters(run.state.params),
        "bytes_a_device": compiled.held(run, program),
        "flops_a_device": sum(loop.flops * loop.turns for loop in loops),
        "collectives": _summed(everything),
        "bytes_moved": sum(x.moved() for x in everything),
        "bytes_moved_scattering": sum(x.moved(scatter=True) for x in everything),
        "loops": [_loop(loop) for loop in loops],
        "floors": {name: _floor(name, loops) for name in hardware.LINKED},
    }


def _summed(collectives: list[Collective]) -> list[dict[str, Any]]:
    """One row for each kind and axes, the largest first."""
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
    return {"name": loop.name, "turns": loop.turns, "flops_a_turn": loop.flops, "bytes_moved_a_turn": dict(sent)}


def _floor(name: str, loops: list[Loop]) -> dict[str, Any]:
    """Seconds of a step at the peak of products and links, and in each loop how long a turn's collectives last,
    as a share of its products: under 1 they can hide behind the products of the turn before or after."""
    peak = hardware.SHEETS[name].peak

    def sending(loop: Loop) -> float:
        return sum((x.moved(scatter=True) / hardware.bandwidth(name, x.group) for x in loop.collectives), 0.0)

    products = sum(loop.flops * loop.turns for loop in loops) / peak
    sent = sum(map(sending, loops))
    shares = [
        {
            "name": loop.name,
            "turns": loop.turns,
            "sending_to_products": sending(loop) / (loop.flops * loop.turns / peak),
        }
        for loop in loops
        if loop.flops
    ]
    total = {
        "products": products,
        "sending": sent,
        "overlapped": max(products, sent),
        "one_after_the_other": products + sent,
    }
    return {f"{key}_s": value for key, value in total.items()} | {"loops": shares}


def mesh_table(name: str, costs: dict[str, Any]) -> str:
    """The figures of `mesh_cost` for a terminal."""
    sizes, human = costs["bytes_a_device"], count.human
    devices = math.prod(costs["mesh"].values())
    axes = ",".join(f"{axis}={size}" for axis, size in costs["mesh"].items())
    title = f"{name} on {axes}: a device of {devices}, batch {costs['batch_size']}, {costs['dtype']}"
    pages = [report.page(title, {key: f"{human(float(size))}B" for key, size in sizes.items() if size})]
    rows = {}
    for row in costs["collectives"]:
        over = f"{row['kind']} over {' x '.join(row['axes']) or 'nothing'}{', sliced' if row['sliced'] else ''}"
        rows[over] = f"{row['times']:>5} times {human(row['bytes_moved']):>8}B"
    rows["all"] = f"{human(float(costs['bytes_moved']))}B"
    if costs["bytes_moved_scattering"] < costs["bytes_moved"]:
        rows["all, sliced ones as reduce-scatter"] = f"{human(float(costs['bytes_moved_scattering']))}B"
    pages.append(report.page("sent and received in a step", rows))
    rows = {}
    for kind, floor in costs["floors"].items():
        times = {
            key.removesuffix("_s").replace("_", " "): f"{1e3 * s:.3g} ms" for key, s in floor.items() if key != "loops"
        }
        rows[kind] = ", ".join(f"{key} {value}" for key, value in times.items())
        for loop in floor["loops"]:
            share = f"sending takes {loop['sending_to_products']:.3f} of the products' time"
            rows[f"  {kind} {loop['name']} x {loop['turns']}"] = share
    pages.append(report.page("least time of a step at the peaks of products and links", rows))
    return "\n".join([*pages, NOTES])


def cpus(number: int) -> list[jax.Device]:
    """So many devices of this machine's CPU, few as its cores may be.

    Raises:
        ConfigError: this process has started with fewer, and cannot have more.
    """
    if not backends_are_initialized():
        _leave_accelerators_alone()
        jax.config.update("jax_num_cpu_devices", number)
    found = jax.devices("cpu")
    if len(found) < number:
        raise ConfigError(
            f"--mesh asks for {number} devices, and this process has started JAX with {len(found)} of the CPU. "
            "Ask in a process of its own: python -m leanformer.cost ..."
        )
    return found[:number]


def _leave_accelerators_alone() -> None:
    """What is only compiled needs none; and a GPU that is here may be at work."""
    if not backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


def on_device(c: ConfigDict, name: str, device: str, *, as_json: bool) -> None:
    """Prints the figures of `compiled`. Raises ConfigError where the step is too large for the device."""
    _leave_accelerators_alone()
    found = compiled.figures(c, device)
    print(json.dumps(found) if as_json else pages.table(name, found), flush=True)
    if reason := pages.too_large(c, found):
        raise ConfigError(reason)


@cli.command(
    cli.CONFIG,
    cli.Flag("against", "Config file to compare with.", ConfigDict),
    cli.Flag("mesh", "Devices by axis, those left out being 1: data=8,fsdp=4,tensor=2."),
    cli.Flag("device", f"GPUs to compile for, here or not: {', '.join(plugin.DEVICES)}."),
    cli.Flag("json", "Print one JSON object instead of a table.", bool, default=False),
)
def main(f: cli.Values) -> None:
    c, name = f.config, f.files["config"]
    if f.mesh is not None or f.device is not None:
        if f.against is not None:
            raise ConfigError("--against stands alone: with --mesh or --device ask for one config after the other.")
        c.mesh.update(configs.arguments(f.mesh or "", data=1, fsdp=1, tensor=1))
        if min(c.mesh.values()) < 1:
            raise ConfigError(f"--mesh={f.mesh}: say how many devices, 1 at least along each axis.")
        c.probe.every = 0  # no part of a step, so its batch need not fit the mesh
        checks.check(c)
        if f.device is not None:
            on_device(c, name, f.device, as_json=f.json)
            return
        costs = mesh_cost(c, cpus(math.prod(c.mesh.values())))
        print(json.dumps(costs) if f.json else mesh_table(name, costs))
        return
    costs = cost(c)
    other = cost(f.against) if f.against else None
    if f.json:
        ratios = (
            {key: costs[key] / other[key] for key in costs if key.startswith(("params", "forward", "train"))}
            if other
            else None
        )
        print(json.dumps(costs | ({"against": other, "ratios": ratios} if other else {})))
    else:
        print(table(name, costs, other, f.files.get("against", "")))


if __name__ == "__main__":
    cli.run(main)
