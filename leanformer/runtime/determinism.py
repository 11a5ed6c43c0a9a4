"""What `config.deterministic=True` sets: the same bits from the same program on the same GPUs, again and again.

Without it a GPU may give other bits on every run, and a run that was killed goes on to a slightly different end: XLA
times several kernels while it compiles and takes what was fastest that day, and some kernels (scatter, cuDNN's backward
pass of attention) add in whatever order their threads arrive. `--xla_gpu_deterministic_ops` rules these out.

What it costs: XLA picks kernels by rule instead of by measurement, does without its Triton kernels, and takes slower
versions of the kernels named. How much slower depends on the model; `examples_per_s` with and without tells. CPUs are
deterministic as they are, and nothing changes there. The number of devices and processes, the kind of GPU and the
library versions still have to be the same.
"""

import os

from leanformer.errors import ConfigError
from leanformer.runtime.jax_internals import backends_are_initialized


NAME = "--xla_gpu_deterministic_ops"


def require(wanted: bool) -> None:
    """Sets XLA's flag if `wanted`. Call it before anything touches a device.

    Raises:
        ConfigError: it is too late, or XLA_FLAGS says the opposite.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    said = next((flag for flag in reversed(flags) if flag.partition("=")[0] == NAME), None)
    if not wanted or said in (NAME, f"{NAME}=true", f"{NAME}=1"):
        return
    if said:
        raise ConfigError(f"deterministic=True, and XLA_FLAGS has {said}. Take one of them away.")
    if backends_are_initialized():
        raise ConfigError(f"deterministic=True came too late: devices are in use. Start with XLA_FLAGS={NAME}=true.")
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{NAME}=true"])
