"""Sets that are made here and not downloaded: written once, whole or not at all, with a record of what they are."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import DataError
from leanformer.runtime import files


def record_path(folder: Path, kind: str) -> Path:
    return folder / f"{kind.lower()}.json"


def make(
    folder: str | Path, kind: str, version: int, recipe: Mapping[str, Any], fill: Callable[[Path], Mapping[str, Any]]
) -> Path:
    """Makes a set once; a folder that holds the same set is left as it is.

    The folder appears when it is complete: what `fill` wrote, and `<kind>.json` with the version, the recipe, what
    `fill` returned, and SHA-256 sums. What a killed run leaves behind is a hidden folder beside it.

    Args:
        kind: the set's name in messages.
        version: of the files and of what a recipe means.
        fill: writes files into a folder.

    Returns:
        The folder, absolute.

    Raises:
        DataError: the folder holds something else, or cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        try:
            with files.atomic_folder(folder) as draft:
                more = fill(draft)
                sums = {path.name: sha256(path) for path in sorted(draft.iterdir())}
                content = {"version": version, "recipe": dict(recipe), **more, "sha256": sums}
                files.write_json(record_path(draft, kind), content)
        except OSError as error:
            if not record_path(folder, kind).is_file():  # else another process has made it meanwhile
                raise DataError(f"The {kind} set cannot be written to {folder}: {error}") from error
    read(folder, kind, version, recipe)
    return folder


def read(folder: Path, kind: str, version: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a set.

    Args:
        wanted: of the recipe, as far as it matters.

    Raises:
        DataError: it is missing or damaged, of another version, or of a set of another recipe.
    """
    path = record_path(folder, kind)
    try:
        record = json.loads(path.read_text())
        found, recipe, *_ = record["version"], record["recipe"], record["recipe"].keys(), record["sha256"].keys()
        differ = [
            f"{key}={recipe.get(key)} (asked for {wanted[key]})" for key in wanted if recipe.get(key) != wanted[key]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder} holds no {kind} set: {path.name} is missing or damaged ({error}). Give the folder of one, or "
            "make one in a new folder."
        ) from error
    if found != version:
        raise DataError(f"{folder} holds a set of version {found}, wanted is {version}. Make it again elsewhere.")
    if differ:
        raise DataError(
            f"{folder} holds another {kind} set: {', '.join(differ)}. Name another folder, or remove this one."
        )
    return record


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Raises DataError unless the file is what was written."""
    if not path.is_file() or sha256(path) != record["sha256"].get(path.name):
        raise DataError(f"{path} is missing or not what was written (SHA-256). Make the set again.")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
