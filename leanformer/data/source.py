"""Where examples come from: anything with a length and random access, and how `data.name` says what.

Sources are picklable, since worker processes hold copies.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from leanformer.errors import ConfigError


NONE: Mapping[str, Any] = MappingProxyType({})


@runtime_checkable
class Source(Protocol):
    """Examples with random access. One without a length is endless; it can be trained on.

    Where examples have labels it has `num_classes`, None where the data do not say; and `classes`, their names, number
    0 first, None where they have none.
    """

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Which example that is, in words."""


def size(source: Source) -> int | None:
    """How many examples a source has; None of an endless one."""
    return len(source) if hasattr(source, "__len__") else None


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the word before the colon of a `data.name` stands for.

    Attributes:
        shown: how such a name is written, with <...> where the user's own words go.
        open: (what stands after the colon, split, what is wanted of the source) to the source.
        about: what it names, in words, where that needs some.
        build: (what stands after the colon, folder of TFDS data, recipe) makes or gets the data, once; False where
            nothing is to be done.
        encode: (bytes of a file, or pixels; tokens of an example) to tokens, where a file can be an example.
    """

    shown: str
    open: Callable[[str, str, Any], Source]
    about: str = ""
    build: Callable[[str, str | None, Mapping[str, Any]], bool] | None = None
    encode: Callable[[bytes | np.ndarray, int], np.ndarray] | None = None


def find(name: str, kinds: Mapping[str, Kind]) -> tuple[Kind, str]:
    """The kind of a `data.name`, and what stands after its colon.

    Raises:
        ConfigError: of none of these kinds, or not whole.
    """
    word, _, what = name.partition(":")
    if word not in kinds:
        known = "".join(f"\n  {kind.shown}{kind.about and f', {kind.about}'}" for kind in kinds.values())
        raise ConfigError(f'data.name="{name}" is not known: choose one of{known}')
    kind = kinds[word]
    if not what if "<" in kind.shown else name != kind.shown:
        raise ConfigError(f'data.name="{name}" is not whole: give {kind.shown}.')
    return kind, what


def build(name: str, kinds: Mapping[str, Kind], dir: str | None = None, recipe: Mapping[str, Any] = NONE) -> bool:
    """Makes or gets the data of a `data.name` if they are not there; False for those that nothing here makes.

    Raises:
        ConfigError: a recipe that no set can have.
        DataError: they cannot be had, the folder holds something else, or it cannot be written.
    """
    kind, what = find(name, kinds)
    return kind.build is not None and kind.build(what, dir, recipe)
