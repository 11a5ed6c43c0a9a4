"""Sources of examples, which have random access and usually a length, and their selection by `data.name`.

Sources are picklable, since worker processes have copies. A class has the same number in every split, and throughout a
run: classes are those of the training split, sorted, or the lines of `classes.txt` beside the splits.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files


CLASSES_FILE = "classes.txt"
EXAMPLE_TYPES = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)  # of one example that a user passes
FORWARDED = ("classes", "num_classes", "vocabulary", "tokenizer")  # attributes of a source that its subsets have
NAMES_SHOWN = 8  # in a message
RECORD = "recipe.json"  # in the folder of a generated dataset


@runtime_checkable
class Source(Protocol):
    """Protocol of a source of examples, dicts by name, with random access.

    A source without a length is endless, for training only.

    A source of labelled examples has `num_classes`, None if unknown, and `classes`, the class names in order, or None.
    """

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Return a readable identifier of an example, for messages."""


def size(source: Any) -> int | None:
    """Return the number of examples of a source; None if it is endless."""
    return len(source) if hasattr(source, "__len__") else None


class Kind(NamedTuple):
    """Type of source, the part of a `data.name` before the colon."""

    shown: str  # pattern of the name for messages, with <...> for the user's part, such as "folder:<path>"
    open: Callable[[str, str, Any], Any]  # (part after the colon, split, `SourceSpec` of the package) -> source
    about: str = ""  # description for messages


def find(name: str, kinds: Mapping[str, Kind]) -> tuple[Kind, str]:
    """Return the registry entry of a `data.name`, and the part after its colon."""
    word, _, what = name.partition(":")
    kind = kinds.get(word)
    if kind is None or (not what if "<" in kind.shown else name != kind.shown):
        choices = "".join(f"\n  {kind.shown}{kind.about and f', {kind.about}'}" for kind in kinds.values())
        raise ConfigError(f'data.name="{name}": unknown or incomplete. Choose one of:{choices}')
    return kind, what


class Subset:
    """Evenly spaced subset of a source, which represents all classes equally if the source is sorted by class."""

    def __init__(self, source: Any, examples: int):
        self.source = source
        vars(self).update({name: getattr(source, name) for name in FORWARDED if hasattr(source, name)})
        self._chosen = np.linspace(0, len(source) - 1, examples).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self._chosen[index])]

    def get_batch(self, first: int, number: int) -> dict[str, np.ndarray]:
        """Return `number` examples from index `first` on if the source has `get_batch`; the last repeats at the end."""
        places = np.minimum(np.arange(first, first + number), len(self) - 1)
        drawn = [self.source.get_batch(int(place), 1) for place in self._chosen[places]]
        return {name: np.concatenate([one[name] for one in drawn]) for name in drawn[0]}

    def name(self, index: int) -> str:
        return self.source.name(int(self._chosen[index]))


def take_subset(source: Any, examples: int) -> Any:
    """Return `examples` evenly spaced examples of a source, in its order; all for 0, or if there are no more."""
    return Subset(source, examples) if 0 < examples < len(source) else source


def read_names(path: Path) -> list[str]:
    """Return the lines of a text file of names, decoded like file names, without blank lines and surrounding spaces."""
    lines = path.read_text("utf-8-sig", errors="surrogateescape").split("\n")
    return [line.strip() for line in lines if line.strip()]


def listed_classes(folder: Path) -> list[str] | None:
    """Return the names in `<folder>/classes.txt`, one per line; None if there is no such file."""
    path = folder / CLASSES_FILE
    names = read_names(path) if path.is_file() else None
    if names is not None and len({*names}) < len(names):
        raise DataError(f"{path} repeats {quote(sorted({name for name in names if names.count(name) > 1}))}.")
    return names


def number_classes(names: Iterable[str], classes: Sequence[str], about: str) -> dict[str, int]:
    """Return {class name: number} for all of `classes`. Raise DataError if one of `names`, in the data, is missing."""
    if unknown := sorted(set(names) - set(classes)):
        raise DataError(
            f"{about} has unknown classes: {quote(unknown)}. Known: {quote(classes)}, from the training split or from "
            f"{CLASSES_FILE} beside it, when the run started. If a name is wrong, fix it; if not, train a new model."
        )
    return {name: number for number, name in enumerate(classes)}


def quote(names: Sequence[str]) -> str:
    """Format names for a message: their number, then the first eight in brackets."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} ({', '.join(names[:NAMES_SHOWN])}{more})"


def read_content(example: Any, *, images: bool) -> bytes | np.ndarray | Image.Image:
    """Return the bytes of an example that a user passed, bytes or a path; PIL images and uint8 arrays unchanged."""
    if isinstance(example, bytes | bytearray | memoryview):
        return bytes(example)
    if isinstance(example, str | os.PathLike):
        try:
            return Path(example).expanduser().read_bytes()
        except OSError as error:
            fix = "" if images else " Pass a text itself as text.encode()."
            raise DataError(f"The file {str(example)[:200]} cannot be read: {error.strerror}.{fix}") from error
    if images and isinstance(example, Image.Image):
        return example
    if images and getattr(example, "dtype", None) == np.uint8:
        return np.asarray(example)
    kinds = "PIL image, uint8 array (height, width[, channels])" if images else "text as bytes, such as text.encode()"
    shown = f"{type(example).__name__} ({getattr(example, 'dtype', str(example)[:60])})"
    raise DataError(f"{shown} is not an example: expected a path, bytes, {kinds}, or a list.")


def make_dataset(
    folder: str | Path, recipe: Mapping[str, Any], fill: Callable[[Path], Any] = lambda folder: None
) -> Path:
    """Build a dataset if the folder is missing or empty, and return its absolute path. A kill leaves no folder.

    `fill` writes the files to a folder, and returns entries of the record besides the recipe, see `read_record`.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        try:
            with files.atomic_folder(folder) as draft:
                files.write_json(draft / RECORD, {"recipe": dict(recipe), **(fill(draft) or {})})
        except OSError:
            if not (folder / RECORD).is_file():  # else another process has built it meanwhile
                raise
    read_record(folder, recipe)
    return folder


def read_record(folder: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of `make_dataset`: "recipe", which must agree with `expected`, and the entries of `fill`."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no dataset: {error}. Make one in a new folder with python -m leanformer.prepare build."
        ) from error
    recipe = record["recipe"]
    if differ := [f"{key}={recipe.get(key)} (configured {x})" for key, x in expected.items() if recipe.get(key) != x]:
        raise DataError(f"{folder} has another dataset: {', '.join(differ)}. Use another folder, or remove this one.")
    return record
