"""Receivers of a run's records in addition to metrics.jsonl: console, TensorBoard, Weights & Biases, or your own.

The config key `loggers` names entries of LOGGERS. A config file adds its own with a function `make_loggers`:

    def make_loggers(workdir, first_step, config):
        return [Console()]  # an object with `log` and `close`, see `Logger`
"""

import importlib
import os
import statistics
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tqdm

from leanformer.conditioning.spectrum import FLOOR, beyond_float32
from leanformer.config import iterate_keys
from leanformer.errors import first_line
from leanformer.runtime import files
from leanformer.text import format_duration, format_value, lookup, wrap


UNSAID = ("wall_s", "examples_seen", "tokens_seen", "examples")  # numbers that are not printed
NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps a name and its number in one line
WAITING = 0.1  # smallest fraction of time spent waiting for data that is printed


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
    """Event file in WORKDIR/tensorboard: config and scalars. Events after `first_step` are dropped."""

    def __init__(self, workdir: Path, first_step: int, config: Any):
        from tensorboardX import SummaryWriter  # needed only here

        folder = workdir / "tensorboard"
        purge = first_step and first_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge if any(folder.glob("*")) else None)
        lines = "".join(f"    {key} = {value}\n" for key, value in iterate_keys(config))
        self._writer.add_text("config", lines, first_step)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        for name, value in scalars(kind, values):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
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
        self._run.log({"step": step, **dict(scalars(kind, values))})

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[[Path, int, Any], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class LoggerGroup:
    """Several loggers as one. A logger that raises is dropped with one warning, so that it cannot end training."""

    def __init__(self, loggers: Sequence[Logger] = ()):
        self._loggers = list(loggers)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        for logger in [*self._loggers]:
            self._call(logger, lambda logger=logger: logger.log(step, kind, values))

    def close(self) -> None:
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
    """Return the loggers that a config names, and what `make_loggers` returns, as one."""
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


class Progress:
    """Console output of a run from step `start` to `total`: a progress bar on a terminal, else one line per record."""

    def __init__(self, *, start: int, total: int):
        self._total = total
        self._first: tuple[int, float] | None = None  # step and wall_s of the first line
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(total=total, initial=start, unit="step", dynamic_ncols=True) if terminal else None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def print(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Print a record as a line; on a terminal, train records are shown beside the progress bar instead."""
        if kind == "train":
            heading, parts = [], _format_train(values)
        elif kind == "probe":
            heading, parts = ["probe, medians over layers:"], _format_probe(values)
        else:
            shown = {name: value for name, value in values.items() if name not in UNSAID}
            heading = [kind]
            parts = [f"{lookup(name).label} {format_value(name, x)}" for name, x in shown.items()]
        if self._bar is not None and kind == "train":
            self._bar.set_postfix_str("  ".join(parts))
            return
        if kind == "train":
            parts += self._estimate(step, values)
        parts = [part.replace(" ", NO_BREAK) for part in (f"step {step}/{self._total}", *heading, *parts)]
        line = wrap("  ".join(parts), indent="    ").replace(NO_BREAK, " ")
        print(line, flush=True) if self._bar is None else self._bar.write(line)

    def _estimate(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Return the time left, from the speed since the first line, before which programs are compiled."""
        if "wall_s" not in values:
            return []
        begun, then = self._first = self._first or (step, values["wall_s"])
        pace = (values["wall_s"] - then) / max(step - begun, 1)
        return [f"{format_duration(pace * (self._total - step))} left"] if step > begun else []


def _format_train(values: Mapping[str, Any]) -> list[str]:
    parts = [f"loss {format_value('loss', values['loss'])}"]
    if (speed := values.get("examples_per_s")) is not None:
        parts.append(f"{f'{speed:.3g}' if speed < 100 else f'{speed:,.0f}'} examples/s")
    if values.get("skipped"):
        parts.append(f"{lookup('skipped').label} {values['skipped']:g}")
    if (values.get("data_wait") or 0) >= WAITING:
        parts.append(f"{lookup('data_wait').label} {values['data_wait']:.0%}")
    return parts


def _format_probe(values: Mapping[str, Any]) -> list[str]:
    """Return one number per measure; metrics.jsonl, TensorBoard and `probe` have the layers."""
    parts = []
    for name, measure in values.items():
        medians = [median for median in measure["median"] if median is not None]
        part = f"{name.replace('_', ' ')} {format_value(name, statistics.median(medians) if medians else None)}"
        if "singular" in measure:
            part = f"κ of {part}"
            if singular := sum(median >= 0.99 / FLOOR for median in medians):
                part += f" ({beyond_float32(singular, len(measure['median']))})"
        parts.append(part)
    return parts
