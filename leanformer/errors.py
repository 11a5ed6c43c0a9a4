"""User-fixable errors, whose message the command line prints without a traceback.

A message names what was configured, what was found and what to do.
"""

import errno
import os
from pathlib import Path


USER_ERROR = 2  # exit status after such an error; running the same command again does not help


class LeanformerError(Exception):
    """Base class of errors with a message for the user."""


class ConfigError(LeanformerError, ValueError):
    """Invalid config, flag or combination of them."""


class DataError(LeanformerError):
    """Missing or unreadable data, or more corrupt examples than allowed."""


class WeightsError(LeanformerError):
    """Unreadable file of weights, or weights that do not fit the model."""


class CheckpointError(LeanformerError):
    """Checkpoint that cannot be saved or read, or does not fit the model."""


class WorkdirError(LeanformerError):
    """Folder that is not writable, or corrupted file of a run."""


class TrainingError(LeanformerError):
    """Training that failed: diverged, too many skipped steps, or out of memory."""


class CorruptExample(DataError, ValueError):
    """Unreadable example. `data.loader` counts and reports it, and reads its neighbour instead."""


NO_HOME = "Could not determine home directory."  # message of pathlib.Path.expanduser
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # a limit of the process or host, whichever file is opened
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Choose a folder with read and write permission."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free space, then run the same command to resume."),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "There is a file instead of a folder. Choose another folder."),
    errno.EISDIR: "There is a folder instead of a file. Choose another name.",
    errno.EIO: "Check the disk, then run the same command to resume.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ELOOP: "It is a link to itself. Choose another path.",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n), or lower data.workers."),
    errno.EBADF: "It was closed when the command started. Redirect it to a file.",
}


def system_error_message(error: OSError) -> str | None:
    """Return the message of an error of the file system that the user can fix; None for any other error."""
    remedy, limit = REMEDIES.get(error.errno), error.errno in EXHAUSTED
    if remedy is None or not (error.filename or limit):
        return None
    subject = os.fsdecode(error.filename) if error.filename else "A file or pipe"
    return f"{subject} cannot be used: {error.strerror}. {remedy}"


def user_message(error: BaseException) -> str | None:
    """Return the message of a user-fixable error; None for a bug or a hardware error.

    >>> user_message(ConfigError("model.depth=0: must be at least 1."))
    'model.depth=0: must be at least 1.'
    """
    if isinstance(error, LeanformerError):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            f"This host is out of memory: {first_line(error)}. Lower batch_size, eval.batch_size, data.workers or the "
            "size of the model."
        )
    if isinstance(error, RuntimeError) and str(error) == NO_HOME:
        return 'A path begins with "~" and the name of an unknown user. Write the path without "~".'
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_deleted():
        return "The current folder was deleted. Change to one that exists, then run the same command."
    return system_error_message(error) if isinstance(error, OSError) else None


def _is_deleted() -> bool:
    """Return whether the current folder was deleted; its path then still exists for this process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def first_line(error: BaseException) -> str:
    """Return the first line, at most 300 characters, of an error's message; the name of its class if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
