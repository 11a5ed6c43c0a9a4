"""Atomic writing of files, safe against a kill and a power cut, and reading of the files."""

import contextlib
import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from leanformer.errors import ConfigError, WorkdirError, system_error_message
from leanformer.runtime.terminal import ESCAPED


# Longest name and path to write to, in bytes; Linux allows 255 and 4,096. Drafts have longer names than the results
# (`atomic_write`, `atomic_folder`), and files of checkpoints are some folders deeper.
LONGEST_NAME, LONGEST_PATH = 240, 3_800


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to OSErrors in a `with` block that have none, such as errors of writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to in a `with` block; at its end the file is synced and renamed to `path`.

    The folder must exist. If writing fails, the temporary file is removed and an older file at `path` stays unchanged.
    The new file has the permissions of the older one. Of two writers at once the last one wins. A kill leaves the
    temporary file.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with name_file_in_errors(path):
            yield draft
            if path.is_file():
                with contextlib.suppress(OSError):  # mounted buckets have no permissions
                    shutil.copymode(path, draft)
            sync(draft)
            draft.replace(path)
    except OSError as error:
        error.filename = str(path) if error.filename == str(draft) else error.filename
        raise
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


@contextlib.contextmanager
def atomic_user_write(out: str) -> Iterator[Path]:
    """Yield the path of a file to write in a `with` block, for the path `out` that a user gave; create missing folders.

    It is a temporary file that is synced and renamed at the end of the block. Links are followed. Devices and pipes,
    such as /dev/stdout, are written to directly.
    """
    path = Path(out).expanduser()
    redirected = path.is_symlink() and path.is_relative_to("/dev")  # /dev/stdout may lead to a file that is open
    if path.exists() and (redirected or not path.is_file()):
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        yield draft


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; characters that are not UTF-8 are escaped."""
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8", errors=ESCAPED)


def printable(text: str) -> str:
    """Return the text with characters that are not UTF-8 escaped, for libraries that encode it themselves."""
    return text.encode("utf-8", ESCAPED).decode()


def write_json(path: Path, content: Any) -> None:
    """Write `content` as an indented JSON file, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def open_input(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises OSError for a pipe, a socket or a device, which might block or never end; opening it never waits.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(handle, "rb")
    os.close(handle)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    reason = "Is a directory" if stat.S_ISDIR(kind) else "Neither a file nor a link to one"
    raise OSError(number, reason, str(path))


def read_input(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError for other types, as `open_input`."""
    with open_input(path) as file:
        return file.read()


def is_special(path: Path) -> bool:
    """Return whether a path is a pipe, a socket or a device, or a link to one; False if it does not exist."""
    return path.exists() and not (path.is_file() or path.is_dir())


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
    previous = content.get("settings") or content.get("asked") or {} if isinstance(content, dict) else None
    if not isinstance(previous, dict):  # "asked" before version 0.1
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


def check_writable(folder: Path) -> None:
    """Raise WorkdirError if a folder is not writable, cannot be created, or has an impossible path. Creates nothing."""
    existing, absolute = folder, folder.absolute()
    try:
        _check_length(absolute)
        if (shown := printable(str(absolute))) != str(absolute):
            raise WorkdirError(
                f"{shown} is not UTF-8, which the libraries that write checkpoints and caches require. Choose another "
                "name."
            )
        existing = next(path for path in (folder, *absolute.parents) if os.path.lexists(path))
        if not existing.exists():
            target = existing.readlink()
            raise WorkdirError(
                f"{existing} is a link to {target}, which does not exist. Create it, or choose another folder."
            )
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
        if not os.access(existing, os.W_OK | os.X_OK):
            read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number), str(existing))
    except OSError as error:
        if sentence := system_error_message(error):
            raise WorkdirError(sentence if existing == folder else f"{folder} cannot be created: {sentence}") from error
        raise


def _check_length(path: Path) -> None:
    """Raise OSError for a path that leaves no room for the names of drafts and of files inside."""
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in path.parts) or len(os.fsencode(path)) > LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))


def find_remedy(folder: Path, error: str) -> str:
    """Return a sentence on what to do after another library failed to write below a folder.

    Args:
        folder: existing folder, whose file system is asked for free space.
        error: text of the error.
    """
    if os.strerror(errno.EMFILE) in error or os.strerror(errno.ENFILE) in error:
        return "Raise the limit of open files (ulimit -n)."
    system = os.statvfs(folder)
    if system.f_files and not system.f_favail:
        return "The file system has no inodes left: delete files."
    free = system.f_bavail * system.f_frsize / 2**20
    return f"Free space, of which {free:.0f} MiB are left, or correct the reason above."


def check_output_file(out: str, inputs: Iterable[str | Path] = ()) -> None:
    """Check the path `out` of a file to write, the value of --out, before a command starts its work. Creates nothing.

    Args:
        out: path of the file; "~" is expanded.
        inputs: files that the command reads.

    Raises:
        ConfigError: `out` is a folder or one of the inputs.
        WorkdirError: its folder is not writable or cannot be created.
        OSError: its name is too long.
    """
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigError(f"--out={out} is a folder. Pass the name of a file.")
    if path.exists() and any(path.samefile(Path(item).expanduser()) for item in inputs):
        raise ConfigError(f"--out={out} is one of the input files and would be overwritten. Choose another name.")
    check_writable(path.parent)
    if not path.exists():
        _check_length(path.absolute())


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
