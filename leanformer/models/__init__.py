"""Model families, found by name: `build("vit", ...)` is a `leanformer.models.vit.Model`."""

import importlib
import pkgutil
from typing import Any

import jax.numpy as jnp
from flax import nnx

from leanformer.errors import ConfigError


def family(name: str) -> type[nnx.Module]:
    """The `Model` class of a family. Raises ConfigError naming the known families."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ConfigError(f'model.name="{name}" is not a family here. Known: {", ".join(known)}.')
    return importlib.import_module(f"{__name__}.{name}").Model


def check(name: str, **arguments: Any) -> None:
    """Raises ConfigError unless a family takes these arguments: all by name, each of its type, sizes from 1."""
    family(name).check(arguments)


def build(name: str, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, **arguments: Any) -> nnx.Module:
    """One model from its family's name and keyword arguments. Raises ConfigError for those that cannot be."""
    return family(name).from_section(arguments, dtype=dtype, rngs=rngs)
