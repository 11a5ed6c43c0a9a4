"""Key maps between our parameters and the layouts that others publish weights in, found by family and layout."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

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
        ConfigError: the family has no such layout.
    """
    name = arguments["name"]
    known = {module.name for module in pkgutil.iter_modules(__path__)} - {"entries"}
    found = importlib.import_module(f"{__name__}.{name}") if name in known else None
    if not hasattr(found, source):
        have = [key for key in SOURCES if hasattr(found, key)]
        raise ConfigError(f'No key map from "{source}" to the family {name}. Known: {", ".join(have) or "none"}.')
    return getattr(found, source)(**arguments)
