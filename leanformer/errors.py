"""User-fixable errors, whose message the command line prints without a traceback.

A message names what was configured, what was found and what to do.
"""

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
    """Corrupted file of a run, or a folder that another run uses."""


class TrainingError(LeanformerError):
    """Training that failed: diverged, too many skipped steps, or out of memory."""


class CorruptExample(DataError, ValueError):
    """Unreadable example. `data.loader` counts and reports it, and reads its neighbour instead."""


def first_line(error: BaseException) -> str:
    """Return the first line, at most 300 characters, of an error's message; the name of its class if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
