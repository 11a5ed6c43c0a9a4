"""Loggers that receive a run's records in addition to metrics.jsonl: TensorBoard, Weights & Biases, or your own.

The config key `loggers` names those of LOGGERS. A config file adds its own with a function `make_loggers`:

    def make_loggers(workdir, first_step, config):
        return [Console()]  # an object with `log` and `close`, see `Logger`
"""

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from leanformer.config import iterate_keys
from leanformer.errors import ConfigError, first_line
from leanformer.runtime import files, multihost


@runtime_checkable
class Logger(Protocol):
    """Protocol of a receiver of a run's records: an object with `log` and `close`, used in process 0 only."""

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record.

        Args:
            step: step of the record.
            kind: "train", "eval", "eval NAME" for eval.more, "probe", "abort", or the name of an evaluator of your own.
            values: numbers by name, None for a number that is not finite; for a measure of the probe
                {statistic: [one number per layer]}.
        """

    def close(self) -> None:
        """Write what is left, and release files and connections. Called at the end of a run, also after an error."""


# function (folder of the run, step from which training starts, config) -> loggers
MakeLoggers = Callable[[Path, int, Any], Sequence[Logger]]


class TensorBoard:
    """Event file in WORKDIR/tensorboard: config, scalars, and a plot of each probe.

    TensorBoard drops records of an earlier attempt after `first_step`, from which training starts.
    """

    def __init__(self, workdir: Path, first_step: int, config: Any):
        from tensorboardX import SummaryWriter  # needed only here

        folder = workdir / "tensorboard"
        purge = first_step and first_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge if any(folder.glob("*")) else None)
        lines = "".join(f"    {key} = {value}\n" for key, value in iterate_keys(config))
        self._writer.add_text("config", lines, first_step)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record, as `Logger.log`."""
        for name, value in scalars(kind, values):
            self._writer.add_scalar(name, value, step)
        if kind == "probe" and (image := _draw_probe(values, step)) is not None:
            self._writer.add_image("probe/conditioning", image, step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Run of Weights & Biases in the project $WANDB_PROJECT, by default "leanformer"; it resumes when training resumes.

    The x-axis is our own `step`, because W&B drops every record whose step is below the last one, and a run that was
    killed resumes from an earlier step. With WANDB_MODE=offline its files are in WORKDIR/wandb, for `wandb sync`.
    """

    def __init__(self, workdir: Path, first_step: int, config: Any):
        wandb = importlib.import_module("wandb")
        identity = workdir / "wandb.json"
        if not identity.is_file():
            files.write_json(identity, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "leanformer"),
            name=workdir.name,
            dir=str(workdir),
            id=files.read_json(identity),
            resume="allow",
            config=dict(iterate_keys(config)),
            settings=wandb.Settings(console="off"),  # the output of the run is not sent
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Send the numbers of a record, as `Logger.log`, named by `scalars`."""
        self._run.log({"step": step, **dict(scalars(kind, values))})

    def close(self) -> None:
        """Finish the run of W&B."""
        self._run.finish()


LOGGERS: dict[str, Callable[[Path, int, Any], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check(names: tuple[str, ...]) -> None:
    """Raise ConfigError if a name in the config key `loggers` is unknown, or wandb is named and not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f'loggers={names}: "{name}" is unknown. Choose from {", ".join(LOGGERS)}.')
        if name == "wandb" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"loggers={names}: the package wandb is not installed. Run: pip install wandb.")


class LoggerGroup:
    """Several loggers as one. A logger that raises is dropped with one warning, so that it cannot end training."""

    def __init__(self, loggers: Sequence[Logger] = ()):
        self._loggers = list(loggers)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record to every logger, as `Logger.log`."""
        for logger in [*self._loggers]:
            self._call(logger, lambda logger=logger: logger.log(step, kind, values))

    def close(self) -> None:
        """Close all loggers."""
        for logger in [*self._loggers]:
            self._call(logger, logger.close)

    def _call(self, logger: Logger, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # a service or its package can raise anything
            self._loggers.remove(logger)
            print(
                f"WARNING: the logger {type(logger).__name__} failed: {type(error).__name__}: {first_line(error)}. "
                "Training continues without it; metrics.jsonl contains all records.",
                file=sys.stderr,
                flush=True,
            )


def start(config: Any, workdir: Path, first_step: int, make_loggers: MakeLoggers | None = None) -> LoggerGroup:
    """Return the loggers that a config names and those of `make_loggers`, as one; none except in process 0."""
    if not multihost.is_primary():
        return LoggerGroup()
    named = [LOGGERS[name](workdir, first_step, config) for name in config.loggers]
    return LoggerGroup([*named, *(make_loggers(workdir, first_step, config) if make_loggers else ())])


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield (name, number) for the numbers of a record, with names such as "eval/loss".

    A measure of the probe yields the median of each layer, as "probe/MEASURE/layer_00". None and texts are left out.
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            medians = [(i, median) for i, median in enumerate(value["median"]) if median is not None]
            yield from ((f"{kind}/{name}/layer_{i:02d}", median) for i, median in medians)
        elif isinstance(value, int | float):
            yield f"{kind}/{name}", value


def _draw_probe(values: Mapping[str, Any], step: int) -> np.ndarray | None:
    """Draw a probe's record as an image, height width 3; None if no measure has a plot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and needed only here

    from leanformer.conditioning import charts, tables

    figure = charts.plot_by_layer(tables.from_record(values), f"step {step}")
    if figure is None:
        return None
    figure.set_dpi(100)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
