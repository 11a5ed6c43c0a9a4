"""Reader of tab-separated text files without quoting: either every row is valid, or an error is raised."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer.errors import DataError


SHOWN = 8  # maximum number of lines in a message
BOM = b"\xef\xbb\xbf"


class BadColumnCount(ValueError):
    """Error for a line with too few or too many columns."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a pair for each line of a file: its number, from 1, and its bytes without line end and byte-order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, (line.removeprefix(BOM) if number == 1 else line).rstrip(b"\r\n")


def split(line: bytes, width: int) -> list[bytes]:
    """Return the columns of a line, separated by tabs. Raise BadColumnCount unless there are `width`."""
    columns = line.split(b"\t")
    if len(columns) != width:
        raise BadColumnCount(f"has {len(columns)} columns instead of {width}")
    return columns


def split_header(line: bytes) -> list[str]:
    """Return the column names in a tab-separated header line, decoded as UTF-8; invalid bytes become �."""
    return line.decode("utf-8", "replace").split("\t")


def check_header(path: Path, header: Sequence[str], names: Sequence[str]) -> None:
    """Raise DataError if a header contains one of the column names in `names` twice; `path` is for the message."""
    if repeated := [name for name in names if header.count(name) > 1]:
        raise DataError(f"{path}, line 1: the header repeats the column {repeated[0]}. Rename or delete the others.")


def quote(text: bytes | str) -> str:
    """Return at most the first 40 characters of a text, in quotation marks, for messages."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    return repr(text[:40] + "..." if len(text) > 40 else text)


def read(
    path: Path, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], Any], torn: float = 0.0
) -> list[tuple[int, Any]]:
    """Return the pairs (line number, value) of the rows of a file. A single invalid row is an error.

    Args:
        path: path of the file, for messages.
        rows: pairs of line number and row, such as `lines` yields.
        parse: function from a row to its value; it raises ValueError, "has ...", for an invalid one.
        torn: largest fraction of lines for which `parse` may raise BadColumnCount. These are skipped, with a warning;
            if there are more, each is an error.

    Raises:
        DataError: there is no row, or a row is invalid; the message names the lines.
    """
    parsed, wrong, left_out, total = [], [], [], 0
    for number, row in rows:
        total = number
        try:
            parsed.append((number, parse(row)))
        except ValueError as error:
            (left_out if isinstance(error, BadColumnCount) else wrong).append((number, str(error)))
    if len(left_out) > torn * total:
        wrong, left_out = sorted(wrong + left_out), []
    if wrong:
        (line, problem), *others = wrong
        raise error_at(path, line, problem + (f"; also wrong: line {_format_lines(others)}" if others else ""))
    if left_out:
        problem = f"{len(left_out)} of {total:,} lines have too few or too many columns and are skipped"
        warnings.warn(f"{path}: {problem}: {_format_lines(left_out)}", stacklevel=3)
    if not parsed:
        raise DataError(f"{path} has no rows.")
    return parsed


def error_at(path: Path, line: int, what: str) -> DataError:
    """Return the DataError for a line of a file; `what` is the problem, such as "has an empty text"."""
    return DataError(f"{path}, line {line} {what}. Fix or delete these rows.")


def _format_lines(several: Sequence[tuple[int, str]]) -> str:
    """Return the first line numbers of several rows, and the count of the others."""
    more = f" and {len(several) - SHOWN} more" if len(several) > SHOWN else ""
    return ", ".join(str(number) for number, _ in several[:SHOWN]) + more
