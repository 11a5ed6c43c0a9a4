"""Simulated power cut: training in the process of the test that ends abruptly."""

import contextlib

import pytest

from leanformer.training.timer import Timer


@contextlib.contextmanager
def simulate_power_cut(monkeypatch, steps):
    """Abort training inside the block, after `steps` steps of this process and before the next."""
    begin_step, remaining = Timer.begin_step, iter(range(steps))

    def cut(timer, step):
        if next(remaining, None) is None:
            raise RuntimeError("power cut")
        begin_step(timer, step)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Timer, "begin_step", cut)
        yield
