"""Errors that are the user's to mend. The command line prints their message alone, without a traceback.

A message says what was asked, what was found and what to do.
"""

import errno
import os


USER_ERROR = 2  # exit status of a run that one of them ended; to run the same command again is of no use


class LeanformerError(Exception):
    """Base of every error with a message meant for the user."""


class ConfigError(LeanformerError, ValueError):
    """The config asks for something that cannot be."""


class DataError(LeanformerError):
    """Data are missing, unreadable or corrupt beyond the allowed share."""


class WeightsError(LeanformerError):
    """A file of weights cannot be read, or does not fit the model."""


class CheckpointError(LeanformerError):
    """A checkpoint cannot be saved, read or fitted to the model."""


class WorkdirError(LeanformerError):
    """A folder cannot be written to, or a file of a run is not what a run writes."""


class TrainingError(LeanformerError):
    """Training cannot go on, or came to nothing: steps skipped in a row, an evaluation past learning, no memory."""


class CorruptExample(ValueError):
    """An example that cannot be read; another stands in for it, and it is counted and named."""


REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Choose a place where you may read and write."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room, then run the same command to go on."),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "A file stands where a folder is wanted. Choose another folder."),
    errno.EISDIR: "A folder stands where a file is wanted. Choose another name.",
    errno.EIO: "Check the disk, then run the same command to resume.",
    errno.ENAMETOOLONG: "Choose a shorter one.",
}


def of_system(error: OSError) -> str | None:
    """What the user can mend of an error of the file system, in a sentence; None where it is nothing of the kind."""
    remedy = REMEDIES.get(error.errno) if error.filename else None
    return remedy and f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}. {remedy}"


def message(error: BaseException) -> str | None:
    """What an error tells the user to mend; None where it is a mistake of ours, or of a machine's."""
    if isinstance(error, LeanformerError):
        return str(error)
    return of_system(error) if isinstance(error, OSError) else None


def first_line(error: Exception) -> str:
    """What another library's error says, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
