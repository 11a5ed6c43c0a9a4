"""Stop requests by signals: immediate in one process, at the same call in several processes."""

import os
import signal

import pytest
from messages import mentions

from leanformer.runtime.stopping import Stopped, StopRequest


@pytest.fixture(autouse=True)
def not_under_nohup():
    """Let SIGHUP end a process, which one under nohup ignores, and so do its children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_signal_stops_at_the_next_call(number, status, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.now() and stop.status == 0
        os.kill(os.getpid(), number)
        assert stop.now() and stop.now() and stop.status == status
        assert mentions(capfd.readouterr().err, signal.Signals(number).name)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signal_that_the_parent_ignores_stops_no_run(number):
    """nohup ignores SIGHUP, and a sweep SIGINT: two Ctrl-C would end its runs without saving."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert not stop.now()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_second_ctrl_c_interrupts_at_once():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_iteration_ends_at_a_stop_request():
    items, feed_calls = [], []
    with StopRequest() as stop, pytest.raises(Stopped):
        for item in stop.during(range(5), feed=feed_calls.append):
            items.append(item)
            if item == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    assert items == [0, 1, 2] and len(feed_calls) == 3
