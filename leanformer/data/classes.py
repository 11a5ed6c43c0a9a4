"""Classes by name: a name has one number in every split, and in a run as long as it lives.

They are those of the training split, sorted, or what `classes.txt` beside the splits lists, one a line in the order of
the model's outputs.
"""

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

from leanformer.errors import DataError


FILE = "classes.txt"


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
