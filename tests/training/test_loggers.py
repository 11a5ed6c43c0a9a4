"""Loggers: TensorBoard records, charts of the probe, and loggers that fail or block."""

import contextlib
import errno
import io
import os
import resource
import threading
import time

import jax
import numpy as np
import pytest
from messages import mentions, refuses
from PIL import Image
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from leanformer import conditioning, errors
from leanformer.conditioning import charts, tables
from leanformer.reports import plots
from leanformer.training import loggers, metrics_log, step


L, B, T, W = 3, 5, 7, 11


@pytest.fixture
def probe_result(rng):
    """The measurements of a probe of three layers, and their record."""
    x = rng.standard_normal((L, B, T, W)).astype(np.float32)
    result = {"tokens": (conditioning.singular_values(x), conditioning.condition(x))}
    entropy = conditioning.Reading(np.full((L, B), 2.0, np.float32), np.ones((L, B), bool))
    summaries = {"tokens": result["tokens"][1], "attention_entropy": entropy}
    return jax.device_get(result), step.probe_record(summaries)


def iterate_events(path):
    """Yield the events of an event file."""
    raw = path.read_bytes()
    while raw:  # length (8), its checksum (4), event, its checksum (4)
        length = int.from_bytes(raw[:8], "little")
        yield Event.FromString(raw[12 : 12 + length])
        raw = raw[16 + length :]


def read_events(folder):
    """Return step and value by tag from the event files of a run."""
    events = (event for path in sorted((folder / "tensorboard").iterdir()) for event in iterate_events(path))
    return {value.tag: (event.step, value) for event in events for value in event.summary.value}


def make_recorder(folder, c, start=0):
    return metrics_log.Recorder(folder, start=start, total=9, logger=loggers.start(c, folder, start))


def test_tensorboard_has_numbers_config_hyperparameters_and_charts(tmp_path, tiny, probe_result):
    with make_recorder(tmp_path, tiny) as record:
        record.write(0, "probe", probe_result[1])
        record.write(2, "train", {"loss": 1.5, "lr": float("nan")})
        record.write(3, "eval", {"top1": 0.25})
        record.write(6, "eval", {"top1": 0.5})
    result = read_events(tmp_path)
    numbers = {tag: (at, value.simple_value) for tag, (at, value) in result.items() if value.HasField("simple_value")}
    medians = [layer["median"] for layer in conditioning.digest(probe_result[0]["tokens"][1])]
    assert {tag: x for tag, x in numbers.items() if "layer" not in tag} == {
        **{"train/loss": (2, 1.5), "eval/top1": (6, 0.5)}
    }
    np.testing.assert_allclose([numbers[f"probe/tokens/layer_{i:02d}"][1] for i in range(L)], medians, rtol=1e-6)

    (text,) = result["config/text_summary"][1].tensor.string_val
    assert "    optim.lr = 0.003\n" in text.decode() and "    data.mean = (0.5,)\n" in text.decode()

    session = result["_hparams_/session_start_info"][1].metadata.plugin_data.content
    hparams = HParamsPluginData.FromString(session).session_start_info.hparams
    assert hparams["optim.lr"].number_value == 0.003 and hparams["model.name"].string_value == "vit"
    assert hparams["data.mean"].string_value == "(0.5,)" and hparams["model.distilled"].bool_value is False
    experiment = result["_hparams_/experiment"][1].metadata.plugin_data.content
    metrics = HParamsPluginData.FromString(experiment).experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["eval/top1"]

    at, image = result["probe/conditioning"]
    pixels = np.asarray(Image.open(io.BytesIO(image.image.encoded_image_string)))
    assert at == 0 and pixels.shape[2] == 3 and pixels.std() > 10  # drawn, not blank


def test_restart_from_scratch_drops_the_events_of_an_earlier_attempt(tmp_path, tiny):
    for _ in range(2):
        with make_recorder(tmp_path, tiny) as record:
            record.write(1, "train", {"loss": 1.5})
    files = sorted((tmp_path / "tensorboard").iterdir())
    starts = [[event.step for event in iterate_events(path) if event.HasField("session_log")] for path in files]
    assert starts == [[], [0]]


def test_chart_of_a_record_equals_that_of_the_probe_command(probe_result):
    result, record = probe_result
    entries, _ = tables.describe(result)
    figures = [charts.plot_by_layer(measures) for measures in (entries, tables.from_record(record))]
    first, second = ([line.get_ydata() for line in figure.axes[0].lines] for figure in figures)
    assert len(first) == len(second) == 2  # medians, and the Gaussian's
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_condition_numbers_are_plotted_over_steps(tmp_path, probe_result):
    record = probe_result[1]
    records = [{"step": at, "kind": "probe", **record} for at in (0, 4)]
    assert [path.name for path in plots.plot_run(records, tmp_path)] == ["conditioning.png"]
    old = {name: {key: x for key, x in values.items() if key != "shape"} for name, values in record.items()}
    assert plots.plot_run([{"step": 0, "kind": "probe", **old}], tmp_path / "old") == []
    # The measures changed when the run resumed: the current ones are drawn, from the probes that have them.
    fewer = {"step": 8, "kind": "probe", "tokens": record["tokens"]}
    other = {"step": 2, "kind": "probe", "attention_branch": record["tokens"]}
    assert [path.name for path in plots.plot_run([other, *records, fewer], tmp_path)] == ["conditioning.png"]


