"""Loggers that receive a run's records in addition to metrics.jsonl: TensorBoard, experiment trackers, and custom ones.

`LOGGERS[name]` creates a logger from the run's folder, the step from which training starts, and the flat config. The
config key `loggers` names the loggers of a run. A custom logger is a class with `log` and `close`, added to LOGGERS.
"""

import contextlib
import functools
import importlib.util
import io
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from tensorboardX import RecordWriter, summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # ty: ignore[missing-module-member] - made by protobuf

from leanformer.config import key_docs
from leanformer.errors import ConfigError, first_line
from leanformer.runtime import files, multihost
from leanformer.training import trackers


QUEUE_RECORDS = 1000  # records that may wait for a logger before it counts as stalled
CLOSE_SECONDS = 30.0  # for all loggers together to write the remaining records at the end of a run
THREAD = "logger "  # prefix of the names of their threads
DRAWING = threading.Lock()  # matplotlib is not thread-safe; hold this lock to draw while loggers run


@runtime_checkable
class Logger(Protocol):
    """Protocol of a receiver of a run's records: a class with `log` and `close`.

    It is created and called in process 0, in a thread of its own. If it raises or blocks there, training continues
    without it (`Several`).
    """

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record.

        Args:
            step: step of the record.
            kind: "train", "eval", "eval NAME" for eval.more, "probe", "abort", or the name of an evaluator in EXTRA.
            values: numbers by name, None for a number that is not finite; for a measure of the probe
                {statistic: [one number per layer]}.
        """

    def close(self) -> None:
        """Write what is left, and release files and connections. Called at the end of a run, also after an error."""


class TensorBoard:
    """Event file in WORKDIR/tensorboard: scalars, config, hyperparameters with metrics, and plots of the probe.

    This class writes the file record by record. The SummaryWriter of tensorboardX writes in a thread that ends without
    a report on an error of the file system; every later call to it blocks.

    Args:
        workdir: folder of the run.
        start: step from which training starts; later records of an earlier attempt are dropped.
        config: flat config, values by dotted key.
    """

    def __init__(self, workdir: Path, start: int, config: Mapping[str, Any]):
        self._config = {
            key: x if isinstance(x, bool | int | float) else files.printable(str(x)) for key, x in config.items()
        }
        folder = workdir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        again = any(folder.iterdir())
        self._file = RecordWriter(str(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"))
        self._write(file_version="brain.Event:2")
        if again:  # makes TensorBoard drop the records that an earlier attempt wrote from this step on
            self._write(step=start and start + 1, session_log=SessionLog(status=SessionLog.START))
        lines = "".join(f"    {key} = {value}\n" for key, value in self._config.items())
        self._write(step=start, summary=summary.text("config", lines))
        self._file.flush()
        self._compared = False

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record, as `Logger.log`, and flush the file. Raises OSError if the file cannot be written."""
        try:
            self._log(step, kind, values)
        except OSError:
            with contextlib.suppress(OSError):  # the buffer cannot be written either
                self._file.close()
            raise

    def _log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        numbers = dict(trackers.scalars(kind, values))
        for name, value in numbers.items():
            self._write(step=step, summary=summary.scalar(name, value))
        if kind == "probe" and (image := _draw_probe(values, step)) is not None:
            self._write(step=step, summary=summary.image("probe/conditioning", image, dataformats="HWC"))
        if kind == "eval" and not self._compared:
            for content in summary.hparams(self._config, numbers):
                self._write(summary=content)
            self._compared = True
        self._file.flush()

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._file.write(Event(wall_time=time.time(), **content).SerializeToString())


class Several:
    """Group of loggers that never raises or blocks: a logger that fails or stalls is dropped with one warning.

    Args:
        make: functions that create the loggers, by name.
    """

    def __init__(self, make: Mapping[str, Callable[[], Logger]]):
        self._loggers = [_Background(name, make_one) for name, make_one in make.items()]

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Put a record into the queue of each logger, and return at once; arguments as in `Logger.log`."""
        for logger in self._loggers:
            logger.put((step, kind, values))

    def close(self) -> None:
        """Close all loggers, and wait up to CLOSE_SECONDS for their remaining records."""
        for logger in self._loggers:
            logger.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for logger in self._loggers:
            logger.join(deadline)


class _Background:
    """Logger in its own thread, which creates it, feeds it from a bounded queue, and closes it.

    Training only puts records into the queue, so that a logger cannot stop it.
    """

    def __init__(self, name: str, make: Callable[[], Logger]):
        self._name, self._make = name, make
        self._queue: queue.Queue[tuple[int, str, Mapping[str, Any]] | None] = queue.Queue(QUEUE_RECORDS)
        self._dropped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)
        self._thread.start()

    def put(self, record: tuple[int, str, Mapping[str, Any]] | None) -> None:
        """Put a record into the queue, or None at the end."""
        if self._dropped:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._drop(f"{QUEUE_RECORDS} records are in its queue")

    def join(self, deadline: float) -> None:
        """Wait for the end of the logger, until `deadline` unless it was dropped."""
        self._thread.join(0 if self._dropped else max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._drop(f"it did not close within {CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        try:
            logger = self._make()
            while (record := self._queue.get()) is not None and not self._dropped:
                logger.log(*record)
            logger.close()
        except (
            BaseException
        ) as error:  # any error of a service or its package, SystemExit included, must not end the run
            self._drop(f"{type(error).__name__}: {first_line(error)}")

    def _drop(self, reason: str) -> None:
        with self._lock:
            first, self._dropped = not self._dropped, True
        if first:
            print(
                f'WARNING: loggers="{self._name}": {reason}. Training continues without it; metrics.jsonl contains all '
                "records.",
                file=sys.stderr,
                flush=True,
            )


def stuck() -> list[str]:
    """Return the names of loggers whose threads are still running, for example at the end of the process."""
    return [t.name.removeprefix(THREAD) for t in threading.enumerate() if t.name.startswith(THREAD)]


LOGGERS: dict[str, Callable[[Path, int, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": trackers.WeightsAndBiases,
    "mlflow": trackers.MLflow,
    "trackio": trackers.Trackio,
}
OPTIONAL_PACKAGES = ("wandb", "mlflow", "trackio")  # that loggers of the same name import


def check(names: tuple[str, ...]) -> None:
    """Raise ConfigError if a name in the config key `loggers` is unknown, or the tracker's package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f'loggers={names}: "{name}" is unknown. Choose from {", ".join(LOGGERS)}.')
        if name in OPTIONAL_PACKAGES and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"loggers={names}: the package {name} is not installed. In the repository, run: "
                f"pip install -e '.[{name}]'."
            )


def start(c: Any, workdir: Path, step: int) -> Several:
    """Start the loggers that a config names, each in its own thread, and return them as one; only process 0 has any.

    Args:
        c: config of the run.
        workdir: folder of the run.
        step: step from which training starts.
    """
    flat = dict(key_docs.iterate_keys(c))
    return Several(
        {name: functools.partial(LOGGERS[name], workdir, step, flat) for name in c.loggers if multihost.is_primary()}
    )


def _draw_probe(values: Mapping[str, Any], step: int) -> np.ndarray | None:
    """Draw a probe's record as an image, height width 3; return None if no measure has a plot."""
    from leanformer.conditioning import charts, tables  # imports matplotlib, which is slow and needed only here

    with DRAWING:
        figure = charts.plot_by_layer(tables.from_record(values), f"step {step}")
        if figure is None:
            return None
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        return np.asarray(Image.open(file).convert("RGB"))
