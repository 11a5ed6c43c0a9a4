"""Locally generated datasets, written once and atomically, with a record of their recipe and checksums."""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.errors import DataError
from leanformer.runtime import files


WHOLE = 1 << 28  # bytes up to which a file is read as a whole to verify it: about a second
BLOCK = 1 << 24  # bytes per checksum in larger files
SAMPLED = 16  # blocks of a larger file that are verified, together as long as WHOLE


def record_path(folder: Path, kind: str) -> Path:
    """Return the path of the record of a dataset of type `kind`: `<kind>.json` in its folder, in lower case."""
    return folder / f"{kind.lower()}.json"


def make(
    folder: str | Path, kind: str, version: int, recipe: Mapping[str, Any], fill: Callable[[Path], Mapping[str, Any]]
) -> Path:
    """Build a dataset if the folder is missing or empty, and return the absolute folder.

    In a folder with content, only the version and recipe of the record are checked. A new folder appears when it is
    complete, with the files that `fill` writes and the record `<kind>.json`, see `read`. A killed run leaves a hidden
    folder beside it.

    Args:
        folder: folder of the dataset; "~" is expanded.
        kind: type of the dataset, such as "ListOps".
        version: version of the files and of the meaning of a recipe.
        recipe: settings that determine the data, ready for JSON.
        fill: function that writes the files to a folder, and returns further entries of the record.

    Raises:
        DataError: the folder has other content or a dataset of another version or recipe, or cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        try:
            with files.atomic_folder(folder) as draft:
                more = fill(draft)
                paths = sorted(draft.iterdir())
                sums = {path.name: sha256(path) for path in paths}
                blocks = {path.name: sum_blocks(path) for path in paths if path.stat().st_size > WHOLE}
                content = {"version": version, "recipe": dict(recipe), **more, "sha256": sums}
                content |= {"blocks": blocks} if blocks else {}
                files.write_json(record_path(draft, kind), content)
        except OSError as error:
            if not record_path(folder, kind).is_file():  # else another process has built it meanwhile
                raise DataError(f"The {kind} dataset cannot be written to {folder}: {error}") from error
    read(folder, kind, version, recipe)
    return folder


def read(folder: Path, kind: str, version: int, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that `make` wrote for a dataset.

    Its keys are "version", "recipe", "sha256" (sum of each file by name), "blocks" (CRC-32 sums of each file above
    WHOLE bytes by name; missing if there is none), and those that `fill` returned.

    Args:
        folder: folder of the dataset.
        kind: type of the dataset, such as "ListOps".
        version: required version.
        expected: required settings of the recipe by name; others may have any value.

    Raises:
        DataError: the record is missing or damaged, or has another version or another recipe.
    """
    path = record_path(folder, kind)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        existing, recipe, *_ = record["version"], record["recipe"], record["recipe"].keys(), record["sha256"].keys()
        differ = [f"{k}={recipe.get(k)} (configured {v})" for k, v in expected.items() if recipe.get(k) != v]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder} has no {kind} dataset: {path.name} is missing or damaged ({error}). Use the folder of one, or "
            "build one in a new folder."
        ) from error
    if existing != version:
        raise DataError(
            f"{folder} has a dataset of version {existing}, expected {version}. Build it again in a new folder."
        )
    if differ:
        raise DataError(
            f"{folder} has another {kind} dataset: {', '.join(differ)}. Use another folder, or remove this one."
        )
    return record


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Raise DataError if a file is missing, or its SHA-256 sum differs from that in `record`, the result of `read`."""
    if not path.is_file() or sha256(path) != record["sha256"].get(path.name):
        raise DataError(
            f"{path} is missing or was modified (SHA-256). Remove {path.parent} to build the dataset again."
        )


def check_files(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise DataError if a file of a dataset is missing or was modified.

    Files of at most WHOLE bytes (256 MiB) are read as a whole. Of larger ones, SAMPLED (16) evenly spaced blocks are
    read; not even these if the record is of an older version and lacks the checksums of blocks.

    Args:
        folder: folder of the dataset.
        record: result of `read`.
    """
    for name in record["sha256"]:
        path = folder / name
        if not path.is_file() or path.stat().st_size <= WHOLE:
            check_file(path, record)
        elif sums := record.get("blocks", {}).get(name):
            _check_blocks(path, sums)


def _check_blocks(path: Path, sums: Sequence[int]) -> None:
    """Raise DataError if one of SAMPLED evenly spaced blocks has another CRC-32 sum, or their number differs."""
    number = min(SAMPLED, len(sums))
    places = {round((len(sums) - 1) * i / max(1, number - 1)) for i in range(number)}
    wrong = -(-path.stat().st_size // BLOCK) != len(sums)
    with path.open("rb") as file:
        for place in sorted(places):
            file.seek(place * BLOCK)
            wrong = wrong or zlib.crc32(file.read(BLOCK)) != sums[place]
    if wrong:
        raise DataError(f"{path} was modified (CRC-32). Remove {path.parent} to build the dataset again.")


def sum_blocks(path: Path) -> list[int]:
    """Return the CRC-32 sums of the consecutive blocks of BLOCK bytes (16 MiB) of a file; the last may be shorter."""
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]


def sha256(path: Path) -> str:
    """Return the SHA-256 sum of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
