"""Loggers: TensorBoard, Weights & Biases after a resume, charts of the probe, and a logger that fails."""

import functools
import json
import sys
import types

import jax
import numpy as np
import pytest
from messages import mentions, refuses
from tensorboardX.proto.event_pb2 import Event

from leanformer import conditioning, config
from leanformer.training import loggers, run_files, step


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
    return run_files.Recorder(
        folder, start=start, total=9, make_logger=functools.partial(loggers.start, c, folder, start)
    )


def test_tensorboard_has_numbers_and_config(tmp_path, tiny, probe_result):
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


class Failing:
    """Logger that raises at its second record."""

    def __init__(self):
        self.logged = []

    def log(self, step, kind, values):
        self.logged.append(step)
        if len(self.logged) == 2:
            raise SystemError("broken")

    def close(self):
        raise AssertionError("a dropped logger is not closed")


def test_logger_that_fails_is_dropped_with_one_warning(tmp_path, tiny, capsys):
    failing = Failing()
    tiny.loggers = ()
    group = loggers.start(tiny, tmp_path, 0, lambda workdir, first_step, config: [failing])
    with run_files.Recorder(tmp_path, start=0, total=9, make_logger=lambda: group) as record:
        for at in (1, 2, 3):
            record.write(at, "train", {"loss": 1.0})
    assert failing.logged == [1, 2]
    assert mentions(capsys.readouterr().err, "Failing", "broken")
    assert [r["step"] for r in run_files.read_records(tmp_path)] == [1, 2, 3]


def test_unknown_logger_is_refused(tiny):
    tiny.loggers = ("tensorbord",)
    with refuses("loggers", "tensorbord", "tensorboard", "wandb"):
        config.check_keys(tiny)


class FakeWandb(types.ModuleType):
    """W&B's rule: rows go to an internal step, one per call; a row with an explicit step below the last is dropped."""

    def __init__(self):
        super().__init__("wandb")
        self.ids, self.rows, self.axes, self.last = [], [], {}, -1
        self.Settings = dict

    def init(self, *, id, resume, **_):
        assert resume == "allow"
        self.ids.append(id)
        return self

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        step = self.last + 1 if step is None else step
        if step >= self.last:
            self.rows.append(values)
            self.last = step

    def finish(self):
        pass


def test_weights_and_biases_keeps_the_records_after_a_resume(tmp_path, tiny, monkeypatch):
    """A run that was killed after step 35 resumes at step 20: its new records from 21 on are not dropped."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tiny.loggers = ("wandb",)
    for start, steps, loss in ((0, range(5, 36, 5), 1.0), (20, range(25, 61, 5), 2.0)):
        with make_recorder(tmp_path, tiny, start) as record:
            for at in steps:
                record.write(at, "train", {"loss": loss})
    assert wandb.axes["*"] == "step"  # the chart's x-axis
    assert [row["step"] for row in wandb.rows if row["train/loss"] == 2.0] == [*range(25, 61, 5)]
    assert wandb.ids == [json.loads((tmp_path / "wandb.json").read_text())] * 2
