"""Stop signals, in one process and in one of two, and hangs in every phase of a run."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from commands import ROOT
from messages import mentions
from processes import find_free_port, make_environment, wait_for_processes

from leanformer import train
from leanformer.runtime import timing
from leanformer.training import run_files
from leanformer.training.checkpoint import steps_in


# The phase in which the signal comes, from step 2 on, and the step of the saved state: the next step that ends.
PHASES = {"data wait": 2, "evaluation": 2, "probe": 3, "checkpoint": 3}
PROGRAM = """
import os, sys
sys.path.insert(0, "tests/training")
from test_stops import signal_in
from leanformer import cli, train
if sys.argv.pop(1) == sys.argv[-1]:  # this process gets the signal
    signal_in(os.environ["PHASE"])
cli.run(train.main)
"""


def signal_in(phase, patch=setattr):
    """Send SIGTERM to this process when a phase begins for the first time after step 1."""
    original, sent = timing.Timer.__call__, []

    def call(self, name):
        step = self.activity.step or 0
        if name == phase and not sent and step >= 2:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, name)

    patch(timing.Timer, "__call__", call)
    return sent


@pytest.fixture
def short(plain):
    plain.update(total_steps=6, log_every=1)
    plain.eval.every = plain.probe.every = 2
    plain.checkpoint.every, plain.optim.ema, plain.eval.examples = 3, 0.0, 64
    return plain


# Between two steps, as in a checkpoint; with two processes all phases are tested below.
SLOW = {"data wait", "evaluation", "probe"}
SIGNALLED = [pytest.param(phase, marks=[pytest.mark.slow] * (phase in SLOW)) for phase in PHASES]


@pytest.mark.parametrize("phase", SIGNALLED)
def test_signal_in_any_phase_saves_and_resumes(phase, short, tmp_path, monkeypatch, one_device, capsys):
    sent = signal_in(phase, monkeypatch.setattr)
    assert train.train(short, tmp_path) == 75 and len(sent) == 1
    steps = steps_in(tmp_path / "checkpoints")
    assert max(steps, default=None) == PHASES[phase] and mentions(capsys.readouterr().err, "SIGTERM")
    assert train.train(short, tmp_path) == 0
    records = run_files.read_records(tmp_path / "metrics.jsonl")
    for kind, expected in (("train", range(1, 7)), ("eval", (2, 4, 6)), ("probe", (0, 2, 4, 6))):
        assert [record["step"] for record in records if record["kind"] == kind] == [*expected], kind


@pytest.mark.parametrize("phase", ["restore", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_hang_in_any_phase_is_ended(phase, short, tmp_path, monkeypatch, one_device):
    """Here the watchdog, which ends the process, ends the hang."""
    short.hang_seconds, found, go_on, original = 0.5, [], threading.Event(), timing.Timer.touch

    def touch(self, name):
        original(self, name)
        if name == phase and not go_on.is_set():
            assert go_on.wait(60)
            raise ZeroDivisionError  # in place of the end of the process

    def give_up(message):
        if mentions(message, phase):
            found.append(message)
            go_on.set()

    monkeypatch.setattr(timing.Timer, "touch", touch)
    monkeypatch.setattr(timing, "give_up", give_up)
    monkeypatch.setattr(timing, "TICK", 0.1)
    with pytest.raises(ZeroDivisionError):
        train.train(short, tmp_path)
    assert mentions(found[0], phase)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_signal_to_one_of_two_processes_saves_in_any_phase(phase, tmp_path, cache):
    keys = {"total_epochs": 0.0, "total_steps": 200, "batch_size": 32, "log_every": 1, "model.width": 24}
    keys |= {"model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "optim.warmup_epochs": 0.0}
    keys |= {"eval.every": 2, "eval.batch_size": 500, "eval.examples": 500, "probe.every": 2, "probe.examples": 4}
    keys |= {"checkpoint.every": 3}
    words = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", f"--coordinator=localhost:{find_free_port()}"]
    words += [*(f"--config.{key}={value}" for key, value in keys.items()), "--processes=2"]
    environ = make_environment(cache) | {
        "PHASE": phase,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--process=1", *words, f"--process={i}"],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    statuses, _, err = wait_for_processes(running)
    assert statuses == [75, 75], err
    assert 2 <= max(steps_in(tmp_path / "checkpoints")) <= 60
