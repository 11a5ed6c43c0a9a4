"""Files that are there whole or not at all, after a kill and after a power cut too."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives the path of a draft to write; at the end it is on disk, then has the name of `path`, for good. Where the
    writing fails, no draft is left and an older file stays as it was."""
    draft = path.with_name(f"{path.name}.part")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a file of text whole or not at all."""
    with whole(path) as draft:
        draft.write_text(text)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems say that have no such thing for a folder
            raise
    finally:
        os.close(handle)
