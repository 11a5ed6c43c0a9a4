"""Experiment trackers: records and run ids that they receive, through fakes of their packages."""

import sys
import types

import pytest
from messages import refuses

from leanformer.training import loggers, metrics_log


def write_records(folder, c):
    """Write two records, and a third after an interruption, to the loggers of a config."""
    for start, records in ((0, ((0, "probe", PROBE), (2, "train", TRAIN))), (2, ((4, "eval mm", EVAL),))):
        logger = loggers.start(c, folder, start)
        with metrics_log.Recorder(folder, start=start, total=9, logger=logger) as recorder:
            for record in records:
                recorder.write(*record)


PROBE, TRAIN, EVAL = {"tokens": {"median": [3.0, None]}}, {"loss": 1.5, "lr": float("inf")}, {"top1": 0.5}
RECORDS = [(0, {"probe/tokens/layer_00": 3.0}), (2, {"train/loss": 1.5}), (4, {"eval mm/top1": 0.5})]


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a fake package."""

    def install_fake(name, **contents):
        package = types.ModuleType(name)
        package.__dict__.update(contents)
        package.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, package)

    return install_fake


class FakeMlflowClient:
    """Database of MLflow with at most one experiment and one run."""

    def __init__(self):
        self.uris, self.experiment, self.runs, self.params, self.metrics, self.status = set(), None, [], {}, [], []

    def __call__(self, tracking_uri):
        self.uris.add(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        return self.experiment

    def create_experiment(self, name):
        self.experiment = types.SimpleNamespace(experiment_id=name)
        return name

    def create_run(self, experiment, run_name):
        self.runs.append((experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"id{len(self.runs)}"))

    def update_run(self, run_id, status):
        self.status.append((run_id, status))

    def log_batch(self, run_id, metrics=(), params=()):
        assert run_id == "id1"
        self.params |= dict(params)
        if metrics:
            (step,) = {step for *_, step in metrics}
            self.metrics.append((step, {key: value for key, value, *_ in metrics}))

    def set_terminated(self, run_id):
        self.status.append((run_id, "FINISHED"))


def test_mlflow_gets_every_record_and_one_run_for_all_attempts(tmp_path, tiny, install, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = FakeMlflowClient()
    install("mlflow", MlflowClient=client)
    install("mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    tiny.loggers = ("mlflow",)
    loggers.check(tiny.loggers)
    write_records(tmp_path, tiny)
    assert client.metrics == RECORDS
    assert client.runs == [("leanformer", tmp_path.name)] and client.params["optim.lr"] == "0.003"
    assert client.status == [("id1", "FINISHED"), ("id1", "RUNNING"), ("id1", "FINISHED")]
    assert client.uris == {f"sqlite:///{tmp_path}/mlflow.db"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_gets_every_record_and_one_run_for_all_attempts(name, tmp_path, tiny, install):
    started, logged, finished = [], [], []

    def init(**options):
        started.append(options)
        log = lambda values, step: logged.append((step, values))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: finished.append(True))

    install(name, init=init, Settings=dict)
    tiny.loggers = (name,)
    loggers.check(tiny.loggers)
    write_records(tmp_path, tiny)
    assert logged == RECORDS and len(finished) == 2 and not (tmp_path / "tensorboard").exists()
    first, second = started
    assert first["resume"] == "allow" and first["config"]["optim.lr"] == 0.003
    assert first["name"] == second["name"] and first["name"].startswith(tmp_path.name)
    if name == "wandb":
        assert first["id"] == second["id"] and len(first["id"]) == 12 and first["dir"] == str(tmp_path)
    else:
        assert first["name"] != tmp_path.name


@pytest.mark.parametrize("name", loggers.OPTIONAL_PACKAGES)
def test_trackers_without_their_packages_are_refused(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with refuses("loggers", name, f"'.[{name}]'"):
        loggers.check((name,))
