"""Stop requests by signals: immediate in one process, at the same call in several processes."""

import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest
from messages import mentions
from processes import ROOT, find_free_port

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


PROGRAM = """
    import os, random, signal, sys, time
    from leanformer.runtime import distributed
    from leanformer.runtime import multihost
    from leanformer.runtime.stopping import StopRequest
    distributed.start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    generator, send_after = random.Random(multihost.index()), float(sys.argv[-1])
    begin = time.monotonic()
    with StopRequest() as stop:
        calls = 0
        while calls < 4000:
            calls += 1
            if stop.now():
                break
            if send_after and time.monotonic() - begin > send_after:
                send_after = 0
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(generator.uniform(0, 0.01))
            if calls % 20 == 0:
                multihost.all_gather_host(calls)  # like a collective: no process runs far ahead
    distributed.finish(stop.status, failed=False)
    print(calls, stop.status, file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_processes_stop_at_the_same_call(tmp_path):
    """Three processes pause at random between collectives; one, then the other two, then one of these get a signal."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    delay, port = random.Random(0).uniform(0.5, 1.0), find_free_port()
    for signalled in ({2}, {0, 1}, {1}):
        command = [sys.executable, str(tmp_path / "program.py"), f"localhost:{port}", "3"]
        running = [
            subprocess.Popen(
                [*command, str(i), str(delay if i in signalled else 0)],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(3)
        ]
        errors = [process.communicate(timeout=100)[1].strip().splitlines() for process in running]
        assert [process.returncode for process in running] == [0, 0, 0], errors
        last = {lines[-1] for lines in errors}
        assert len(last) == 1 and last.pop().endswith(" 75"), errors
