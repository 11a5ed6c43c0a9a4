"""Lines about slow phases: the first line of a command before JAX is imported, and one line per slow phase."""

import subprocess
import sys
import time

import pytest
from commands import subprocess_environment
from messages import mentions

from leanformer.__main__ import COMMANDS
from leanformer.runtime import phases
from leanformer.training import run_files
from leanformer.training.timer import Timer


def test_only_a_slow_phase_is_announced_with_the_last_seconds(monkeypatch, capsys):
    monkeypatch.setattr(phases, "SLOW", 0.01)
    with phases.announce("Fast"):
        pass
    with phases.announce("Slow", 24.3):
        time.sleep(0.1)
    err = capsys.readouterr().err
    assert mentions(err, "Slow", "24 s") and "Fast" not in err and err.count("\n") == 1


def test_a_slow_first_item_is_announced_and_no_item_is_lost(monkeypatch, capsys):
    def items():
        for i in range(3):
            time.sleep(0.1)
            yield i

    monkeypatch.setattr(phases, "SLOW", 0.01)
    made = phases.announce_first(items(), "Compiling")
    assert capsys.readouterr().err == "Compiling.\n"
    assert [*made] == [0, 1, 2] and [*phases.announce_first(iter(()), "Fast")] == []
    assert capsys.readouterr().err == ""


def test_timer_announces_the_first_time_of_a_phase(monkeypatch, capsys):
    monkeypatch.setattr(phases, "SLOW", 0.01)
    timer = Timer()
    for _ in range(2):
        for phase in ("compile", "evaluation", "data wait"):
            with timer(phase):
                time.sleep(0.03)
    assert len(capsys.readouterr().err.splitlines()) == 2 and timer.compiled >= 0.03


def test_config_json_has_the_seconds_of_the_compilation(tmp_path, tiny):
    assert run_files.compiled_seconds(tmp_path) is None
    run_files.begin(tmp_path, tiny, 24.31)
    assert run_files.compiled_seconds(tmp_path) == 24.3


@pytest.mark.parametrize("name", ["train", "predict"])
def test_first_line_is_printed_before_jax_is_imported(name, tmp_path):
    (tmp_path / "jax.py").write_text("import os; os._exit(9)")
    words = {"train": ["--config=quickstart", "--workdir=run"], "predict": ["--workdir=run", "x.png"]}
    command = [sys.executable, "-m", *(("leanformer", name) if name in COMMANDS else (f"leanformer.{name}",))]
    command += words.get(name, [])
    environ = {name: value for name, value in subprocess_environment().items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 9 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
