"""config.deterministic: sets its XLA flag before any device is initialised, or refuses the run."""

import jax
import pytest
from commands import command, run
from messages import refuses

from leanformer.runtime import startup


@pytest.fixture
def no_backend(monkeypatch):
    """Pretend that no device is initialised yet."""
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--xla_gpu_deterministic_ops=true"),
        ("--a=1 --b", "--a=1 --b --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=true", "--xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops"),
    ],
)
def test_flag_is_added_once(no_backend, monkeypatch, before, after):
    monkeypatch.setenv("XLA_FLAGS", before)
    startup.require_deterministic(True)
    assert startup.os.environ["XLA_FLAGS"] == after
    startup.require_deterministic(True)
    assert startup.os.environ["XLA_FLAGS"] == after


def test_flags_are_unchanged_without_deterministic(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    startup.require_deterministic(False)
    assert startup.os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=false"


def test_contradicting_xla_flag_is_refused(no_backend, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with refuses("deterministic=True", "--xla_gpu_deterministic_ops=false"):
        startup.require_deterministic(True)


def test_refused_after_devices_are_initialized(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with refuses("deterministic=True", "XLA_FLAGS"):
        startup.require_deterministic(True)


@pytest.mark.slow
def test_train_command_sets_flag_before_xla_starts(tmp_path):
    """XLA refuses unknown flags, so this also checks that XLA knows this flag."""
    status, out, err = run([*command("train", tmp_path / "run"), "--config.deterministic=True", "--dry_run"])
    assert status == 0 and "--xla_gpu_deterministic_ops=true" in out, err
