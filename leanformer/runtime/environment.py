"""Environment of a command: variables of JAX, XLA and matplotlib, and limits of the system, checked before JAX starts.

This module does not import JAX, because JAX and XLA read most variables when they are imported, and end the process if
a value is wrong.
"""

import os
import re
import resource
import subprocess
import sys
import traceback
from collections.abc import Mapping
from importlib import metadata

from leanformer.errors import ConfigError, first_line
from leanformer.runtime import cuda


TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off", "")  # as JAX reads them
REFUSED = {  # variable: (values that work, reason why others do not)
    "JAX_ENABLE_X64": (FALSE, "the programs of a run are compiled for float32 and bfloat16"),
    "JAX_DISABLE_JIT": (FALSE, "the training step is compiled before the first step"),
    "JAX_NUMPY_DTYPE_PROMOTION": (("standard",), "the optimizers of optax use standard promotion"),
    "JAX_TRANSFER_GUARD": (("allow", "log"), "batches are transferred to the device"),
    "JAX_RANDOM_SEED_OFFSET": (("0",), "it changes all random numbers. Set config.seed instead"),
}
NUMERICS = (  # variables that may change the numbers of a run, and are written to its config.json
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
)
GPU_PLATFORMS = ("cuda", "rocm", "gpu")
PLATFORMS = ("cpu", "tpu", *GPU_PLATFORMS)
DEVICES = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES")  # choice of devices
PARSE_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"  # reads XLA_FLAGS, in 0.3 s
LIMITS = (  # limits of a process, their command in a shell, and the smallest value with which a small run works
    (resource.RLIMIT_NOFILE, "open files", "ulimit -n", 256),
    (resource.RLIMIT_AS, "address space in KiB", "ulimit -v", 2**21),
)
UNITS = {resource.RLIMIT_AS: 1024}  # bytes per unit of the command
OPEN_FILES = 2**16  # requested limit of open files; data workers use about 30 each


def prepare() -> None:
    """Set matplotlib's backend to one that needs no display, and raise the limit of open files up to OPEN_FILES."""
    os.environ["MPLBACKEND"] = "agg"  # an unknown one would be an error at the end of a run, when plots are drawn
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def check(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable or a limit with which JAX or XLA does not work. Call this before JAX starts.

    If XLA_FLAGS is set, another process parses it as XLA would. The GPUs of this host are checked too, see
    `cuda.check`.

    Args:
        environ: environment variables.
    """
    for name, (allowed, reason) in REFUSED.items():
        if environ.get(name, allowed[0]).lower() not in allowed:
            raise ConfigError(f"{name}={environ[name]}: not supported, because {reason}. Unset it.")
    _check_platforms(environ.get("JAX_PLATFORMS", ""))
    cuda.check(environ)
    for limit, what, command, least in LIMITS:
        value = resource.getrlimit(limit)[0] // UNITS.get(limit, 1)
        if 0 <= value < least:  # RLIM_INFINITY is negative
            raise ConfigError(f"{command} {value}: the limit of {what} is below {least:,}. Raise it.")
    if "XLA_FLAGS" in environ:
        _check_flags(environ)


def _check_platforms(value: str) -> None:
    names, plugins = [name for name in value.split(",") if name], metadata.entry_points(group="jax_plugins")
    for name in names:
        if name not in PLATFORMS and not plugins:
            raise ConfigError(f"JAX_PLATFORMS={value}: unknown platform {name}. Choose from {', '.join(PLATFORMS)}.")
        if name in GPU_PLATFORMS and not plugins:
            raise ConfigError(
                f"JAX_PLATFORMS={value}: JAX is installed without GPU support. {cuda.install(cuda.driver_version())}, "
                "or unset it."
            )


def _check_flags(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if XLA does not accept XLA_FLAGS; XLA ends the process, so another process parses them."""
    done = subprocess.run(
        [sys.executable, "-c", PARSE_FLAGS], env=dict(environ), capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        reasons = re.findall(r"flags\w*\.cc:\d+\] (.*)", done.stderr) or done.stderr.strip().splitlines()[-1:]
        reason = reasons[0] if reasons else f"status {done.returncode}"
        raise ConfigError(f"XLA_FLAGS={environ['XLA_FLAGS']}: XLA does not accept it: {reason} Correct or unset it.")


def explain_import(error: Exception, environ: Mapping[str, str]) -> ConfigError | None:
    """Return the error to raise if an environment variable caused an error of importing JAX; None for other errors."""
    words = set(re.findall(r"\w+", str(error).upper().replace(".", "_")))  # "jax.default_device"
    name = next((name for name in environ if name.startswith("JAX_") and name in words), None)
    if name is None:
        return None
    return ConfigError(f"{name}={environ[name]}: JAX does not accept it: {error}. Correct or unset it.")


def explain_devices(error: BaseException, environ: Mapping[str, str]) -> str | None:
    """Return the message for an error of JAX while it starts its devices, with the variables that choose them.

    None for any other error.
    """
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, RuntimeError | AssertionError) or "jax._src.xla_bridge" not in frames[-1:]:
        return None
    settings = ", ".join(f"{name}={environ[name]}" for name in DEVICES if name in environ) or "JAX_PLATFORMS is not set"
    return f"{settings}: JAX cannot use these devices: {first_line(error)}. Check the driver, or set JAX_PLATFORMS=cpu."


def numerics(environ: Mapping[str, str]) -> dict[str, str]:
    """Return {name: value} of the variables in NUMERICS that are set; they may change the numbers of a run."""
    return {name: environ[name] for name in NUMERICS if name in environ}
