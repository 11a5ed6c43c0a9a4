"""Tab-separated tables of text, one row per line: all rows are valid, or an error names the first that is not."""

import dataclasses
import functools
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.errors import DataError


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadColumnCount(ValueError):
    """Error for a line with too few or too many columns."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of labelled sentences in a file, by name in its header, or by number, from 0, without a header."""

    sentence: str | int  # text, or first text of a pair
    label: str | int
    sentence2: str | int | None = None  # second text of a pair
    number: int | None = None  # columns of a file without a header


@dataclasses.dataclass(frozen=True)
class Row:
    """Labelled example of a table."""

    path: Path
    line: int  # from 1
    texts: tuple[str, ...]  # one sentence, or the two of a pair
    label: Any  # number of the class, or score


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line of a file, without line end and byte-order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")


def json_lines(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the line number, from 1, and the values of `keys` of each object in a JSON-lines file."""
    for number, line in lines(path):
        if line.strip():
            try:
                row = json.loads(line)
                values = [row[key] for key in keys]
            except (ValueError, LookupError, TypeError) as error:
                raise line_error(path, number, f"is no JSON object in UTF-8 with {' and '.join(keys)}") from error
            yield number, values


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


def line_error(path: Path, line: int, problem: str) -> DataError:
    return DataError(f"{path}, line {line} {problem}. Fix or delete this row.")


def parse_rows(
    path: Path, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], Any], torn: float = 0.0
) -> list[tuple[int, Any]]:
    """Return (line number, value) of the rows of a file; `parse` raises ValueError, "has ...", for an invalid row.

    A fraction `torn` of rows may have too few or too many columns; they are skipped with a warning.
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
        problem = f"{path}: {len(skipped)} of {line:,} lines have too few or too many columns, first line {skipped[0]}"
        if len(skipped) > torn * line:
            raise DataError(f"{problem}. Download the file again.")
        warnings.warn(f"{problem}; they are skipped.", stacklevel=2)
    if not parsed:
        raise DataError(f"{path} has no rows.")
    return parsed


def read_table(path: Path, columns: Columns, label: Callable[[str], Any], torn: float = 0.0) -> list[Row]:
    """Return the rows of a file of labelled sentences, with labels by a function from their text; see `parse_rows`."""
    _, first = next(lines(path), (1, b""))
    header = first.decode("utf-8", "replace").split("\t")
    names: list[Any] = [name for name in (columns.sentence, columns.sentence2, columns.label) if name is not None]
    places = names if columns.number else find_columns(path, header, names)
    parse = functools.partial(_parse, places, columns.number or len(header), label)
    rows = itertools.islice(lines(path), 0 if columns.number else 1, None)
    return [Row(path, number, *value) for number, value in parse_rows(path, rows, parse, torn)]


def _parse(places: Sequence[int], width: int, label: Callable[[str], Any], raw: bytes) -> tuple[tuple[str, ...], Any]:
    cells = split(raw, width)
    *texts, word = (cells[place].decode().strip() for place in places)
    if not (all(texts) and word):
        raise ValueError("has an empty text or label")
    return tuple(texts), label(word)


def class_parser(numbers: Mapping[str, int]) -> Callable[[str], int]:
    """Return a function from the text of a label to the number of its class."""

    def number(word: str) -> int:
        if word not in numbers:
            raise ValueError(f"has the label {shorten(word)}; expected one of {', '.join(numbers)}")
        return numbers[word]

    return number


def score_parser(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a parser of labels: a number in the range, else ValueError."""

    def number(word: str) -> float:
        value = float(word)
        if not lowest <= value <= highest:
            raise ValueError(f"has the score {word}, not a number from {lowest:g} to {highest:g}")
        return value

    return number
