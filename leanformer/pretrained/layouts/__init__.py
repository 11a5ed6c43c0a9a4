"""Layouts: maps between our parameters and those of published checkpoints, by architecture and library."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.config.common import listed_per_layer
from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry


SOURCES = ("timm", "huggingface")
LAYOUTS = ("own", *SOURCES)  # our own, which every architecture has, and published ones
# Interventions that change the forward pass: published weights then compute other outputs.
INTERVENTIONS = ("spectral", "sigma_reparam", "mlp_sigma_reparam", "graying")


def layout(source: str, arguments: Mapping[str, Any]) -> list[Entry]:
    """Return the layout of a model in a published library: entries that map its names of tensors to ours.

    Args:
        source: one of SOURCES, the name of a function in `leanformer.pretrained.layouts.<architecture>`.
        arguments: arguments of the model, including the `name` of its architecture.

    Raises:
        ConfigError: the architecture has no such layout, or the model has an intervention that the layout lacks, or
            layers of different sizes.
    """
    name = arguments["name"]
    module = _find_module(name)
    if not hasattr(module, source):
        available = [key for key in SOURCES if hasattr(module, key)]
        raise ConfigError(
            f'No layout between "{source}" and the architecture {name}. Available: {", ".join(available) or "none"}.'
        )
    if active := [key for key in INTERVENTIONS if arguments.get(key)]:
        raise ConfigError(
            f'model.{active[0]}={arguments[active[0]]}: the layout "{source}" has no such option, so its model would '
            "compute something else with these weights. Leave the option out, or use our own layout."
        )
    if uneven := listed_per_layer(arguments):
        name, sizes = next(iter(uneven.items()))
        raise ConfigError(
            f'model.{name}={sizes}: models of the layout "{source}" have one number for all layers. Set one number, or '
            "use our own layout."
        )
    return getattr(module, source)(**arguments)


def rename(source: str, arguments: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a file; those of nanochat as those of a Llama, others unchanged.

    Args:
        source, arguments: arguments of `layout`.
        tensors: tensors of the file by name.
    """
    module = _find_module(arguments["name"])
    if source != "huggingface" or not hasattr(module, "rename"):
        return dict(tensors)
    return module.rename(tensors, **arguments)


def _find_module(name: str) -> Any:
    """Return the module of an architecture; None if it has no layout."""
    modules = {info.name for info in pkgutil.iter_modules(__path__)} - {"entries"}
    return importlib.import_module(f"{__name__}.{name}") if name in modules else None
