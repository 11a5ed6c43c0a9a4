"""A run that ends at once, as in a power cut, in the process of the test."""

import contextlib

import pytest

from leanformer.training.timer import Timer


@contextlib.contextmanager
def power_cut(monkeypatch, steps):
    """Cut off training inside, before the step after so many steps of this process."""
    begin_step, left = Timer.begin_step, iter(range(steps))

    def cut(timer, step):
        if next(left, None) is None:
            raise RuntimeError("power cut")
        begin_step(timer, step)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Timer, "begin_step", cut)
        yield
