"""Atomic writing of files, safe against a kill and a power cut; reading of the files; checksums of folders."""

import contextlib
import errno
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, first_line


MANIFEST = "files.json"  # list of the checksums in a folder


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which is then synced and renamed to `path`. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill in a `with` block; at its end it is synced to disk and renamed to `folder`."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):  # otherwise a power cut could leave a renamed folder of empty files
            sync(path)
        draft.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support fsync of a folder
            raise
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def check_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a command's settings to a JSON file. Raises ConfigError for other ones: results would be mixed."""
    if not path.is_file():
        write_json(path, {"settings": settings})
        return
    previous, current = read_json(path)["settings"], json.loads(json.dumps(settings))
    for name in {**previous, **current}:
        if previous.get(name) != current.get(name):
            raise ConfigError(
                f"{path} was written by a different command: {name}={previous.get(name)}, now {current.get(name)}. "
                "Use another folder."
            )


def check_output_file(out: str, inputs: Iterable[str | Path] = ()) -> None:
    """Raise ConfigError if the file --out is a folder, or one of the files that the command reads."""
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigError(f"--out={out} is a folder. Pass the name of a file.")
    if path.exists() and any(path.samefile(Path(item).expanduser()) for item in inputs):
        raise ConfigError(f"--out={out} is one of the input files and would be overwritten. Choose another name.")


def write_checksums(folder: Path) -> None:
    """Write the size and CRC-32 of every file in a folder and its subfolders to MANIFEST in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    entries = {str(path.relative_to(folder)): [path.stat().st_size, _compute_crc(path)] for path in paths}
    write_json(folder / MANIFEST, entries)


def find_corruption(folder: Path) -> str | None:
    """Describe the first file that differs from `write_checksums`; None also after a save that was killed."""
    try:
        entries = json.loads((folder / MANIFEST).read_bytes()) if (folder / MANIFEST).is_file() else {}
        for name, (size, crc) in entries.items():
            path = folder / name
            actual = path.stat().st_size if path.is_file() else "no file"
            if actual != size:
                return f"{name} had {size} bytes when it was saved, found {actual}"
            if _compute_crc(path) != crc:
                return f"{name} has changed since it was saved (checksum differs)"
    except (OSError, ValueError) as error:
        return first_line(error)
    return None


def _compute_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc
