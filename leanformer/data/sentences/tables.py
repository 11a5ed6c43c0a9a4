"""Files of labelled sentences, a row a line and tabs between columns."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer.data import delimited
from leanformer.errors import DataError


HIDDEN = "-1"  # what stands for a label that is kept secret


@dataclasses.dataclass(frozen=True)
class Columns:
    """Where a file has what: by the words of its header, or by number, from 0, where it has none.

    Attributes:
        sentence, sentence2: the first text of a row, and the second of a pair.
        label: what is to be told.
        number: of columns, of a file without a header.
    """

    sentence: str | int
    label: str | int
    sentence2: str | int | None = None
    number: int | None = None

    @property
    def texts(self) -> tuple[str | int, ...]:
        return (self.sentence,) if self.sentence2 is None else (self.sentence, self.sentence2)


@dataclasses.dataclass(frozen=True)
class Row:
    """One example: a sentence, or two; its label as the `label` of `read` made it."""

    path: Path
    line: int
    texts: tuple[str, ...]
    label: Any


def read(path: Path, columns: Columns, label: Callable[[str], Any], torn: float = 0.0) -> list[Row]:
    """All rows of a file. One that is not as the others keeps the file from being used.

    Args:
        label: from the word of a row to its label; raises ValueError, in words, "is ...", for one that is none.
        torn: share of the lines that may have too few or too many columns; they are left out, with a warning.

    Raises:
        DataError: the file is not there or holds no row; its header has other columns; it has no labels; or, with its
            line, a row has too few or too many columns, is not UTF-8, has an empty text or a label that is none.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    with path.open("rb") as file:
        head = file.readline().removeprefix(delimited.BOM).rstrip(b"\r\n")
    first, places, width = _places(path, columns, head)
    rows = itertools.islice(delimited.lines(path), first, None)
    found = delimited.read(path, rows, functools.partial(_row, places, width, label), torn)
    return [Row(path, number, texts, value) for number, (texts, value) in found]


def _places(path: Path, columns: Columns, line: bytes) -> tuple[int, Sequence[int], int]:
    """The first row, the places of texts and label, and how many columns there are."""
    words = delimited.words(line)
    if columns.number is not None:
        if words == ["index", "sentence"]:
            raise _hidden(path)
        return 0, [*columns.texts, columns.label], columns.number
    if missing := [name for name in columns.texts if name not in words]:
        raise DataError(
            f"{path}, line 1 should be a header with {', '.join(map(str, (*columns.texts, columns.label)))}, and lacks "
            f"{', '.join(map(str, missing))}. Found: {', '.join(word[:40] for word in words[:8])}."
        )
    if columns.label not in words:
        raise _hidden(path)
    return 1, [words.index(name) for name in (*columns.texts, columns.label)], len(words)


def _row(places: Sequence[int], width: int, label: Callable[[str], Any], raw: bytes) -> tuple[tuple[str, ...], Any]:
    """Texts and label of a line. Raises ValueError, in words."""
    cells = delimited.split(raw, width)
    try:
        *texts, word = (cells[place].decode().strip() for place in places)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: a byte {error.object[error.start]:#04x}") from error
    if not all(texts):
        raise ValueError("has an empty text")
    if word == HIDDEN:
        raise ValueError(f"has the label {HIDDEN}, which stands for one that is kept secret, so nothing can be scored")
    return tuple(texts), label(word)


def _hidden(path: Path) -> DataError:
    return DataError(
        f"{path} has no labels: those of GLUE's test sets are kept secret, so nothing can be scored on them here. "
        "Evaluate on dev: --config.data.eval_split=dev."
    )


def classes(known: dict[str, int], about: str) -> Callable[[str], int]:
    """From a word to the number of its class."""

    def number(word: str) -> int:
        if word not in known:
            raise ValueError(
                f"has the label {delimited.shown(word)}, which is none of {', '.join(known)}, those of {about}"
            )
        return known[word]

    return number


def scores(lowest: float, highest: float) -> Callable[[str], float]:
    """From a word to a number in a range."""

    def number(word: str) -> float:
        try:
            found = float(word)
        except ValueError:
            found = float("nan")
        if not lowest <= found <= highest or abs(found) == float("inf"):
            within = "" if highest == float("inf") else f" from {lowest:g} to {highest:g}"
            raise ValueError(f"has the score {delimited.shown(word)}, which is no number{within}")
        return found

    return number


def words(path: Path, columns: Columns) -> Iterator[str]:
    """The labels of a file, as they stand there. Raises DataError as `read`."""
    return (row.label for row in read(path, columns, str))
