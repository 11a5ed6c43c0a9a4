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
    """Return whether a name is that of the folder of a checkpoint that is not being saved."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def leading_number(name: str) -> int:
    """Return the number with which a name begins, as in 20_again and 20.tmp; -1 if there is none."""
    match = re.match("[0-9]+", name)
    return int(match[0]) if match else -1


def in_checkpoints(name: str) -> bool:
    """Return whether a file belongs to a checkpoint, also to one that was moved."""
    return name.startswith(CHECKPOINTS) and "/" in name


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint to which a file belongs; None if it belongs to none."""
    parts = name.split("/")
    return int(parts[1]) if len(parts) > 2 and parts[0] == CHECKPOINTS and is_step(parts[1]) else None


def manifest_of(step: int) -> str:
    """Return the name of the list of checksums of a checkpoint."""
    return f"{CHECKPOINTS}/{step}/{MANIFEST}"


def steps_of(names: Iterable[str]) -> set[int]:
    """Return the steps of all checkpoints, complete or not."""
    return {step for name in names if (step := step_of(name)) is not None}


def complete_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the complete checkpoints, oldest first."""
    names = set(names)
    return sorted(step for step in steps_of(names) if manifest_of(step) in names)


def names_of_step(names: Iterable[str], step: int) -> list[str]:
    """Return the names of the files of a checkpoint, with the list of checksums last."""
    inside = [name for name in names if step_of(name) == step]
    return sorted(inside, key=lambda name: (name == manifest_of(step), name))


def download_step(store: Store, names: Iterable[str], step: int, folder: Path) -> None:
    """Download the missing files of a checkpoint, and its list of checksums last."""
    missing = [name for name in names_of_step(names, step) if not (folder / name).is_file()]
    store.download([name for name in missing if name != manifest_of(step)], folder)
    store.download([name for name in missing if name == manifest_of(step)], folder)
