"""Settings of malloc; on a CPU they apply to the device's memory too."""

import ctypes
from importlib import metadata


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h of glibc


def keep_freed() -> None:
    """Make malloc reuse freed memory, so that every step works in the same memory. Call this before JAX starts.

    glibc returns large blocks to the system at once: a step of vit_b_7x16 at batch 8 allocates 600 MB again, with
    150,000 page faults. One heap for all threads that never shrinks has no such faults, but the process holds its peak
    memory until it ends. Does nothing if a plugin of an accelerator with its own memory is installed, or without
    mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not metadata.entry_points(group="jax_plugins"):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)
