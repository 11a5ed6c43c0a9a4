"""Sources of examples, which have random access and usually a length, and their selection by `data.name`.

Sources are picklable, since worker processes have copies.

A class has the same number in every split, and throughout a run. Classes are those of the training split, sorted, or
those in `classes.txt` beside the splits, one per line in the order of the model's outputs.
"""

import codecs
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files


FILE = "classes.txt"
NONE: Mapping[str, Any] = MappingProxyType({})
SINGLE = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)  # types of one example
EXPECTED_IMAGES = "Expected a path, bytes, a PIL image, a uint8 array (height, width[, channels]), or a list of these."
EXPECTED_TEXTS = "Expected the path of a text file, a text as bytes, such as text.encode(), or a list of these."


@runtime_checkable
class Source(Protocol):
    """Protocol of a source of examples, dicts by name, with random access.

    A source without a length is endless, for training only.

    A source of labelled examples has `num_classes`, None if unknown, and `classes`, the class names in order, or None.
    """

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Return a readable identifier of an example, for messages."""


@runtime_checkable
class Finite(Source, Protocol):
    """Protocol of a source with a length, its number of examples."""

    def __len__(self) -> int: ...


@runtime_checkable
class Labelled(Finite, Protocol):
    """Protocol of a source of labelled examples with a length.

    Attributes:
        num_classes: number of classes; None if unknown.
        classes: class names in the order of the labels; None if the classes have no names.
    """

    @property
    def num_classes(self) -> int | None: ...

    @property
    def classes(self) -> Sequence[str] | None: ...


def size(source: Source) -> int | None:
    """Return the number of examples of a source; None if it is endless."""
    return len(source) if isinstance(source, Finite) else None


class Kind(NamedTuple):
    """Registry entry of a source type, the part of a `data.name` before the colon.

    Attributes:
        shown: pattern of the name for messages, with <...> for the user's part, such as "folder:<path>".
        open: function (part after the colon, split, `SourceSpec` of the package) -> source.
        about: description for messages.
        build: function (part after the colon, folder of TFDS data or None, recipe) that generates or downloads the data
            once, and returns False if there is nothing to do; None if the data cannot be built.
        encode: function (bytes of a file or pixels, number of tokens) -> tokens; None if a file cannot be an example.
    """

    shown: str
    open: Callable[[str, str, Any], Any]
    about: str = ""
    build: Callable[[str, str | None, Mapping[str, Any]], bool] | None = None
    encode: Callable[[Any, int], np.ndarray] | None = None


def find(name: str, kinds: Mapping[str, Kind]) -> tuple[Kind, str]:
    """Return the registry entry of a `data.name`, and the part after its colon.

    Raises:
        ConfigError: the type is unknown, or the name is incomplete.
    """
    word, _, what = name.partition(":")
    if word not in kinds:
        choices = "".join(f"\n  {kind.shown}{kind.about and f', {kind.about}'}" for kind in kinds.values())
        raise ConfigError(f'data.name="{name}": unknown type. Choose one of:{choices}')
    kind = kinds[word]
    if not what if "<" in kind.shown else name != kind.shown:
        raise ConfigError(f'data.name="{name}": incomplete or malformed. Expected {kind.shown}.')
    return kind, what


def build(name: str, kinds: Mapping[str, Kind], dir: str | None = None, recipe: Mapping[str, Any] = NONE) -> bool:
    """Generate or download the data of a `data.name`.

    Returns True if the built data exist afterwards, also if they existed before; False if data of this name are not
    built here, because their type cannot be or the folder has published files.

    Args:
        name: value of `data.name`.
        kinds: registry of source types.
        dir: folder of TFDS data; None for the default.
        recipe: settings of data that are generated locally.

    Raises:
        ConfigError: the type is unknown, the name is incomplete, or the recipe is invalid.
        DataError: the data are not available, the folder has other content, or it cannot be written.
    """
    kind, what = find(name, kinds)
    return kind.build is not None and kind.build(what, dir, recipe)


class Subset:
    """Evenly spaced subset of a source, which represents all classes equally if the source is sorted by class.

    The attributes named in FORWARDED are those of the source, if it has them: classes, num_classes, vocabulary,
    tokenizer.

    Args:
        source: source with a length.
        examples: number of examples, at most those of the source.
    """

    FORWARDED = ("classes", "num_classes", "vocabulary", "tokenizer")

    def __init__(self, source: Finite, examples: int):
        self.source: Any = source
        vars(self).update({name: getattr(source, name) for name in self.FORWARDED if hasattr(source, name)})
        self._chosen = np.linspace(0, len(source) - 1, examples).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self._chosen[index])]

    def get_batch(self, first: int, number: int) -> dict[str, np.ndarray]:
        """Return `number` examples of the subset from index `first` on, as a dict of arrays with a leading axis B.

        The source must have `get_batch`. Past the end, the last example repeats.
        """
        places = np.minimum(np.arange(first, first + number), len(self) - 1)
        drawn = [self.source.get_batch(int(place), 1) for place in self._chosen[places]]
        return {name: np.concatenate([one[name] for one in drawn]) for name in drawn[0]}

    def name(self, index: int) -> str:
        return self.source.name(int(self._chosen[index]))


def take_subset(source: Finite, examples: int) -> Finite:
    """Return `examples` evenly spaced examples of a source, in its order.

    The source itself is returned for 0, which means all, and if it has no more examples than that.
    """
    return Subset(source, examples) if 0 < examples < len(source) else source


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file of names, without line ends and byte-order mark.

    Only line feeds and carriage returns end a line. A file that ends with a line end has "" as its last line. Bytes
    that are not UTF-8 are decoded like file names, so that they equal names of folders with the same bytes.

    Raises:
        DataError: the file is UTF-16 or binary.
        OSError: it cannot be read, or is not a regular file.
    """
    content = files.read_input(path)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content:
        raise DataError(f"{path} is UTF-16 or binary: expected text, one line per entry. Save it as UTF-8.")
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    return re.split("\r\n|\r|\n", text)