class FailingLogger:
    """Logger that raises in one of its three methods."""

    def __init__(self, where, calls):
        self.where, self.calls = where, calls
        self.fail("make")

    def fail(self, where):
        if self.where == where:
            raise ConnectionError("the service is gone\nand more")
        self.calls.append(where)

    def log(self, step, kind, values):
        self.fail("log")

    def close(self):
        self.fail("close")


@pytest.mark.parametrize(("where", "expected"), [("make", []), ("log", ["make"]), ("close", ["make", "log", "log"])])
def test_failing_logger_is_dropped_with_one_warning(where, expected, tmp_path, capfd):
    calls, healthy_calls = [], []
    factories = {"loud": lambda: FailingLogger(where, calls), "well": lambda: FailingLogger("", healthy_calls)}
    with metrics_log.Recorder(tmp_path, start=0, total=9, logger=loggers.Several(factories)) as record:
        record.write(1, "train", {"loss": 1.0})
        record.write(2, "train", {"loss": 0.5})
    assert calls == expected and healthy_calls == ["make", "log", "log", "close"] and not loggers.stuck()
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and mentions(err, 'loggers="loud"', "ConnectionError")
    assert len(metrics_log.read_records(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("where", ["make", "log", "close"])
def test_blocked_logger_delays_neither_training_nor_exit(where, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(loggers, "QUEUE_RECORDS", 3)
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.1)
    release, healthy_calls = threading.Event(), []

    class BlockedLogger(FailingLogger):
        def fail(self, method):
            if method == where:
                release.wait()

    factories = {"blocked": lambda: BlockedLogger(where, []), "well": lambda: FailingLogger("", healthy_calls)}
    start_time = time.monotonic()
    with metrics_log.Recorder(tmp_path, start=0, total=9, logger=loggers.Several(factories)) as record:
        for step in range(2 if where == "close" else 9):
            record.write(step, "train", {"loss": 1.0})
            while healthy_calls.count("log") <= step:  # the other logger keeps up
                time.sleep(0.001)
    assert time.monotonic() - start_time < 20 and loggers.stuck() == ["blocked"]
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and mentions(err, 'loggers="blocked"', 0.1 if where == "close" else 3)
    assert healthy_calls[-1] == "close"
    assert len(metrics_log.read_records(tmp_path / "metrics.jsonl")) == healthy_calls.count("log")
    release.set()
    while loggers.stuck():
        time.sleep(0.001)
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def limit_file_size(size):
    """Make the kernel refuse longer files in this process, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_stops_the_event_file_only(tmp_path, tiny, probe_result, capfd):
    """In this case tensorboardX's SummaryWriter blocks forever, after about ten records."""
    with limit_file_size(12_000), make_recorder(tmp_path, tiny) as record:  # less than one chart
        for step in range(20):
            record.write(step, "probe" if step == 0 else "train", probe_result[1] if step == 0 else {"loss": 1.0})
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and mentions(err, 'loggers="tensorboard"', "OSError", errno.EFBIG)
    assert [record["step"] for record in metrics_log.read_records(tmp_path / "metrics.jsonl")] == [*range(20)]


def test_full_disk_for_metrics_ends_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with (
        pytest.raises(OSError) as caught,
        limit_file_size(600),
        metrics_log.Recorder(tmp_path, start=0, total=9) as record,
    ):
        for step in range(20):
            record.write(step, "train", {"loss": 1.0})
    assert mentions(errors.user_message(caught.value), str(path), os.strerror(errno.EFBIG))
    content = path.read_bytes()
    assert len(content) == 600 and 0 < len(metrics_log.read_records(path)) == content.count(b"\n") < 20


def test_event_files_of_the_same_second_do_not_collide(tmp_path, tiny):
    for start in (0, 2):
        with make_recorder(tmp_path, tiny, start) as record:
            record.write(start + 1, "train", {"loss": 1.0})
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2 and read_events(tmp_path)["train/loss"][0] == 3


def test_unknown_logger_is_refused():
    with refuses("loggers", "clearml"):
        loggers.check(("tensorboard", "clearml"))


def test_only_process_0_logs(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(loggers.multihost, "is_primary", lambda: False)
    loggers.start(tiny, tmp_path, 0).log(1, "train", {"loss": 1.0})
    assert not (tmp_path / "tensorboard").exists()
