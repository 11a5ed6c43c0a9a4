"""Memory, kernels and collectives of a training step compiled for a GPU, attached or not.

Nothing is run or allocated. `plugin` provides the devices, `launches` reads the program.
"""

import dataclasses
import math
import os
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer.costs import count, hardware
from leanformer.errors import ConfigError
from leanformer.programs import communication, launches, plugin
from leanformer.programs.target import pretend_attached
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup


NOMINAL_EXAMPLES = 1_281_167  # the epoch length changes no cost, but the schedule needs one
# Makes XLA check calls with cuDNN without a GPU; off by default. benchmarks/ask_cudnn.sh installs the requirements.
ASK_CUDNN = "--xla_gpu_cudnn_deviceless_compilation_mode=CUDNN_DEVICELESS_COMPILATION_ALWAYS"


def compiled_costs(c: ConfigDict, name: str) -> dict[str, Any]:
    """Return the costs of a config's training step on GPUs `name`, one per device of `c.mesh`.

    Raises the errors of `plugin.devices` and `train_setup.build`.
    """
    run = build(c, name)
    compiled = compile_step(run)
    loops = launches.read(compiled.as_text(), run.mesh.shape)
    memory = plugin.memory(name)
    calls = launches.by_name(loops, launches.CUDNN)
    return {
        "device": run.model.device.device_kind,
        "jax": jax.__version__,
        "mesh": dict(run.mesh.shape),
        "batch_size": c.batch_size,
        "dtype": c.dtype,
        "without_bfloat16": hardware.without_bfloat16(run.model.device) if c.dtype == "bfloat16" else None,
        "peak_flops": hardware.peak_flops(run.model.device),
        "attention": run.model.backend,
        "attention_reason": run.model.backend_reason,
        "params": count.parameters(run.state.params),
        "bytes_per_device": memory_by_content(run, compiled),
        "device_memory_bytes": memory,
        "limit_bytes": int(hardware.JAX_MEMORY_FRACTION * memory),
        "launches": launches.total(loops),
        "by_group": {group: launches.total(loops, group) for group in launches.GROUPS},
        "products": launches.by_name(loops, launches.PRODUCTS),
        "cudnn": calls,
        "cudnn_asked": ASK_CUDNN in os.environ.get("XLA_FLAGS", ""),
        "loops": [_loop(loop) for loop in loops],
        "collectives": [dataclasses.asdict(x) for loop in loops for x in loop.collectives],
    }


def build(c: ConfigDict, name: str | None) -> train_setup.TrainSetup:
    """Return the training setup on GPUs `name`, or on this host's devices if None. Errors as in `compiled_costs`."""
    if name is None:
        return train_setup.build(c, examples=NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh))
    shape = {axis: max(size, 1) for axis, size in c.mesh.items()}
    mesh = meshes.make_mesh(**shape, devices=plugin.devices(name, math.prod(shape.values())))
    with pretend_attached(mesh.devices.flat[0]):
        return train_setup.build(c, examples=NOMINAL_EXAMPLES, mesh=mesh)


def compile_step(run: train_setup.TrainSetup) -> jax.stages.Compiled:
    """Compile the training step as training does.

    Raises ConfigError if cuDNN was consulted (ASK_CUDNN) and does not support a call.
    """
    try:
        with communication.uncached():
            return run.compile_train_step()
    except jax.errors.JaxRuntimeError as error:
        reason, separator, _ = str(error).partition(" in external/xla")
        if not separator or "cuda_dnn" not in str(error):
            raise
        raise ConfigError(f'cuDNN does not support a call: {reason}. Use --config.model.backend="xla".') from error


def memory_by_content(run: train_setup.TrainSetup, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes per device during a step, by content; "all" is the peak."""
    state = run.state
    parts = {"parameters": state.params, "batch statistics": state.statistics, "moments": state.moments}
    parts |= {"averages": state.ema, "batch": run.abstract_batch()}
    sizes = {name: _count_bytes(tree) for name, tree in parts.items()}
    return sizes | {"temporaries": compiled.memory_analysis().temp_size_in_bytes, "all": count.peak_memory(compiled)}


def _count_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _loop(loop: launches.Loop) -> dict[str, Any]:
    by = {f"{launch.group} {launch.name}": number for launch, number in loop.launches.items()}
    record = {"name": loop.name, "operation": loop.operation, "turns": loop.turns}
    return record | {"launches_per_iteration": sum(by.values()), "by": by}


def peak_bytes(c: ConfigDict, name: str | None) -> int:
    """Return the peak bytes per device of a step of `c` on the devices of `build`. Errors as in `compiled_costs`."""
    return count.peak_memory(compile_step(build(c, name)))
