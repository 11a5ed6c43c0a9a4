"""Experiment trackers as loggers: Weights & Biases, MLflow and Trackio. Their packages are extras of the same names.

A run of leanformer is one run of the tracker, also if training was interrupted: its id is in the workdir.
"""

import importlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer.runtime import files


PROJECT = "leanformer"  # default name of the project or experiment


class WeightsAndBiases:
    """Run of Weights & Biases in the project $WANDB_PROJECT, by default "leanformer"; it resumes when training resumes.

    With WANDB_MODE=offline its files are in WORKDIR/wandb, for `wandb sync`.

    Args:
        workdir: folder of the run.
        start: step from which training starts; unused.
        config: flat config, values by dotted key.
    """

    def __init__(self, workdir: Path, start: int, config: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=workdir.name,
            dir=str(workdir),
            id=_load_or_make_id(workdir / "wandb.json"),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),  # the output of the run is not sent
        )

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Send the numbers of a record, named by `scalars`; arguments as in `loggers.Logger.log`."""
        self._run.log(dict(scalars(kind, values)), step=step)

    def close(self) -> None:
        """Finish the tracker's run."""
        self._run.finish()


class MLflow:
    """Run of MLflow in the experiment $MLFLOW_EXPERIMENT_NAME, by default "leanformer"; it resumes with the training.

    Records go to the server or database $MLFLOW_TRACKING_URI, by default to the database WORKDIR/mlflow.db, which
    `mlflow ui --backend-store-uri=sqlite:///WORKDIR/mlflow.db` shows. The small package mlflow-skinny can only write
    to servers.

    Args:
        workdir: folder of the run.
        start: step from which training starts; unused.
        config: flat config, values by dotted key.
    """

    def __init__(self, workdir: Path, start: int, config: Mapping[str, Any]):
        mlflow, name = importlib.import_module("mlflow"), workdir / "mlflow.json"
        self._entities = importlib.import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(workdir / 'mlflow.db').absolute()}")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if name.is_file():
            self._id = files.read_json(name)
            self._client.update_run(self._id, status="RUNNING")
            return
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else self._client.create_experiment(title)
        self._id = self._client.create_run(number, run_name=workdir.name).info.run_id
        self._client.log_batch(
            self._id, params=[self._entities.Param(key, str(value)) for key, value in config.items()]
        )
        files.write_json(name, self._id)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Send the numbers of a record, named by `scalars`; arguments as in `loggers.Logger.log`."""
        now = round(1000 * time.time())
        metrics = [self._entities.Metric(key, value, now, step) for key, value in scalars(kind, values)]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Finish the tracker's run."""
        self._client.set_terminated(self._id)


class Trackio:
    """Run of Trackio in the project $TRACKIO_PROJECT, by default "leanformer"; it resumes when training resumes.

    Records go to the database of the project in $TRACKIO_DIR, which `trackio show --project leanformer` displays.
    The name of the run is that of the workdir with an id, since Trackio identifies runs by their names.

    Args:
        workdir: folder of the run.
        start: step from which training starts; unused.
        config: flat config, values by dotted key.
    """

    def __init__(self, workdir: Path, start: int, config: Mapping[str, Any]):
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{workdir.name}-{_load_or_make_id(workdir / 'trackio.json')}",
            resume="allow",
            config=dict(config),
            embed=False,
        )

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Send the numbers of a record, named by `scalars`; arguments as in `loggers.Logger.log`."""
        self._run.log(dict(scalars(kind, values)), step=step)

    def close(self) -> None:
        """Finish the tracker's run."""
        self._run.finish()


def _load_or_make_id(path: Path) -> str:
    """Return the id of a tracker's run from a file of the workdir, which is written if it does not exist."""
    if not path.is_file():
        files.write_json(path, uuid.uuid4().hex[:12])
    return files.read_json(path)


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield (name, number) for the numbers of a record, with names such as "eval/loss".

    A measure of the probe yields the median of each layer, as "probe/MEASURE/layer_00". None and texts are left out.

    Args:
        kind: kind of the record.
        values: values of the record by name.
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            medians = [(i, median) for i, median in enumerate(value["median"]) if median is not None]
            yield from ((f"{kind}/{name}/layer_{i:02d}", median) for i, median in medians)
        elif isinstance(value, int | float):
            yield f"{kind}/{name}", value
