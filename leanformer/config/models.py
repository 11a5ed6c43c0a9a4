"""The section `model` of a config: keys of an architecture, and options of all attention types."""

import functools
from typing import Any

from leanformer.config import common, declare
from leanformer.config.declare import ConfigDict
from leanformer.errors import ConfigError


MODELS, LAYERS = declare.PACKAGE / "models", declare.PACKAGE / "layers"


def architectures() -> list[str]:
    """Return the names of all architectures, the modules of `leanformer.models`."""
    return sorted(file.stem for file in MODELS.glob("[a-z]*.py"))


@functools.cache
def keys_of(name: str) -> Any:
    """Return the declaration of the keys of an architecture. Raises ConfigError if the name is unknown."""
    if name not in architectures():
        raise ConfigError(f'model.name="{name}": unknown architecture. Choose one of: {", ".join(architectures())}.')
    return declare.declared_in(MODELS / f"{name}.py", vars(common))


@functools.cache
def attention_keys() -> list[Any]:
    """Return the declarations of the options of all attention types, which are unset by default."""
    files = (file for file in sorted(LAYERS.glob("*.py")) if "\nclass Keys" in file.read_text(encoding="utf-8"))
    return [declare.declared_in(file, vars(common)) for file in files]


def model(name: str, **values: Any) -> ConfigDict:
    """Return the section `model` of a config: the keys of an architecture, and unset options of attention.

    Args:
        name: architecture, a module of `leanformer.models`.
        values: values of keys that replace the defaults of the architecture.
    """
    m = declare.section(keys_of(name)(name=name))
    for options in attention_keys():
        m.update(declare.section(options()))
    m.update(values)
    return m


def meanings(name: str) -> dict[str, str]:
    """Return {dotted key: meaning} of the section `model` of an architecture."""
    texts: dict[str, str] = {}
    for keys in (keys_of(name), *attention_keys()):
        texts |= {key: text for key, text in declare.meanings(keys, "model.").items() if key not in texts}
    return texts
