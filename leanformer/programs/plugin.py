"""Ahead-of-time compilation targets: GPUs that are not attached, as described by XLA's CUDA plugin.

The plugin contains a description of each supported GPU: units, clocks, memory. It needs neither a driver nor NVIDIA's
libraries. It cannot measure: see `launches` for the consequences.
"""

import functools
import importlib.metadata
import importlib.util
import mmap
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import topologies

from leanformer.costs.hardware import DEVICES, HOST
from leanformer.errors import ConfigError
from leanformer.programs import hlo


PLUGINS = {"jax_plugins.xla_cuda12": "jax-cuda12-pjrt", "jax_plugins.xla_cuda13": "jax-cuda13-pjrt"}
INSTALL = (
    "pip install --constraint constraints.txt --editable '.[gpu-compile]': a download of 0.2 GB, 0.5 GB on disk, "
    "on Linux; neither a GPU nor CUDA is needed"
)


def devices(name: str, count: int) -> list[Any]:
    """Return descriptions of GPUs that are not attached, as JAX devices for a mesh: ahead-of-time compilation targets.

    Args:
        name: key of `hardware.DEVICES`.
        count: number of devices. They are in hosts of HOST (8) devices; if `count` is not a multiple of it, in one
            host.

    Raises:
        ConfigError: the name is unknown, or the plugin is missing or does not match this jaxlib.
    """
    hosts = count // HOST if count % HOST == 0 else 1
    shape = f"1x{hosts}x{count // hosts}"
    return topologies.get_topology_desc("absent", "cuda", topology=shape, target_config=description(name)).devices


def memory(name: str) -> int:
    """Return the bytes of memory of a device by its name in `hardware.DEVICES`. Raises the errors of `devices`."""
    return int(hlo.find(r"device_memory_size: (\d+)", description(name)))


def description(name: str) -> str:
    """Return the plugin's description of a device, the text of a `GpuTargetConfigProto`.

    Args:
        name: key of `hardware.DEVICES`.

    Raises:
        ConfigError: the name is unknown, or the plugin is missing or does not match this jaxlib.
    """
    if name not in DEVICES:
        raise ConfigError(f"--device={name}: unknown device. Choose one of: {', '.join(DEVICES)}.")
    texts = _read_descriptions(_find_library())
    if DEVICES[name] not in texts:
        raise ConfigError(
            f"--device={name}: the installed plugin does not describe this device. It describes: "
            f"{', '.join(sorted(texts))}."
        )
    return texts[DEVICES[name]]


def _find_library() -> Path:
    """Return the path of the plugin's library. Raises ConfigError if it is missing or does not match this jaxlib."""
    for module, package in PLUGINS.items():
        if importlib.util.find_spec("jax_plugins") and (spec := importlib.util.find_spec(module)):
            version = importlib.metadata.version(package)
            if version != jaxlib.__version__:
                raise ConfigError(
                    f"--device requires XLA's CUDA plugin in the version of jaxlib: found {package} {version}, "
                    f"jaxlib {jaxlib.__version__} (jax {jax.__version__}). Run: {INSTALL}."
                )
            return Path((spec.submodule_search_locations or [""])[0]) / "xla_cuda_plugin.so"
    raise ConfigError(f"--device requires XLA's CUDA plugin, which is not installed. Run: {INSTALL}.")


@functools.cache
def _read_descriptions(library: Path) -> dict[str, str]:
    """Return the descriptions of all GPUs in the library, by the library's names for them."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = [match.group().decode() for match in re.finditer(rb"gpu_device_info \{[\t\n -~]*", content)]
    named = {text: re.search(r'device_description_str: "([^"]*)"', text) for text in texts}
    return {name[1]: text for text, name in named.items() if name}
