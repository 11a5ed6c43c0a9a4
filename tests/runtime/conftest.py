"""Signals as in a terminal, for tests of stop requests."""

import signal

import pytest


@pytest.fixture
def not_under_nohup():
    """Let SIGHUP end a process, which one under nohup ignores, and so do its children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
