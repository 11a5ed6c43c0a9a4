"""Tab-separated tables of text, one row per line: all rows are valid, or an error names the first that is not."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.errors import DataError


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadColumnCount(ValueError):
    """Error for a line with too few or too many columns."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a pair for each line of a file: its number, from 1, and its bytes without line end and byte-order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")


def split(line: bytes, width: int) -> list[bytes]:
    """Return the columns of a line, separated by tabs. Raise BadColumnCount unless there are `width`."""
    columns = line.split(b"\t")
    if len(columns) != width:
        raise BadColumnCount(f"has {len(columns)} columns instead of {width}")
    return columns


def find_columns(path: Path, header: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the places of columns in a header. Raise DataError if one is missing or repeated."""
    if wrong := [name for name in names if header.count(name) != 1]:
        raise DataError(
            f"{path}, line 1 must have each of the columns {', '.join(names)} once; {', '.join(wrong)} is missing or "
            f"repeated. Found: {', '.join(word[:40] for word in header[:8])}."
        )
    return [header.index(name) for name in names]


def shorten(text: bytes | str) -> str:
    """Return at most the first 40 characters of a text, in quotation marks, for messages."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    return repr(text[:40] + "..." if len(text) > 40 else text)


def parse_rows(
    path: Path, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], Any], torn: float = 0.0
) -> list[tuple[int, Any]]:
    """Return the pairs (line number, value) of the rows of a file.

    Args:
        path: path of the file, for messages.
        rows: pairs of line number and row, such as `lines` yields.
        parse: function from a row to its value; it raises ValueError, "has ...", for an invalid one.
        torn: largest fraction of rows that may have too few or too many columns; they are skipped with a warning.

    Raises:
        DataError: there is no row, or a row is invalid.
    """
    parsed, skipped, line = [], [], 0
    for line, row in rows:
        try:
            parsed.append((line, parse(row)))
        except ValueError as error:
            if not (torn and isinstance(error, BadColumnCount)):
                raise line_error(path, line, str(error)) from error
            skipped.append(line)
    if skipped:
        problem = (
            f"{path}: {len(skipped)} of {line:,} lines have too few or too many columns, the first is {skipped[0]}"
        )
        if len(skipped) > torn * line:
            raise DataError(f"{problem}. Download the file again.")
        warnings.warn(f"{problem}; they are skipped.", stacklevel=2)
    if not parsed:
        raise DataError(f"{path} has no rows.")
    return parsed


def line_error(path: Path, line: int, problem: str) -> DataError:
    """Return the DataError for a line of a file; `problem` is such as "has an empty text"."""
    return DataError(f"{path}, line {line} {problem}. Fix or delete this row.")


HIDDEN_LABEL = "-1"  # placeholder for a label that is not public


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


@dataclasses.dataclass(frozen=True)
class Row:
    """Labelled example of a table.

    Attributes:
        path: file of the example.
        line: number of its line, from 1.
        texts: one sentence, or the two of a pair.
        label: number of the class, or score, as the label function of `read_table` returned it.
    """

    path: Path
    line: int
    texts: tuple[str, ...]
    label: Any


def read_table(path: Path, columns: Columns, label: Callable[[str], Any], torn: float = 0.0) -> list[Row]:
    """Return all rows of a tab-separated file. A single invalid row is an error.

    Args:
        path: path of the file.
        columns: columns to read.
        label: function from the text of a label to its value. It raises ValueError, "has ...", for an invalid one.
        torn: largest fraction of lines that may have too few or too many columns, see `parse_rows`.

    Raises:
        DataError: the file is missing, has no rows or no labels, or its header has other or repeated columns; or a row
            (named in the message) has too few or too many columns, is not UTF-8, or has an empty text, or an empty or
            invalid label.
    """
    if not path.is_file():
        raise DataError(f"{path} not found.")
    _, first = next(lines(path), (1, b""))
    header = first.decode("utf-8", "replace").split("\t")
    names: list[Any] = [name for name in (columns.sentence, columns.sentence2, columns.label) if name is not None]
    unlabelled = header == ["index", "sentence"] if columns.number else columns.label not in header
    if unlabelled and (columns.number or columns.sentence in header):
        raise DataError(
            f"{path}, line 1 has no column {columns.label}. Labels of GLUE's test sets are not public, so these cannot "
            "be scored here: evaluate on dev, --config.data.eval_split=dev."
        )
    places = names if columns.number else find_columns(path, header, names)
    parse = functools.partial(_parse, places, columns.number or len(header), label)
    parsed = parse_rows(path, itertools.islice(lines(path), 0 if columns.number else 1, None), parse, torn)
    return [Row(path, number, texts, value) for number, (texts, value) in parsed]


def _parse(places: Sequence[int], width: int, label: Callable[[str], Any], raw: bytes) -> tuple[tuple[str, ...], Any]:
    """Return the texts and label of a line. Raise ValueError with a readable message if it is invalid."""
    cells = split(raw, width)
    try:
        *texts, word = (cells[place].decode().strip() for place in places)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from error
    if not (all(texts) and word):
        raise ValueError("has an empty text or label")
    return tuple(texts), label(word)


def class_parser(numbers: Mapping[str, int]) -> Callable[[str], int]:
    """Return a function from the text of a label to the number of its class; it raises ValueError for unknown ones."""

    def number(word: str) -> int:
        if word not in numbers:
            hidden = ", a placeholder for labels that are not public" * (word == HIDDEN_LABEL)
            raise ValueError(f"has the label {shorten(word)}{hidden}; expected one of {', '.join(numbers)}")
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
            raise ValueError(f"has the score {shorten(word)}, not a number from {lowest:g} to {highest:g}")
        return value

    return number
