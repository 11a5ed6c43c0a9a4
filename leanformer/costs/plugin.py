"""GPUs that are not here, whose programs can be compiled: XLA's CUDA plugin describes them, and needs none to compile.

The plugin carries a text for each GPU that XLA's makers have measured or written down: units, clocks, memory. It needs
neither a driver nor NVIDIA's libraries. What it cannot do is measure: see `launches` for what that leaves open.
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

from leanformer.costs.hardware import HOST
from leanformer.errors import ConfigError


# What the plugin calls a device, by the name it is asked for.
DEVICES = {
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "h200": "NVIDIA H200 141GB HBM3e",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-pcie": "NVIDIA A100 80GB PCIe",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell",
    "rtx-a6000": "NVIDIA RTX A6000",
    "v100": "Tesla V100-SXM2-16GB",
    "p100": "Tesla P100-SXM2-16GB",
}
PLUGINS = {"jax_plugins.xla_cuda12": "jax-cuda12-pjrt", "jax_plugins.xla_cuda13": "jax-cuda13-pjrt"}
INSTALL = (
    "pip install --constraint constraints.txt --editable '.[gpu-compile]': a download of 0.2 GB, 0.5 GB on disk, "
    "on Linux; neither a GPU nor CUDA is needed"
)


def devices(name: str, count: int) -> list[Any]:
    """`count` devices of a kind that need not be here, in hosts of HOST: for a mesh, to lower and to compile for.

    Raises:
        ConfigError: a name that is not known; no plugin, or not of this jax.
    """
    hosts = count // HOST if count % HOST == 0 else 1
    shape = f"1x{hosts}x{count // hosts}"
    return topologies.get_topology_desc("absent", "cuda", topology=shape, target_config=description(name)).devices


def memory(name: str) -> int:
    """Bytes of memory that a device of this kind has. Raises as `devices`."""
    return int(re.search(r"device_memory_size: (\d+)", description(name))[1])


def description(name: str) -> str:
    """The plugin's text on a device, a `GpuTargetConfigProto`. Raises as `devices`."""
    if name not in DEVICES:
        raise ConfigError(f"--device={name} is not known. Choose one of: {', '.join(DEVICES)}.")
    found = _descriptions(_library())
    if DEVICES[name] not in found:
        raise ConfigError(f"--device={name}: this plugin does not describe it. It has: {', '.join(sorted(found))}.")
    return found[DEVICES[name]]


def _library() -> Path:
    """The plugin's file. Raises ConfigError where there is none, or one that this jaxlib cannot use."""
    for module, package in PLUGINS.items():
        if importlib.util.find_spec("jax_plugins") and (spec := importlib.util.find_spec(module)):
            version = importlib.metadata.version(package)
            if version != jaxlib.__version__:
                raise ConfigError(
                    f"--device needs XLA's CUDA plugin of the same version as jaxlib: found {package} {version} beside "
                    f"jaxlib {jaxlib.__version__} (jax {jax.__version__}). {INSTALL}."
                )
            return Path(spec.submodule_search_locations[0]) / "xla_cuda_plugin.so"
    raise ConfigError(f"--device needs XLA's CUDA plugin, which is not installed. {INSTALL}.")


@functools.cache
def _descriptions(library: Path) -> dict[str, str]:
    """Every GPU's text inside the library, by what it calls the GPU."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = [found.group().decode() for found in re.finditer(rb"gpu_device_info \{[\t\n -~]*", content)]
    named = {text: re.search(r'device_description_str: "([^"]*)"', text) for text in texts}
    return {name[1]: text for text, name in named.items() if name}
