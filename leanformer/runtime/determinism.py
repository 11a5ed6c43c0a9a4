"""Bitwise determinism on GPUs, for `config.deterministic=True`: the same program gives the same bits in every run.

Without it, results on a GPU may differ from run to run, and a resumed run may end slightly differently. XLA times
several kernels during compilation and picks the fastest. Some kernels (scatter, cuDNN's backward pass of attention)
add in the order in which their threads arrive. `--xla_gpu_deterministic_ops` excludes both.

Cost: XLA picks kernels by rule instead of by measurement, uses no Triton kernels, and uses slower versions of the
kernels named above. The slowdown depends on the model; compare `examples_per_s` with and without it. CPUs are always
deterministic. The number of devices and processes, the GPU type and the library versions must still be the same.
"""

import os
from collections.abc import Mapping

from leanformer.errors import ConfigError
from leanformer.runtime.jax_internals import backends_are_initialized


NAME = "--xla_gpu_deterministic_ops"
NUMERICS = (  # variables that may change the numbers of a run, and are written to its config.json
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
)


def is_required() -> bool:
    """Return whether XLA_FLAGS requires deterministic kernels (`--xla_gpu_deterministic_ops`)."""
    return _find_flag() in (NAME, f"{NAME}=true", f"{NAME}=1")


def _find_flag() -> str | None:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return next((flag for flag in reversed(flags) if flag.partition("=")[0] == NAME), None)


def require(deterministic: bool) -> None:
    """Add the flag of deterministic kernels to XLA_FLAGS if `deterministic`; do nothing otherwise.

    Call this before a device is used. Raises ConfigError if devices are already in use, or XLA_FLAGS contains the
    opposite.
    """
    if not deterministic or is_required():
        return
    if current := _find_flag():
        raise ConfigError(f"deterministic=True contradicts XLA_FLAGS={current}. Remove one of them.")
    if backends_are_initialized():
        raise ConfigError(
            f"deterministic=True cannot be set: devices are already in use. Start with XLA_FLAGS={NAME}=true."
        )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NAME}=true".strip()


def numerics(environ: Mapping[str, str]) -> dict[str, str]:
    """Return {name: value} of the variables in NUMERICS that are set."""
    return {name: environ[name] for name in NUMERICS if name in environ}
