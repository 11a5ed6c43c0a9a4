"""config.deterministic reaches XLA before any device is in use, or says that it cannot."""

import subprocess
import sys
from pathlib import Path

import pytest
from messages import refuses

from leanformer.runtime import determinism


@pytest.fixture
def idle(monkeypatch):
    """As if no device were in use yet."""
    monkeypatch.setattr(determinism, "backends_are_initialized", lambda: False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--xla_gpu_deterministic_ops=true"),
        ("--a=1 --b", "--a=1 --b --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=true", "--xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops"),
    ],
)
def test_the_flag_is_added_once(idle, monkeypatch, before, after):
    monkeypatch.setenv("XLA_FLAGS", before)
    determinism.require(True)
    assert determinism.os.environ["XLA_FLAGS"] == after
    determinism.require(True)
    assert determinism.os.environ["XLA_FLAGS"] == after


def test_nothing_changes_unasked(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    determinism.require(False)
    assert determinism.os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=false"


def test_a_contradiction_is_refused(idle, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with refuses("deterministic=True", "--xla_gpu_deterministic_ops=false"):
        determinism.require(True)


def test_too_late_is_refused(monkeypatch):
    monkeypatch.setattr(determinism, "backends_are_initialized", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "")
    with refuses("deterministic=True", "XLA_FLAGS"):
        determinism.require(True)


@pytest.mark.slow
def test_the_command_sets_it_in_time(tmp_path):
    """XLA refuses flags that it does not know, so this also says that it knows this one."""
    words = [
        sys.executable,
        "-m",
        "leanformer.train",
        "--config=configs/quickstart.py",
        f"--workdir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [*words, "--config.deterministic=True", "--dry_run"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "--xla_gpu_deterministic_ops=true" in done.stdout
