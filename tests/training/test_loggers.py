"""Where records go: what TensorBoard and Weights & Biases are given, charts of the probe, and loggers that fail."""

import contextlib
import errno
import io
import os
import resource
import sys
import threading
import time
import types

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
def probed(rng):
    """What a probe of three layers finds, and its record."""
    x = rng.standard_normal((L, B, T, W)).astype(np.float32)
    result = {"tokens": (conditioning.singular_values(x), conditioning.condition(x))}
    entropy = conditioning.Reading(np.full((L, B), 2.0, np.float32), np.ones((L, B), bool))
    summaries = {"tokens": result["tokens"][1], "attention_entropy": entropy}
    return jax.device_get(result), step.probe_record(summaries)


def events(folder):
    """Everything in a run's event files, by tag."""
    result = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        raw = path.read_bytes()
        while raw:  # length (8), its checksum (4), event, its checksum (4)
            length = int.from_bytes(raw[:8], "little")
            event = Event.FromString(raw[12 : 12 + length])
            result |= {value.tag: (event.step, value) for value in event.summary.value}
            raw = raw[16 + length :]
    return result


def recorder(folder, c, start=0):
    return metrics_log.Recorder(folder, start=start, total=9, logger=loggers.start(c, folder, start))


def test_tensorboard_has_numbers_config_hyperparameters_and_charts(tmp_path, tiny, probed):
    with recorder(tmp_path, tiny) as record:
        record.write(0, "probe", probed[1])
        record.write(2, "train", {"loss": 1.5, "lr": float("nan")})
        record.write(3, "eval", {"top1": 0.25})
        record.write(6, "eval", {"top1": 0.5})
    result = events(tmp_path)
    numbers = {tag: (at, value.simple_value) for tag, (at, value) in result.items() if value.HasField("simple_value")}
    medians = [layer["median"] for layer in conditioning.digest(probed[0]["tokens"][1])]
    assert {tag: x for tag, x in numbers.items() if "layer" not in tag} == {
        **{"train/loss": (2, 1.5), "eval/top1": (6, 0.5)}
    }
    np.testing.assert_allclose([numbers[f"probe/tokens/layer_{i:02d}"][1] for i in range(L)], medians, rtol=1e-6)

    (text,) = result["config/text_summary"][1].tensor.string_val
    assert "    optim.lr = 0.003\n" in text.decode() and "    data.mean = (0.5,)\n" in text.decode()

    begun = result["_hparams_/session_start_info"][1].metadata.plugin_data.content
    given = HParamsPluginData.FromString(begun).session_start_info.hparams
    assert given["optim.lr"].number_value == 0.003 and given["model.name"].string_value == "vit"
    assert given["data.mean"].string_value == "(0.5,)" and given["model.distilled"].bool_value is False
    listed = result["_hparams_/experiment"][1].metadata.plugin_data.content
    metrics = HParamsPluginData.FromString(listed).experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["eval/top1"]

    at, image = result["probe/conditioning"]
    picture = np.asarray(Image.open(io.BytesIO(image.image.encoded_image_string)))
    assert at == 0 and picture.shape[2] == 3 and picture.std() > 10  # drawn, not blank


def test_a_record_is_drawn_as_the_probe_command_draws(probed):
    result, record = probed
    entries, _ = tables.describe(result)
    drawn = [charts.plot_by_layer(measures) for measures in (entries, tables.from_record(record))]
    one, other = ([line.get_ydata() for line in figure.axes[0].lines] for figure in drawn)
    assert len(one) == len(other) == 2  # medians, and the Gaussian's
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_has_a_plot_of_condition_numbers_over_steps(tmp_path, probed):
    record = probed[1]
    result = [{"step": at, "kind": "probe", **record} for at in (0, 4)]
    assert [path.name for path in plots.plot_run(result, tmp_path)] == ["conditioning.png"]
    old = {name: {key: x for key, x in figures.items() if key != "shape"} for name, figures in record.items()}
    assert plots.plot_run([{"step": 0, "kind": "probe", **old}], tmp_path / "old") == []
    # The measures changed when the run went on: those of now are drawn, from the probes that have them.
    fewer = {"step": 8, "kind": "probe", "tokens": record["tokens"]}
    other = {"step": 2, "kind": "probe", "attention_branch": record["tokens"]}
    assert [path.name for path in plots.plot_run([other, *result, fewer], tmp_path)] == ["conditioning.png"]


@pytest.fixture
def wandb(monkeypatch):
    """Stands for the package, which is an optional one: what it was asked for."""
    asked = types.SimpleNamespace(begun=[], logged=[], ended=0)

    def init(**options):
        asked.begun.append(options)
        return types.SimpleNamespace(
            log=lambda values, step: asked.logged.append((step, values)),
            finish=lambda: setattr(asked, "ended", asked.ended + 1),
        )

    fake = types.ModuleType("wandb")
    fake.init, fake.Settings = init, lambda **options: options
    fake.__spec__ = types.SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return asked


