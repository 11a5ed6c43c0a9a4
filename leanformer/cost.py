"""Costs of a config, without training: `python -m leanformer.cost --config=A [--against=B | --mesh=M] [--json]`.

Parameters are exact. FLOPs are those of matmuls, 2 per multiply-add, per example. Memory is the peak of the training
step at the configured batch size, compiled for this machine's devices; nothing is allocated.

`--mesh=data=8,fsdp=4,tensor=2` prints memory, FLOPs and communication volume per device of such a mesh. The training
step is compiled for as many CPU devices and never run, so this machine does not need them.

`--device=h100 [--mesh=data=8]` compiles the step ahead of time for GPUs that are not attached. It prints their memory,
the launched kernels, and the overlap of collectives. It requires the extra `gpu-compile`. The exit status is 2 if the
step does not fit the device's memory; settings to try are printed.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("cost")  # imports this module again, once the command line is parsed


import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli, programs
from leanformer import config as configs
from leanformer.analysis import step
from leanformer.costs import count, hardware, oom_suggestions
from leanformer.errors import ConfigError
from leanformer.reports import costs as pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime import phases
from leanformer.runtime.jax_internals import backends_are_initialized
from leanformer.training import checks, train_setup


MOST = 0.95  # usable fraction of a GPU's memory; CUDA and its libraries need the rest
COMPILING = "Compiling the training step"


def cost(c: ConfigDict, *, memory: bool = True) -> dict[str, Any]:
    """Return the costs of a config on this machine's devices.

    The keys are params, forward_flops and train_flops (per example), train_memory_bytes (peak of the training step per
    device), modules (parameters by module), batch_size and device (its type).

    Args:
        c: validated config.
        memory: False to skip the compilation for train_memory_bytes, which is then None.

    Raises:
        ConfigError: the config does not fit the devices.
    """
    run = step.build(c, None)
    forward, training = run.flops_per_example
    return {
        "params": count.parameters(run.state.params),
        "forward_flops": forward,
        "train_flops": training,
        "train_memory_bytes": programs.peak_memory(run.compile_train_step()) if memory else None,
        "batch_size": c.batch_size,
        "device": run.model.device.device_kind,
        "modules": count.by_module(run.state.params),
    }


def mesh_cost(c: ConfigDict, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return memory, FLOPs and communication volume per device of a training step on `c.mesh`.

    The keys are mesh (sizes by axis), batch_size, dtype, attention (its backend), params (their number),
    bytes_per_device {content: bytes, with "temporaries" and "all" for the peak}, and those of
    `programs.read_communication`.

    Args:
        c: validated config.
        devices: as many devices as the mesh has, CPU devices for instance, since nothing is run.

    Raises:
        ConfigError: the config does not fit the mesh.
        NotImplementedError: the program cannot be read, as in `programs.read_communication`.
    """
    run = train_setup.build(c, examples=step.NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh, devices=devices))
    compiled, communication = programs.read_communication(run.lower_train_step(), run.model.mesh.shape)
    return {
        "mesh": dict(run.model.mesh.shape),
        "batch_size": c.batch_size,
        "dtype": c.dtype,
        "attention": run.model.backend,
        "params": count.parameters(run.state.params),
        "bytes_per_device": programs.memory_by_content(compiled, step.contents(run)),
        **communication,
    }


def gpu_cost(c: ConfigDict, name: str) -> dict[str, Any]:
    """Return memory, kernels and collectives of a training step compiled for GPUs that need not be attached.

    The keys are device (its type), jax (version), mesh (sizes by axis), batch_size, dtype, peak_flops (FLOP/s; None if
    not known), attention (its backend), attention_reason, params (their number), bytes_per_device {content: bytes, with
    "temporaries" and "all" for the peak}, device_memory_bytes, limit_bytes (usable by JAX by default), and those of
    `programs.read_kernels`.

    Args:
        c: validated config; one GPU per device of `c.mesh`.
        name: key of `hardware.DEVICES`, such as "h100".

    Raises:
        ConfigError: the name is unknown, XLA's CUDA plugin is missing, cuDNN was asked and does not support a call, or
            the config does not fit the mesh.
    """
    run = step.build(c, name)
    compiled = programs.compile_for_gpu(run.lower_train_step())
    memory, device = programs.gpu_memory(name), run.model.device
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "mesh": dict(run.model.mesh.shape),
        "batch_size": c.batch_size,
        "dtype": c.dtype,
        "peak_flops": hardware.peak_flops(device),
        "attention": run.model.backend,
        "attention_reason": run.model.backend_reason,
        "params": count.parameters(run.state.params),
        "bytes_per_device": programs.memory_by_content(compiled, step.contents(run)),
        "device_memory_bytes": memory,
        "limit_bytes": int(hardware.JAX_MEMORY_FRACTION * memory),
        **programs.read_kernels(compiled, run.model.mesh.shape),
    }


def cpus(number: int) -> list[jax.Device]:
    """Return `number` virtual CPU devices, independent of the number of cores.

    If JAX is not initialised yet, this process is restricted to them: JAX then uses no GPU.

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


def _too_large(c: ConfigDict, f: dict[str, Any]) -> str | None:
    """Return a message with the memory that a step lacks and settings to try, or None if the step fits its device.

    `f` are the costs from `gpu_cost`.
    """
    peak, limit, memory = f["bytes_per_device"]["all"], f["limit_bytes"], f["device_memory_bytes"]
    if peak <= limit:
        return None
    human = pages.format_bytes
    lines = [
        f"The step needs {human(peak)} per device, {human(peak - limit)} more than the {human(limit)} that JAX uses of "
        f"the {human(memory)} of {f['device']}. Try one of:",
        *map(str, oom_suggestions.suggest(c, math.prod(f["mesh"].values()))),
    ]
    if peak <= MOST * memory:
        lines.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST}: JAX uses more of the memory")
    return "\n  ".join(lines)


def on_device(c: ConfigDict, name: str, device: str, *, as_json: bool) -> None:
    """Compile a config's training step for a GPU that need not be attached, and print its costs.

    If JAX is not initialised yet, this process is restricted to the CPU.

    Args:
        c: validated config.
        name: name of the config.
        device: key of `hardware.DEVICES`, such as "h100".
        as_json: True to print one JSON object instead of tables.

    Raises:
        ConfigError: an error of `gpu_cost`; or, after the costs are printed, the step needs more memory than JAX uses
            of the device.
    """
    _use_cpu_only()
    with phases.announce(COMPILING):
        costs = gpu_cost(c, device)
    print(json.dumps(costs) if as_json else pages.gpu_table(name, costs), flush=True)
    if reason := _too_large(c, costs):
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
        print(json.dumps(costs) if f.json else pages.mesh_table(name, costs))
        return
    with phases.announce(COMPILING):
        costs = cost(c)
        other = cost(f.against) if f.against else None
    if f.json:
        ratios = (
            {key: costs[key] / other[key] for key in costs if key.startswith(("params", "forward", "train"))}
            if other
            else None
        )
        more = {"against": other, "ratios": ratios} if other else {}
        print(json.dumps(costs | more))
    else:
        print(pages.table(name, costs, other, f.files.get("against", "")))
