"""Where examples come from: anything with a length and random access, and how `data.name` says what.

Sources are picklable, since worker processes hold copies.

A class has one number in every split, and in a run as long as it lives. Classes are those of the training split,
sorted, or what `classes.txt` beside the splits lists, one a line in the order of the model's outputs.
"""

import codecs
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from leanformer.errors import ConfigError, DataError


FILE = "classes.txt"
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


class Spread:
    """So many examples of a source, evenly spaced over it: of a split that is sorted by class, all classes alike.

    What else a source says of itself is that of the whole.
    """

    SAID = ("classes", "num_classes", "vocabulary", "tokenizer")

    def __init__(self, source: Source, examples: int):
        self.source = source
        vars(self).update({name: getattr(source, name) for name in self.SAID if hasattr(source, name)})
        self._chosen = np.linspace(0, len(source) - 1, examples).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self._chosen[index])]

    def several(self, first: int, number: int) -> dict[str, np.ndarray]:
        """Those from `first` on at once, leading axis B, where the source can; the last again where they are over."""
        places = np.minimum(np.arange(first, first + number), len(self) - 1)
        drawn = [self.source.several(int(place), 1) for place in self._chosen[places]]
        return {name: np.concatenate([one[name] for one in drawn]) for name in drawn[0]}

    def name(self, index: int) -> str:
        """That of the example in the whole."""
        return self.source.name(int(self._chosen[index]))


def spread(source: Source, examples: int) -> Source:
    """`examples` of a source, evenly spaced; all of it for 0, and where it has no more."""
    return Spread(source, examples) if 0 < examples < len(source) else source


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file that lists names. Bytes that are not UTF-8 are read as Python reads names of files, so
    that names here and names of folders are equal if their bytes are.

    Raises:
        DataError: the file is UTF-16 or binary.
    """
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content:
        raise DataError(f"{path} is UTF-16 or binary: expected text, one line per entry. Save it as UTF-8.")
    return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape").splitlines()


def listed(folder: Path) -> list[str] | None:
    """The names in `<folder>/classes.txt`; None where there is no such file. Raises DataError for a name twice, and as
    `read_lines`."""
    path = folder / FILE
    if not path.is_file():
        return None
    names = [line.strip() for line in read_lines(path) if line.strip()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path} has {shown(twice)} more than once. Each class has one line, and so one number.")
    return names


def numbers(found: Iterable[str], known: Sequence[str], about: str) -> dict[str, int]:
    """The number of each known class. Raises DataError for names in `found` that are none of them."""
    if unknown := sorted(set(found) - set(known)):
        raise DataError(
            f"{about} has classes that are not known: {shown(unknown)}. Known: {shown(known)}, from the training split "
            f"or from {FILE} beside it; a run that was begun keeps them. If a name is wrong, mend it; if not, the "
            "model has to be trained with it from the start."
        )
    return {name: number for number, name in enumerate(known)}


def shown(names: Sequence[str], limit: int = 8) -> str:
    """How many there are, and the first of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} ({', '.join(names[:limit])}{more})"
