"""Names of the objects of a run in a store, and the download of a checkpoint.

A checkpoint is complete once its list of checksums exists, which is written after its other files and deleted before
them. A checkpoint without this list does not exist for readers, and the next run of `train` deletes it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from leanformer.runtime.integrity import MANIFEST
from leanformer.stores import Store


CHECKPOINTS = "checkpoints"  # folder with one folder per step; training moves some to folders of longer names


def is_step(name: str) -> bool:
    """Return whether the name of a folder is the number of a step, as for a saved checkpoint, without leading zeros.

    Other names in the folder of checkpoints, such as "20.tmp", are of saves in progress.
    """
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def leading_number(name: str) -> int:
    """Return the number with which a name begins, such as 20 for "20.tmp"; -1 if there is none."""
    match = re.match("[0-9]+", name)
    return int(match[0]) if match else -1


def in_checkpoints(name: str) -> bool:
    """Return whether a file is in a folder whose name begins with "checkpoints", to which training also moves some.

    `name` is the path of the file relative to the workdir.
    """
    return name.startswith(CHECKPOINTS) and "/" in name


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint to which a file belongs, by its name checkpoints/STEP/...; None if to none."""
    parts = name.split("/")
    return int(parts[1]) if len(parts) > 2 and parts[0] == CHECKPOINTS and is_step(parts[1]) else None


def manifest_of(step: int) -> str:
    """Return the name, relative to the workdir, of the list of checksums of the checkpoint of a step."""
    return f"{CHECKPOINTS}/{step}/{MANIFEST}"


def steps_of(names: Iterable[str]) -> set[int]:
    """Return the steps of all checkpoints, complete or not, to which files of these names belong."""
    return {step for name in names if (step := step_of(name)) is not None}


def complete_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the checkpoints whose list of checksums is among the names of files, oldest first."""
    names = set(names)
    return sorted(step for step in steps_of(names) if manifest_of(step) in names)


def names_of_step(names: Iterable[str], step: int) -> list[str]:
    """Return those of the names that belong to the checkpoint of a step, sorted, with its list of checksums last.

    Args:
        names: names of files, relative to the workdir.
        step: step of the checkpoint.
    """
    inside = [name for name in names if step_of(name) == step]
    return sorted(inside, key=lambda name: (name == manifest_of(step), name))


def download_step(store: Store, names: Iterable[str], step: int, folder: Path) -> None:
    """Download those files of a checkpoint that a folder lacks, and its list of checksums last.

    Args:
        store: store of the run.
        names: names of all objects in the store.
        step: step of the checkpoint.
        folder: local workdir.
    """
    missing = [name for name in names_of_step(names, step) if not (folder / name).is_file()]
    store.download([name for name in missing if name != manifest_of(step)], folder)
    store.download([name for name in missing if name == manifest_of(step)], folder)
