"""Metrics log of a run, metrics.jsonl.

One object per record: `{"step", "kind": "train" | "eval" | "eval NAME" | "probe" | "abort", ...}`. Everything except
the keys in TIMING is a function of config and seed. A resumed run truncates the file to the restored step and appends.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from leanformer.errors import WorkdirError
from leanformer.runtime import files, multihost
from leanformer.training.loggers import LoggerGroup
from leanformer.training.progress import Progress


TIMING = ("examples_per_s", "data_wait", "mfu", "wall_s")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl as dictionaries, without an unterminated last line; [] without a file.

    Raises WorkdirError if a terminated line is not a record with step and kind.
    """
    records = files.read_lines(path)
    for record in records:
        if "kind" not in record or type(record.get("step")) is not int:
            raise WorkdirError(
                f"{path} has a line without kind or a whole number as step: {str(record)[:60]}. Delete this line."
            )
    return records


def read_scores(workdir: Path, name: str) -> dict[int, float]:
    """Return {step: value} of a metric in the records of kind "eval" in a run's metrics.jsonl; {} without a file.

    Records without the metric are left out; a value that was not finite is NaN. Raises WorkdirError if a line is not a
    record.

    Args:
        workdir: folder of the run.
        name: name of the metric.
    """
    records = read_records(workdir / "metrics.jsonl")
    scores = {record["step"]: record[name] for record in records if record["kind"] == "eval" and name in record}
    return {step: math.nan if value is None else value for step, value in scores.items()}


class Recorder:
    """Writer of a run's records to metrics.jsonl, to a logger and to the progress output; only process 0 writes.

    Use it as a context manager: at the end it closes the file, the logger and the progress output.

    Attributes:
        path: path of metrics.jsonl.
        records: all records of the run so far, as dictionaries; in other processes only those of this process.

    Args:
        workdir: folder of the run.
        start: step from which the run starts. Records after it, of an earlier attempt, are removed from the file; at 0
            all are, since that attempt may have had another config.
        total: number of steps of the run, for the progress output.
        make_logger: function that makes the receivers of the records besides the file, called at the first record.

    Raises:
        WorkdirError: a run resumes without its metrics.jsonl, or a line of it is not a record.
    """

    def __init__(self, workdir: Path, *, start: int, total: int, make_logger: Callable[[], LoggerGroup] = LoggerGroup):
        self.path = workdir / "metrics.jsonl"
        self.records: list[dict[str, Any]] = []
        self._silent = not multihost.is_primary()
        if start and not self._silent:
            if not self.path.is_file():  # the best checkpoint would be unknown, and deleted
                raise WorkdirError(
                    f"{self.path} is missing: it has the run's records, and the scores by which the best checkpoint is "
                    "kept. Restore it, or create an empty file to continue without them."
                )
            self.records += [record for record in read_records(self.path) if record["step"] <= start]
        self._make_logger = make_logger
        self._progress = Progress(start=start, total=total)
        self._file: IO[bytes] | None = None
        self._logger: LoggerGroup | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and self._logger is not None:
            self._file.close()
            self._logger.close()
        self._progress.close()

    def begin(self) -> None:
        """Remove the records after the first step from the file, and start the loggers; only process 0 does so.

        The first record does it too. Call this before a checkpoint is saved, which a later attempt may resume from.
        """
        if not self._silent:
            self._open()

    def _open(self) -> tuple[IO[bytes], LoggerGroup]:
        """Return the file, cut to the step from which the run starts, and the loggers."""
        if self._file is None or self._logger is None:
            files.write_text(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
            self._file = self.path.open("ab", buffering=0)  # so that nothing is pending after a failed write
            self._logger = self._make_logger()
        return self._file, self._logger

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write a record, and wait until it is on disk. Numbers that are not finite become null.

        Args:
            step: step of the record.
            kind: kind of the record, such as "train" or "eval".
            values: values by name, which `to_json` converts.
        """
        values = {name: to_json(value) for name, value in values.items()}
        record = {"step": step, "kind": kind, **values}
        if self._silent:
            self.records.append(record)
            return
        file, logger = self._open()
        self.records.append(record)
        line = memoryview(json.dumps(record).encode() + b"\n")
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
        logger.log(step, kind, values)
        self._progress.print(step, kind, values)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`, without a record."""
        if not self._silent:
            self._progress.advance(step)

    def has(self, step: int, kind: str) -> bool:
        """Return whether `records` contains one of this kind at this step; see there for processes other than 0."""
        return any(record["step"] == step and record["kind"] == kind for record in self.records)


def to_json(value: Any) -> Any:
    """Return nested dictionaries, lists and tuples of numbers, texts and None as JSON's types.

    Numbers of NumPy and JAX become floats, and numbers that are not finite become None. Raises TypeError for arrays of
    several numbers.
    """
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else None
