"""Model families, found by name: `build("vit", ...)` is `leanformer.models.vit.Model(...)`."""

import importlib
import pkgutil
from typing import Any

from flax import nnx

from leanformer.errors import ConfigError


def family(name: str) -> type[nnx.Module]:
    """The `Model` class of a family. Raises ConfigError naming the known families."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ConfigError(f'model.name="{name}" is not a family here. Known: {", ".join(known)}.')
    return importlib.import_module(f"{__name__}.{name}").Model


def build(name: str, *, rngs: nnx.Rngs, **arguments: Any) -> nnx.Module:
    """One model from its family's name and keyword arguments."""
    return family(name)(**arguments, rngs=rngs)
