"""Settings of a process before JAX starts: malloc, and bitwise determinism on GPUs (`config.deterministic`).

XLA times several kernels during compilation and picks the fastest, and some kernels (scatter, cuDNN's backward pass of
attention) add in the order in which their threads arrive. `--xla_gpu_deterministic_ops` excludes both, at a cost that
depends on the model: no Triton kernels, and slower ones of those named. CPUs are always deterministic. The number of
devices and processes, the GPU type and the library versions must still be the same.
"""

import ctypes
import os
from importlib import metadata

from leanformer.errors import ConfigError


FLAG = "--xla_gpu_deterministic_ops"
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h of glibc


def keep_freed_memory() -> None:
    """Make malloc reuse freed memory, which on a CPU is the device's memory too. Call this before JAX starts.

    glibc returns large blocks to the system at once: a step of vit_b_7x16 at batch 8 allocates 600 MB again, with
    150,000 page faults. The process then holds its peak memory until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not metadata.entry_points(group="jax_plugins"):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)


def require_deterministic(wanted: bool) -> None:
    """Add the flag of deterministic kernels to XLA_FLAGS if it is wanted. Raises ConfigError if that is too late."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    current = next((flag for flag in reversed(flags) if flag.partition("=")[0] == FLAG), None)
    if not wanted or current in (FLAG, f"{FLAG}=true", f"{FLAG}=1"):
        return
    if current:
        raise ConfigError(f"deterministic=True contradicts XLA_FLAGS={current}. Remove one of them.")
    from jax._src import xla_bridge  # has no public name; XLA's flags have no effect once devices are in use

    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"deterministic=True cannot be set: devices are already in use. Start with XLA_FLAGS={FLAG}=true."
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{FLAG}=true"])
