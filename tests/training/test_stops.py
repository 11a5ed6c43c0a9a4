"""Stop signals and hangs in the phases of a run; with two processes: tests/runtime/test_distributed.py."""

import os
import signal

import pytest
from messages import mentions

from leanformer import train
from leanformer.runtime import timing
from leanformer.training import run_files
from leanformer.training.checkpoint import steps_in


# The phase in which the signal comes, from step 2 on, and the step of the saved state: the next step that ends.
PHASES = {"data wait": 2, "evaluation": 2, "probe": 3, "checkpoint": 3}


def signal_in(phase, monkeypatch):
    """Send SIGTERM to this process when a phase begins for the first time after step 1."""
    original, sent = timing.Timer.__call__, []

    def call(self, name):
        step = self.activity.step or 0
        if name == phase and not sent and step >= 2:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, name)

    monkeypatch.setattr(timing.Timer, "__call__", call)
    return sent


@pytest.fixture
def short(plain):
    plain.update(total_steps=6, log_every=1)
    plain.eval.every = plain.probe.every = 2
    plain.checkpoint.every, plain.optim.ema, plain.eval.examples = 3, 0.0, 64
    return plain


@pytest.mark.parametrize("phase", [p if p == "checkpoint" else pytest.param(p, marks=pytest.mark.slow) for p in PHASES])
def test_signal_in_any_phase_saves_and_resumes(phase, short, tmp_path, monkeypatch, one_device, capsys):
    sent = signal_in(phase, monkeypatch)
    assert train.train(short, tmp_path, resume_command="train --again") == 75 and len(sent) == 1
    assert max(steps_in(tmp_path / "checkpoints"), default=None) == PHASES[phase]
    out, err = capsys.readouterr()
    assert mentions(out, f"step {PHASES[phase]}", "train --again") and mentions(err, "SIGTERM")
    assert train.train(short, tmp_path) == 0
    for kind, expected in (("train", range(1, 7)), ("eval", (2, 4, 6)), ("probe", (0, 2, 4, 6))):
        assert [record["step"] for record in run_files.read_records(tmp_path, kind)] == [*expected], kind
