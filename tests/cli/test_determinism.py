"""config.deterministic: sets its XLA flag before any device is initialised, or refuses the run."""

import os

import jax
import pytest
from commands import command, run
from messages import refuses
from small_runs import make_small_config

from leanformer.cli import DETERMINISTIC as FLAG
from leanformer.cli import require_deterministic
from leanformer.train import train


@pytest.mark.parametrize(
    ("before", "after"),
    [("", f"{FLAG}=true"), ("--a=1 --b", f"--a=1 --b {FLAG}=true"), (FLAG, FLAG)],
)
def test_flag_is_added_once(monkeypatch, before, after):
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", before)
    for _ in range(2):
        require_deterministic(True)
        assert os.environ["XLA_FLAGS"] == after


def test_flag_that_comes_too_late_or_contradicts_is_refused(monkeypatch):
    jax.devices()
    for flags in ("", f"{FLAG}=false"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        require_deterministic(False)
        with refuses("deterministic", FLAG):
            require_deterministic(True)
        assert os.environ["XLA_FLAGS"] == flags


def test_train_from_python_refuses_what_the_command_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    jax.devices()
    for key, value in (("deterministic", True), ("log_every", 0)):
        c = make_small_config("points", tmp_path)
        c[key] = value
        with refuses(key):
            train(c, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_train_command_sets_flag_before_xla_starts(tmp_path):
    """XLA refuses unknown flags, so this also checks that XLA knows this flag."""
    status, out, err = run([*command("train", tmp_path / "run"), "--config.deterministic=True", "--dry_run"])
    assert status == 0 and f"{FLAG}=true" in out, err
