"""How the process allocates memory, which on a CPU is the device's memory too."""

import ctypes
from importlib import metadata


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h of glibc


def keep_freed() -> None:
    """Makes malloc keep what is freed, so that every step works in the same memory. Call it before JAX starts.

    glibc gives large blocks back to the system at once: a step of vit_b_7x16 at batch 8 takes 600 MB anew, in 150,000
    page faults. One heap for all threads, never shrunk, has none; the process holds its peak until it ends. Does
    nothing where an accelerator's plugin is installed, whose memory is its own, or where there is no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not metadata.entry_points(group="jax_plugins"):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)
