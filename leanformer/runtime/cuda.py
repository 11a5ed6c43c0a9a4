"""CUDA packages of JAX and GPUs of this host, compared before and after JAX starts.

JAX computes on the CPU, with a warning at most, if its CUDA packages are missing, do not match jaxlib, or cannot start.
This module does not import JAX.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from leanformer.errors import ConfigError


DRIVERS = {13: 580, 12: 525}  # oldest major version of NVIDIA's driver by CUDA version, newest CUDA first
PLATFORMS = ("cuda", "gpu")
CPU = "set JAX_PLATFORMS=cpu to compute on the CPU"


def check(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this host has NVIDIA GPUs that JAX would not use. Call this before JAX starts.

    Does nothing if the environment variables choose another platform, or no GPU.

    Args:
        environ: environment variables.
    """
    if not is_wanted(environ) or not gpus():
        return
    installed, driver, jaxlib = packages(), driver_version(), metadata.version("jaxlib")
    versions = {int(name[8:10]) for name in installed}  # "jax-cuda12-plugin"
    if not versions:
        raise ConfigError(
            f"NVIDIA driver {driver or 'unknown'}: this host has GPUs, but JAX is installed without CUDA. "
            f"{install(driver)}, or {CPU}."
        )
    if len(versions) > 1:
        raise ConfigError(
            f"{', '.join(sorted(installed))}: JAX is installed for two versions of CUDA. Run: pip uninstall "
            f"{' '.join(name for name in sorted(installed) if f'cuda{extra(driver)}' not in name)}."
        )
    for name, version in installed.items():
        if _numbers(version) != _numbers(jaxlib):
            raise ConfigError(
                f"{name}=={version}: not the version of jaxlib {jaxlib}, so JAX would not use GPUs. "
                f"{install(driver, *versions)}, or {CPU}."
            )
    for cuda in versions:
        if driver and int(driver.partition(".")[0]) < DRIVERS.get(cuda, 0):
            raise ConfigError(
                f"NVIDIA driver {driver}: CUDA {cuda} requires {DRIVERS[cuda]} or newer. {install(driver)}, update the "
                f"driver, or {CPU}."
            )


def check_platform(platform: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if JAX has started on the CPU although this host has NVIDIA GPUs that it was allowed to use.

    It is allowed to unless JAX_PLATFORMS or CUDA_VISIBLE_DEVICES excludes them, so also if both are unset; see
    `is_wanted`. Call this after JAX has started, and `check` before.

    Args:
        platform: platform of JAX's first device, such as "cpu" or "gpu".
        environ: environment variables, such as os.environ.
    """
    if platform == "cpu" and is_wanted(environ) and gpus():
        raise ConfigError(
            f"NVIDIA driver {driver_version() or 'not loaded'}: JAX could not start on the GPUs of this host, and "
            f"would compute on the CPU. Its warning above has the reason. Check nvidia-smi, or {CPU}."
        )


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether JAX_PLATFORMS and CUDA_VISIBLE_DEVICES in `environ` let JAX use NVIDIA GPUs."""
    platforms, visible = environ.get("JAX_PLATFORMS", ""), environ.get("CUDA_VISIBLE_DEVICES", "all")
    chosen = not platforms or bool(set(PLATFORMS) & set(platforms.split(",")))
    return chosen and visible not in ("", "-1", "NoDevFiles")


def packages() -> dict[str, str]:
    """Return {name: version} of JAX's installed CUDA packages, such as "jax-cuda13-plugin"."""
    names = [f"jax-cuda{cuda}-{part}" for cuda in DRIVERS for part in ("plugin", "pjrt")]
    found = {name: next(iter(metadata.Distribution.discover(name=name)), None) for name in names}
    return {name: package.version for name, package in found.items() if package is not None}


def gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs of this host or container, by the device files in the folder `devices`."""
    return sum(re.fullmatch(r"nvidia\d+|dxg", path.name) is not None for path in devices.iterdir())  # dxg: WSL


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's driver, such as "550.54.15"; None if it is not loaded.

    Args:
        path: file in which the driver states its version.
    """
    match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text(encoding="utf-8")) if path.is_file() else None
    return match and match[1]


def uuids(environ: Mapping[str, str], chosen: Sequence[int] | None) -> list[str]:
    """Return the UUIDs of the GPUs of this process, as nvidia-smi reports them; [] if they are not known.

    Args:
        environ: environment variables.
        chosen: positions among the visible GPUs; all if empty, not known if None.
    """
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    if chosen is None or not is_wanted(environ):
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    present = done.stdout.split()
    names = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    visible = [present[int(name)] if name.isdecimal() and int(name) < len(present) else name for name in names]
    visible = visible or present
    return [visible[i] for i in chosen if i < len(visible)] if chosen else visible


def check_shared(processes: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise ConfigError if two processes use one GPU, or have different numbers of GPUs.

    Args:
        processes: pair (host, UUIDs of the GPUs) of each process, in the order of their indices.
    """
    owners: dict[str, int] = {}
    for index, (host, names) in enumerate(processes):
        for name in names:
            if (other := owners.setdefault(name, index)) != index:
                raise ConfigError(
                    f"{name}: processes {other} and {index} on {host} use the same GPU. Start one process per node, or "
                    "set JAX_LOCAL_DEVICE_IDS for each."
                )
    numbers = {len(names) for _, names in processes}
    if len(numbers) > 1:
        counted = ", ".join(f"process {i} on {host} {len(names)}" for i, (host, names) in enumerate(processes))
        raise ConfigError(f"The processes have different numbers of GPUs: {counted}. Check CUDA_VISIBLE_DEVICES.")


def extra(driver: str | None) -> int:
    """Return the newest CUDA version (12, 13, ...) that a driver such as "550.54.15" supports; the newest for None.

    It is the oldest known version for a driver that supports none.
    """
    major = int(driver.partition(".")[0]) if driver else max(DRIVERS.values())
    return next((cuda for cuda, least in DRIVERS.items() if major >= least), min(DRIVERS))


def install(driver: str | None, cuda: int | None = None) -> str:
    """Return a sentence with the command that installs JAX for a CUDA version, by default the newest for the driver."""
    return f"Run: pip install --constraint constraints.txt --editable '.[cuda{cuda or extra(driver)}]'"


def _numbers(version: str) -> str:
    """Return the version without suffixes, as JAX compares it."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else version
