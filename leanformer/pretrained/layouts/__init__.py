"""Key maps between our parameters and the layouts that others publish weights in, found by family and layout."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from leanformer.config.common import LEVERS
from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry


SOURCES = ("timm", "huggingface")
LAYOUTS = ("own", *SOURCES)  # our own, which every family has, and those of others


def layout(source: str, arguments: Mapping[str, Any]) -> list[Entry]:
    """The key map of a model's family to one layout.

    Args:
        source: one of SOURCES: a function of that name in `leanformer.pretrained.layouts.<family>`.
        arguments: of the model, its family's `name` among them.

    Raises:
        ConfigError: the family has no such layout, or the model a lever that others' models know nothing of.
    """
    name = arguments["name"]
    known = {module.name for module in pkgutil.iter_modules(__path__)} - {"entries"}
    found = importlib.import_module(f"{__name__}.{name}") if name in known else None
    if not hasattr(found, source):
        have = [key for key in SOURCES if hasattr(found, key)]
        raise ConfigError(f'No key map from "{source}" to the family {name}. Known: {", ".join(have) or "none"}.')
    if pulled := [key for key in LEVERS if arguments.get(key)]:
        raise ConfigError(
            f'model.{pulled[0]}={arguments[pulled[0]]}: a model of the layout "{source}" would compute something else '
            "with these weights. Leave it out, or keep them in our own layout."
        )
    return getattr(found, source)(**arguments)
