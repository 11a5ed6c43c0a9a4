"""Locally generated datasets: folders that appear when they are complete, with a record of their recipe."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import DataError
from leanformer.runtime import files


RECORD = "recipe.json"  # in the folder of a dataset


def make(
    folder: str | Path, recipe: Mapping[str, Any], fill: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
) -> Path:
    """Build a dataset if the folder is missing or empty, and return the absolute folder.

    A new folder appears when it is complete, with the files that `fill` writes and the record, see `read`. A killed
    process leaves a hidden folder beside it.

    Args:
        folder: folder of the dataset; "~" is expanded.
        recipe: settings that determine the data, ready for JSON.
        fill: function that writes the files to a folder, and returns further entries of the record.

    Raises:
        DataError: the folder has other content or a dataset of another recipe, or cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        try:
            with files.atomic_folder(folder) as draft:
                files.write_json(draft / RECORD, {"recipe": dict(recipe), **fill(draft)})
        except OSError as error:
            if not (folder / RECORD).is_file():  # else another process has built it meanwhile
                raise DataError(f"A dataset cannot be written to {folder}: {error}") from error
    read(folder, recipe)
    return folder


def read(folder: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that `make` wrote for a dataset: its "recipe", and the entries that `fill` returned.

    Args:
        folder: folder of the dataset.
        expected: required settings of the recipe by name; others may have any value.

    Raises:
        DataError: the record is missing, or has another recipe.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no dataset: {error}. Make one in a new folder with python -m leanformer.prepare build."
        ) from error
    recipe = record["recipe"]
    if differ := [f"{key}={recipe.get(key)} (configured {x})" for key, x in expected.items() if recipe.get(key) != x]:
        raise DataError(f"{folder} has another dataset: {', '.join(differ)}. Use another folder, or remove this one.")
    return record
