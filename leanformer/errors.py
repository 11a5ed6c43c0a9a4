"""Errors that are the user's to mend. The command line prints their message alone, without a traceback.

A message says what was asked, what was found and what to do.
"""

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


class TrainingError(LeanformerError):
    """Training cannot go on: non-finite steps in a row, or memory exhausted."""


def first_line(error: Exception) -> str:
    """What another library's error says, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
