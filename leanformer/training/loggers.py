"""Where a run's records go besides metrics.jsonl: TensorBoard, Weights & Biases, and whatever has `log` and `close`.

A logger is made from the run's folder, the step that training starts from and the config, flat, by `LOGGERS[name]`; the
config's key `loggers` names those of a run. One more is a class of ten lines and a name in LOGGERS.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from leanformer.conditioning import tables
from leanformer.config import key_docs
from leanformer.errors import ConfigError, first_line
from leanformer.runtime import files, peers


@runtime_checkable
class Logger(Protocol):
    """Takes the records of a run, in process 0. It may raise what it likes, see `Several`."""

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One record: "train", "eval" ("eval NAME" of eval.more), "probe" or "abort", with numbers by name; of a
        probe's measures {figure: [one a layer]}. None is a number that was not finite."""

    def close(self) -> None:
        """The run ends, however it ends."""


class TensorBoard:
    """Event files in WORKDIR/tensorboard: numbers, the config as text, hyperparameters beside what evaluations found,
    and the probe's conditioning by layer as an image."""

    def __init__(self, workdir: Path, start: int, config: Mapping[str, Any]):
        self._config = {key: x if isinstance(x, bool | int | float | str) else str(x) for key, x in config.items()}
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1 if start else None)
        self._board.add_text("config", "".join(f"    {key} = {value}\n" for key, value in config.items()), start)
        self._compared = False

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        found = dict(scalars(kind, values))
        for name, value in found.items():
            self._board.add_scalar(name, value, step)
        if kind == "probe" and (figure := _chart(values, step)):
            self._board.add_image("probe/conditioning", pixels(figure), step, dataformats="HWC")
        if kind == "eval" and not self._compared:
            for summary in hparams(self._config, found):
                self._board.file_writer.add_summary(summary)
            self._compared = True
        self._board.flush()

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """A run of Weights & Biases, in the project $WANDB_PROJECT or "leanformer", that goes on when training does; with
    WANDB_MODE=offline its files are in WORKDIR/wandb, for `wandb sync`."""

    def __init__(self, workdir: Path, start: int, config: Mapping[str, Any]):
        wandb, name = importlib.import_module("wandb"), workdir / "wandb.json"
        if not name.is_file():
            files.write_json(name, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "leanformer"),
            name=workdir.name,
            dir=str(workdir),
            id=files.read_json(name),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),  # what a run prints stays its own
        )

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(kind, values)), step=step)

    def close(self) -> None:
        self._run.finish()


class Several:
    """Loggers by name as one, which never raises: one of them that does is told once and left out from then on."""

    def __init__(self, make: Mapping[str, Callable[[], Logger]]):
        self._loggers: dict[str, Logger] = {}
        for name, of_it in make.items():
            with self._left_out(name):
                self._loggers[name] = of_it()

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        for name, logger in [*self._loggers.items()]:
            with self._left_out(name):
                logger.log(step, kind, values)

    def close(self) -> None:
        for name, logger in [*self._loggers.items()]:
            with self._left_out(name):
                logger.close()

    @contextlib.contextmanager
    def _left_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a service or its package makes of it: no run ends by that
            self._loggers.pop(name, None)
            said = f"{type(error).__name__}: {first_line(error)}"
            print(f"*** THE LOGGER {name} FAILED AND IS LEFT OUT: {said}", file=sys.stderr, flush=True)


LOGGERS: dict[str, Callable[[Path, int, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check(names: tuple[str, ...]) -> None:
    """Raises ConfigError for a logger that is unknown, or whose package is not here."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f'loggers={names}: "{name}" is no logger. Known: {", ".join(LOGGERS)}.')
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"loggers={names} needs the package wandb: pip install 'leanformer[wandb]'.")


def start(c: Any, workdir: Path, step: int) -> Several:
    """The loggers of a config; none but in process 0, which writes."""
    flat = dict(key_docs.flat(c))
    return Several({name: functools.partial(LOGGERS[name], workdir, step, flat) for name in c.loggers if peers.first()})


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """The numbers of a record as kind/name; of a probe's measure the median of each layer."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            medians = [(i, median) for i, median in enumerate(value["median"]) if median is not None]
            yield from ((f"{kind}/{name}/layer_{i:02d}", median) for i, median in medians)
        elif isinstance(value, int | float):
            yield f"{kind}/{name}", value


def _chart(values: Mapping[str, Any], step: int) -> Any:
    """The figure of a probe's record; None where no measure has one."""
    from leanformer.conditioning import charts  # with matplotlib, slow to import, and needed here alone

    return charts.by_layer(tables.recorded(values), f"step {step}")


def pixels(figure: Any) -> np.ndarray:
    """A figure as an image, height width 3."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=100)
        return np.asarray(Image.open(file).convert("RGB"))
