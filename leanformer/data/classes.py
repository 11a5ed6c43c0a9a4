"""Classes by name: a name has one number in every split, and in a run as long as it lives.

They are those of the training split, sorted, or what `classes.txt` beside the splits lists, one a line in the order of
the model's outputs.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from leanformer.errors import DataError


FILE = "classes.txt"


def listed(folder: Path) -> list[str] | None:
    """The names in `<folder>/classes.txt`; None where there is no such file. Raises DataError for a name twice."""
    path = folder / FILE
    if not path.is_file():
        return None
    names = [line.strip() for line in path.read_text().splitlines() if line.strip()]
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
