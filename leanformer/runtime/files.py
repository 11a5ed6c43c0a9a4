"""Atomic writing of files, safe against a kill and a power cut, and reading of the files."""

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, WorkdirError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to in a `with` block; at its end the file is synced and renamed to `path`.

    Missing folders are created. If writing fails, an older file at `path` stays unchanged.
    """
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
    """Yield a hidden folder to fill in a `with` block; at its end the folder is synced to disk and renamed to `folder`.

    Folders above it are created. A failure leaves nothing. A kill leaves the hidden folder. Raises OSError if `folder`
    exists and is not empty.
    """
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


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; characters that are not UTF-8 are escaped."""
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def printable(text: str) -> str:
    """Return the text with characters that are not UTF-8 escaped, for libraries that encode it themselves."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_json(path: Path, content: Any) -> None:
    """Write `content` as an indented JSON file, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def lines(path: str, flag: str) -> list[str]:
    """Return the lines of a user's text file, without the line ends. Only a line feed ends a line.

    Args:
        path: path of the file; "~" is expanded.
        flag: command-line flag whose value is `path`, for messages.

    Raises:
        ConfigError: the file cannot be read as UTF-8, or is empty.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}={path}: the file cannot be read as UTF-8: {error}.") from error
    if not text.strip():
        raise ConfigError(f"{flag}={path}: the file is empty. Write one text per line.")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises WorkdirError if it is not valid JSON, OSError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise WorkdirError(
            f"{path} is not valid JSON: {error}. It was changed or damaged after it was written. Fix it or restore a "
            "copy."
        ) from error


def check_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a command to the JSON file `path`, or compare them with those in the file if it exists.

    Args:
        path: file in the folder of the command's results.
        settings: settings by name, ready for JSON.

    Raises:
        ConfigError: the file has other settings; finished results in its folder would be mistaken for those of this
            command.
        WorkdirError: the file is not valid JSON, or has no settings.
    """
    if not path.is_file():
        write_json(path, {"settings": settings})
        return
    content = read_json(path)
    previous = content.get("settings", {}) if isinstance(content, dict) else None
    if not isinstance(previous, dict):
        raise WorkdirError(f"{path} has no settings of a command. Delete it, or use another folder.")
    current = json.loads(json.dumps(settings))
    for name in {**previous, **current}:
        if previous.get(name) != current.get(name):
            raise ConfigError(
                f"{path} was written by a different command: {name}={previous.get(name)}, now {current.get(name)}. "
                "Use another folder."
            )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON-lines file, without an unterminated last line; an empty list if there is no file.

    Empty lines are skipped. Raises WorkdirError if a terminated line is not a JSON object.
    """
    if not path.is_file():
        return []
    objects = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            content = json.loads(line) if line else None
        except ValueError:
            content = line
        if isinstance(content, dict):
            objects.append(content)
        elif line:
            raise WorkdirError(f"{path}, line {number} is not a JSON object: {line[:60]!r}. Fix or delete this line.")
    return objects


def check_output_file(out: str, inputs: Iterable[str | Path] = ()) -> None:
    """Raise ConfigError if the file --out is a folder, or one of the files that the command reads."""
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigError(f"--out={out} is a folder. Pass the name of a file.")
    if path.exists() and any(path.samefile(Path(item).expanduser()) for item in inputs):
        raise ConfigError(f"--out={out} is one of the input files and would be overwritten. Choose another name.")


def check_empty(folder: Path, flag: str) -> None:
    """Raise ConfigError if a folder to write to exists and contains anything; `flag` names it in the message."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{flag}={folder} is not empty. Choose a new folder, or delete this one.")


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