def test_weights_and_biases_gets_every_record_and_one_run_for_all_attempts(tmp_path, tiny, wandb, probed):
    tiny.loggers = ("wandb",)
    loggers.check(tiny.loggers)
    with recorder(tmp_path, tiny) as record:
        record.write(0, "probe", {"tokens": {"median": [3.0, None]}})
        record.write(2, "train", {"loss": 1.5, "lr": float("inf")})
    with recorder(tmp_path, tiny, start=2) as record:
        record.write(4, "eval", {"top1": 0.5})
    assert wandb.logged == [(0, {"probe/tokens/layer_00": 3.0}), (2, {"train/loss": 1.5}), (4, {"eval/top1": 0.5})]
    assert wandb.ended == 2
    first, second = wandb.begun
    assert first["id"] == second["id"] and first["resume"] == "allow" and len(first["id"]) == 12
    assert first["config"]["optim.lr"] == 0.003 and first["dir"] == str(tmp_path)
    assert not (tmp_path / "tensorboard").exists()


class Loud:
    """A logger that raises in one of its three places."""

    def __init__(self, where, seen):
        self.where, self.seen = where, seen
        self.fail("make")

    def fail(self, where):
        if self.where == where:
            raise ConnectionError("the service is gone\nand more")
        self.seen.append(where)

    def log(self, step, kind, values):
        self.fail("log")

    def close(self):
        self.fail("close")


@pytest.mark.parametrize(("where", "before"), [("make", []), ("log", ["make"]), ("close", ["make", "log", "log"])])
def test_a_logger_that_raises_is_dropped_with_one_warning(where, before, tmp_path, capfd):
    seen, well = [], []
    made = {"loud": lambda: Loud(where, seen), "well": lambda: Loud("", well)}
    with metrics_log.Recorder(tmp_path, start=0, total=9, logger=loggers.Several(made)) as record:
        record.write(1, "train", {"loss": 1.0})
        record.write(2, "train", {"loss": 0.5})
    assert seen == before and well == ["make", "log", "log", "close"] and not loggers.stuck()
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and mentions(err, 'loggers="loud"', "ConnectionError")
    assert len(metrics_log.read_records(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("where", ["make", "log", "close"])
def test_a_logger_that_blocks_stops_neither_training_nor_its_end(where, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(loggers, "QUEUE_RECORDS", 3)
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.1)
    release, well = threading.Event(), []

    class Blocked(Loud):
        def fail(self, here):
            if here == where:
                release.wait()

    made = {"blocked": lambda: Blocked(where, []), "well": lambda: Loud("", well)}
    begun = time.monotonic()
    with metrics_log.Recorder(tmp_path, start=0, total=9, logger=loggers.Several(made)) as record:
        for step in range(2 if where == "close" else 9):
            record.write(step, "train", {"loss": 1.0})
            while well.count("log") <= step:  # the other one keeps up
                time.sleep(0.001)
    assert time.monotonic() - begun < 20 and loggers.stuck() == ["blocked"]
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and mentions(err, 'loggers="blocked"', 0.1 if where == "close" else 3)
    assert well[-1] == "close" and len(metrics_log.read_records(tmp_path / "metrics.jsonl")) == well.count("log")
    release.set()
    while loggers.stuck():
        time.sleep(0.001)
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def largest_file(size):
    """The kernel refuses to make a file longer, as a full disk does; the limit of a whole process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_event_file_without_room_ends_the_event_file_alone(tmp_path, tiny, probed, capfd):
    """tensorboardX's SummaryWriter blocks here for ever, after some ten records."""
    with largest_file(12_000), recorder(tmp_path, tiny) as record:  # less than one chart
        for step in range(20):
            record.write(step, "probe" if step == 0 else "train", probed[1] if step == 0 else {"loss": 1.0})
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and mentions(err, 'loggers="tensorboard"', "OSError", errno.EFBIG)
    assert [record["step"] for record in metrics_log.read_records(tmp_path / "metrics.jsonl")] == [*range(20)]


def test_metrics_without_room_end_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with (
        pytest.raises(OSError) as caught,
        largest_file(600),
        metrics_log.Recorder(tmp_path, start=0, total=9) as record,
    ):
        for step in range(20):
            record.write(step, "train", {"loss": 1.0})
    assert mentions(errors.user_message(caught.value), str(path), os.strerror(errno.EFBIG))
    written = path.read_bytes()
    assert len(written) == 600 and 0 < len(metrics_log.read_records(path)) == written.count(b"\n") < 20


def test_two_event_files_of_one_second_are_two(tmp_path, tiny):
    for start in (0, 2):
        with recorder(tmp_path, tiny, start) as record:
            record.write(start + 1, "train", {"loss": 1.0})
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2 and events(tmp_path)["train/loss"][0] == 3


def test_loggers_that_cannot_be_are_refused(monkeypatch):
    with refuses("loggers", "clearml"):
        loggers.check(("tensorboard", "clearml"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refuses("loggers", "wandb"):
        loggers.check(("wandb",))


def test_only_process_0_logs(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(loggers.multihost, "is_primary", lambda: False)
    loggers.start(tiny, tmp_path, 0).log(1, "train", {"loss": 1.0})
    assert not (tmp_path / "tensorboard").exists()