def listed(folder: Path) -> list[str] | None:
    """Return the names in `<folder>/classes.txt`, one per line; None if there is no such file.

    Blank lines and spaces around names are left out.

    Raises:
        DataError: a name is repeated, or the file is UTF-16 or binary.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    names = [line.strip() for line in read_lines(path) if line.strip()]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path} repeats {quote(repeated)}. Give each class exactly one line.")
    return names


def numbers(names: Iterable[str], classes: Sequence[str], about: str) -> dict[str, int]:
    """Return {class name: number} for all of `classes`, in their order.

    Args:
        names: class names found in the data.
        classes: class names of the training split.
        about: place of the data, for the message.

    Raises:
        DataError: one of `names` is not in `classes`.
    """
    if unknown := sorted(set(names) - set(classes)):
        raise DataError(
            f"{about} has unknown classes: {quote(unknown)}. Known: {quote(classes)}, from the training split or from "
            f"{FILE} beside it, when the run started. If a name is wrong, fix it; if not, train a new model with it."
        )
    return {name: number for number, name in enumerate(classes)}


def quote(names: Sequence[str]) -> str:
    """Format names for a message: their number, then the first eight in brackets."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{len(names)} ({', '.join(names[:8])}{more})"


def read_content(example: Any, *, images: bool) -> bytes | np.ndarray | Image.Image:
    """Return the content of an example that a user passed: the bytes of a file, or an array or PIL image unchanged.

    Args:
        example: content of a file as bytes; path of a file, as every str is; or with `images` also a PIL image, or a
            non-empty uint8 array (height, width) or (height, width, channels) of at most 4 channels.
        images: True for images, False for texts.

    Raises:
        DataError: the example has another type, or the file cannot be read.
    """
    if isinstance(example, bytes | bytearray | memoryview):
        return bytes(example)
    if isinstance(example, str | os.PathLike):
        try:
            return files.read_input(Path(example).expanduser())
        # A missing file; a null byte in its name; an unknown user after "~".
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise DataError(
                f"The file {str(example)[:200]} cannot be read: {reason}. {expected_examples(images)}"
            ) from error
    if images and isinstance(example, Image.Image):
        return example
    if images and hasattr(example, "__array__"):
        array = np.asarray(example)
        if array.dtype == np.uint8 and array.size and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] < 5)):
            return array
    raise DataError(f"{describe(example)} is not an example. {expected_examples(images)}")


def expected_examples(images: bool) -> str:
    """Return the sentence for messages that lists the types of valid examples, of images or of texts."""
    return EXPECTED_IMAGES if images else EXPECTED_TEXTS


def describe(value: Any) -> str:
    """Return the type of a value and its first 60 characters for messages; for an array, type, dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {str(value)[:60]!r}"
