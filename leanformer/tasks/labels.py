"""What the outputs of a run stand for: its classes by name, in `classes.json` in its folder."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from leanformer.errors import ConfigError
from leanformer.runtime import files, peers


FILE = "classes.json"


def write(workdir: Path, classes: Sequence[str] | None) -> None:
    """Writes down what a run's outputs stand for, if its data have names for it."""
    if classes is not None and peers.first():
        files.write_json(workdir / FILE, list(classes))


def of_outputs(classes: Sequence[str] | None, number: int) -> list[str]:
    """A name for each of `number` outputs of a model; those that the data have no class for, by their number."""
    return [*(classes or ()), *map(str, range(len(classes or ()), number))]


def read(workdir: Path) -> tuple[str, ...] | None:
    """The classes of a run by name, in the order of its outputs. None where there is no run, where its data have no
    names for them, and of a run from before they were written down.

    Raises:
        ConfigError: the file is not a list of names.
    """
    path = workdir / FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            f"{path} should be a JSON list of names, one for each of the model's outputs, and is not. Mend it, or "
            "remove it to take the classes of the training split as it is now."
        )
    return tuple(found)


def tell_old(workdir: Path, classes: Sequence[str] | None) -> None:
    """Says where a run that was begun has not written down its classes, and which it is taken to have."""
    begun = (workdir / "config.json").is_file() and not (workdir / FILE).is_file()
    if peers.first() and begun and classes is not None:
        print(
            f"*** {workdir} HAS NO {FILE}: its outputs are taken to be the classes of the training split as it is "
            f"now, {', '.join(classes)}.",
            file=sys.stderr,
            flush=True,
        )
