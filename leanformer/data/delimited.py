"""Rows of text files with tabs between columns, in which nothing is quoted: every row is used, or the file refused."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer.errors import DataError


SHOWN = 8  # lines of a message
BOM = b"\xef\xbb\xbf"


class Torn(ValueError):
    """A line with too few or too many columns."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1, without their ends and the byte-order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, (line.removeprefix(BOM) if number == 1 else line).rstrip(b"\r\n")


def split(line: bytes, width: int) -> list[bytes]:
    """Return the columns of a line. Raises Torn unless there are `width`."""
    columns = line.split(b"\t")
    if len(columns) != width:
        raise Torn(f"has {len(columns)} columns instead of {width}")
    return columns


def words(line: bytes) -> list[str]:
    """Return the columns of a header."""
    return line.decode("utf-8", "replace").split("\t")


def shown(text: bytes | str) -> str:
    """Return the beginning of a text as it is shown in messages."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    return repr(text[:40] + "..." if len(text) > 40 else text)


def read(
    path: Path, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], Any], torn: float = 0.0
) -> list[tuple[int, Any]]:
    """Return each row as `parse` makes it, with the number of its line. One wrong row keeps the file from being used.

    Args:
        rows: with their line numbers, such as `lines`.
        parse: raises ValueError, in words, "has ...", for a row that is wrong.
        torn: share of the file's lines for which it may raise Torn; they are left out, with a warning.

    Raises:
        DataError: there is no row; or, with its line and those of others, a row is wrong.
    """
    found, wrong, left_out, total = [], [], [], 0
    for number, row in rows:
        total = number
        try:
            found.append((number, parse(row)))
        except ValueError as error:
            (left_out if isinstance(error, Torn) else wrong).append((number, str(error)))
    if len(left_out) > torn * total:
        wrong, left_out = sorted(wrong + left_out), []
    if wrong:
        (line, what), *others = wrong
        raise error_at(path, line, what + (f"; also wrong: line {_numbers(others)}" if others else ""))
    if left_out:
        what = f"{len(left_out)} of {total:,} lines have too few or too many columns and are left out"
        warnings.warn(f"{path}: {what}: {_numbers(left_out)}", stacklevel=3)
    if not found:
        raise DataError(f"{path} holds no row at all.")
    return found


def error_at(path: Path, line: int, what: str) -> DataError:
    """Return the error for a line of a file."""
    return DataError(f"{path}, line {line} {what}. Fix or delete what is wrong: no row is left out.")


def _numbers(several: Sequence[tuple[int, str]]) -> str:
    more = f" and {len(several) - SHOWN} more" if len(several) > SHOWN else ""
    return ", ".join(str(number) for number, _ in several[:SHOWN]) + more
