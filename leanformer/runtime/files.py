"""Files that are there whole or not at all, after a kill and after a power cut too; and reading them back."""

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, WorkdirError, of_system


ESCAPED = "backslashreplace"  # how names of files that are not UTF-8, which Python reads as surrogates, are shown


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in errors of the file system that name none, which are those of writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives the path of a draft to write; at the end it is on disk, then has the name of `path`, for good. Where the
    writing fails, no draft is left and an older file stays as it was."""
    draft = path.with_name(f"{path.name}.part")
    try:
        with named(path):
            yield draft
            sync(draft)
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill with files; at the end they are on disk, then it has the name of `folder`, for
    good. A failure leaves nothing; a kill leaves the hidden folder."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):  # or a power cut could leave a named folder of empty files
            sync(path)
        draft.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def asked(out: str) -> Iterator[Path]:
    """`whole` of a file that a user named, whose folders are made where they are missing."""
    path = Path(out).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as draft:
        yield draft


def write_text(path: Path, text: str) -> None:
    """Writes a file of text whole or not at all, names that are not UTF-8 escaped."""
    with whole(path) as draft:
        draft.write_text(text, encoding="utf-8", errors=ESCAPED)


def printable(text: str) -> str:
    """Return text with what is not UTF-8 in names of files escaped, for libraries that encode it themselves."""
    return text.encode("utf-8", ESCAPED).decode()


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def lines(path: str, flag: str) -> list[str]:
    """The lines of a user's file of text, which end with a line feed and nothing else that looks like an end.

    Raises:
        ConfigError: it cannot be read as UTF-8, or has nothing in it; `flag` is what it was named by.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}={path} cannot be read as UTF-8: {error}.") from error
    if not text.strip():
        raise ConfigError(f"{flag}={path} has no text in it: one a line is wanted.")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises WorkdirError where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise WorkdirError(f"{path} is broken: {error}. It was written whole: mend it, or put back a copy.") from error


def check_same(path: Path, asked: Mapping[str, Any]) -> None:
    """Writes down what is asked of a folder, as `asked` of a JSON file. Raises ConfigError where something else was
    asked of it before: what is finished there would be taken for an answer."""
    if not path.is_file():
        write_json(path, {"asked": asked})
        return
    known, now = read_json(path).get("asked") or {}, json.loads(json.dumps(asked))
    for name in {**known, **now}:
        if known.get(name) != now.get(name):
            said = f"{name}={known.get(name)}, asked is {now.get(name)}"
            raise ConfigError(f"{path} is of another command: {said}. Take another folder.")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, without a last line that was cut off in the writing; none without a file.

    Raises:
        WorkdirError: a line before its end is no JSON object.
    """
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            content = json.loads(line) if line else None
        except ValueError:
            content = line
        if isinstance(content, dict):
            found.append(content)
        elif line:
            raise WorkdirError(f"{path}, line {number} is no JSON object: {line[:60]!r}. Mend that line, or delete it.")
    return found


def check_writable(folder: Path) -> None:
    """Raises WorkdirError where a folder can be known not to take files, or not to be made. Makes nothing."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            read_only = os.statvfs(there).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number), str(there))
    except OSError as error:
        if sentence := of_system(error):
            raise WorkdirError(f"Nothing can be written to {folder}. {sentence}") from error
        raise


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
