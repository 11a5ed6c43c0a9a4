"""Reader of tab-separated files of labelled sentences, one row per line."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leanformer.data import delimited
from leanformer.errors import DataError


HIDDEN = "-1"  # placeholder for a label that is not public


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of a file, by name in its header, or by number, from 0, without a header.

    Attributes:
        sentence: column of the text, or of the first text of a pair.
        label: column of the label.
        sentence2: column of the second text of a pair; None if there is one text.
        number: number of columns of a file without a header; None for a file with one.
    """

    sentence: str | int
    label: str | int
    sentence2: str | int | None = None
    number: int | None = None

    @property
    def texts(self) -> tuple[str | int, ...]:
        """Columns of the texts, one or two."""
        return (self.sentence,) if self.sentence2 is None else (self.sentence, self.sentence2)


@dataclasses.dataclass(frozen=True)
class Row:
    """Labelled example of a table.

    Attributes:
        path: file of the example.
        line: number of its line, from 1.
        texts: one sentence, or the two of a pair.
        label: number of the class, or score, as the label function of `read` returned it.
    """

    path: Path
    line: int
    texts: tuple[str, ...]
    label: Any


def read(path: Path, columns: Columns, label: Callable[[str], Any], torn: float = 0.0) -> list[Row]:
    """Return all rows of a tab-separated file. A single invalid row is an error.

    Args:
        path: path of the file.
        columns: columns to read.
        label: function from the text of a label to its value. It raises ValueError, "has ...", for an invalid one.
        torn: largest fraction of lines that may have too few or too many columns; up to it they are skipped with a
            warning.

    Raises:
        DataError: the file is missing, has no rows or no labels, or its header has other or repeated columns; or a row
            (named in the message) has too few or too many columns, is not UTF-8, or has an empty text, or an empty or
            invalid label.
    """
    if not path.is_file():
        raise DataError(f"{path} not found.")
    with path.open("rb") as file:
        head = file.readline().removeprefix(delimited.BOM).rstrip(b"\r\n")
    first, places, width = _places(path, columns, head)
    rows = itertools.islice(delimited.lines(path), first, None)
    parsed = delimited.read(path, rows, functools.partial(_row, places, width, label), torn)
    return [Row(path, number, texts, value) for number, (texts, value) in parsed]


def _places(path: Path, columns: Columns, line: bytes) -> tuple[int, Sequence[int], int]:
    """Return the index of the first row, the columns of texts and label, and the number of columns."""
    words: list[Any] = delimited.split_header(line)
    named: list[Any] = [*columns.texts, columns.label]
    if columns.number is not None:
        if words == ["index", "sentence"]:
            raise _no_labels_error(path)
        return 0, named, columns.number
    if missing := [name for name in columns.texts if name not in words]:
        raise DataError(
            f"{path}, line 1 should be a header with {', '.join(map(str, (*columns.texts, columns.label)))}, and lacks "
            f"{', '.join(map(str, missing))}. Found: {', '.join(word[:40] for word in words[:8])}."
        )
    delimited.check_header(path, words, named)
    if columns.label not in words:
        raise _no_labels_error(path)
    return 1, [words.index(name) for name in named], len(words)


def _row(places: Sequence[int], width: int, label: Callable[[str], Any], raw: bytes) -> tuple[tuple[str, ...], Any]:
    """Return the texts and label of a line. Raise ValueError with a readable message if it is invalid."""
    cells = delimited.split(raw, width)
    try:
        *texts, word = (cells[place].decode().strip() for place in places)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: a byte {error.object[error.start]:#04x}") from error
    if not all(texts):
        raise ValueError("has an empty text")
    if not word:
        raise ValueError("has an empty label")
    return tuple(texts), label(word)


def refuse_hidden(label: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the function of a label that refuses GLUE's placeholder too.

    Args:
        label: function from the text of a label to its value, as for `read`.
    """

    def public(word: str) -> Any:
        if word == HIDDEN:
            raise ValueError(
                f"has the label {HIDDEN}, a placeholder for labels that are not public: it cannot be scored"
            )
        return label(word)

    return public


def _no_labels_error(path: Path) -> DataError:
    return DataError(
        f"{path} has no labels: those of GLUE's test sets are not public, so they cannot be scored here. "
        "Evaluate on dev: --config.data.eval_split=dev."
    )


def class_parser(numbers: dict[str, int], about: str) -> Callable[[str], int]:
    """Return a function from the text of a label to the number of its class, which raises ValueError for unknown ones.

    Args:
        numbers: number of the class by the text of a label.
        about: place in which the classes are defined, for the message.
    """

    def number(word: str) -> int:
        if word not in numbers:
            raise ValueError(f"has the label {delimited.quote(word)}, expected one of {', '.join(numbers)} ({about})")
        return numbers[word]

    return number


def score_parser(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a function from the text of a label to a number from `lowest` to `highest`; ValueError for all others."""

    def number(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not lowest <= value <= highest or abs(value) == float("inf"):
            within = "" if highest == float("inf") else f" from {lowest:g} to {highest:g}"
            raise ValueError(f"has the score {delimited.quote(word)}, not a number{within}")
        return value

    return number
