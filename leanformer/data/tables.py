"""Reader of tables of text, one row per line: all rows are valid, or an error names the first one that is not."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
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
