"""Training step of a config on this machine's devices or on GPUs that are not attached, to count and to compile."""

import math
from typing import Any

from ml_collections import ConfigDict

from leanformer import programs
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup


NOMINAL_EXAMPLES = 1_281_167  # the epoch length changes no cost, but the schedule needs one


def build(c: ConfigDict, name: str | None) -> train_setup.Run:
    """Return the training setup of a config, to count and to compile its training step.

    Args:
        c: config.
        name: key of `hardware.DEVICES` for GPUs that need not be attached, one per device of `c.mesh`; None for this
            host's devices.

    Raises:
        ConfigError: the name is unknown, XLA's CUDA plugin is missing, or the config does not fit the mesh.
    """
    if name is None:
        return train_setup.build(c, examples=NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh))
    shape = {axis: max(size, 1) for axis, size in c.mesh.items()}
    mesh = meshes.make_mesh(**shape, devices=programs.gpus(name, math.prod(shape.values())))
    with programs.pretend_attached(mesh.devices.flat[0]):
        return train_setup.build(c, examples=NOMINAL_EXAMPLES, mesh=mesh)


def contents(run: train_setup.Run) -> dict[str, Any]:
    """Return the arguments of a training step by content, for `programs.memory_by_content`.

    The names are "parameters", "batch statistics", "moments" (of the optimizer), "averages" (EMA weights) and "batch";
    the values are trees of abstract arrays with shardings, empty if there are none.
    """
    state = run.state
    parts = {"parameters": state.params, "batch statistics": state.statistics, "moments": state.moments}
    return parts | {"averages": state.ema, "batch": run.batch}


def peak_bytes(c: ConfigDict, name: str | None) -> int:
    """Compile a config's training step, and return its peak bytes per device.

    The arguments and errors are those of `build` and `programs.peak_memory`.
    """
    return programs.peak_memory(programs.compile_for_gpu(build(c, name).lower_train_step()))
