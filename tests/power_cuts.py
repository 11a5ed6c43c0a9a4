"""A run that ends without a word, as by a power cut, in the process of the test."""

import contextlib

import pytest

from leanformer.training import streams


@contextlib.contextmanager
def power_cut(monkeypatch, steps):
    """What trains inside is cut off when its batch after so many steps is due."""
    put, left = streams.put, iter(range(steps))

    def cut(model, host, names):
        if next(left, None) is None:
            raise RuntimeError("power cut")
        return put(model, host, names)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(streams, "put", cut)
        yield
