"""Signals become a wish to stop, in one process at once, in several at the same call in all."""

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from messages import mentions

from leanformer.runtime.interrupt import Stopped, StopRequest


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)]
)
def test_a_signal_stops_at_the_next_call(number, status, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.now() and stop.status == 0
        os.kill(os.getpid(), number)
        assert stop.now() and stop.now() and stop.status == status
        assert mentions(capfd.readouterr().err, signal.Signals(number).name)
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_does_not_wait():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_items_end_where_a_stop_was_asked_for():
    seen, fed = [], []
    with StopRequest() as stop, pytest.raises(Stopped):
        for item in stop.during(range(5), feed=fed.append):
            seen.append(item)
            if item == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [0, 1, 2] and len(fed) == 3


PROGRAM = """
    import os, random, signal, sys, time
    from leanformer.runtime import distributed
    from leanformer.runtime import multihost
    from leanformer.runtime.interrupt import StopRequest
    distributed.start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    chance, asks = random.Random(multihost.index()), float(sys.argv[-1])
    began = time.monotonic()
    with StopRequest() as stop:
        calls = 0
        while calls < 4000:
            calls += 1
            if stop.now():
                break
            if asks and time.monotonic() - began > asks:
                asks = 0
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(chance.uniform(0, 0.01))
            if calls % 20 == 0:
                multihost.all_gather_host(calls)  # what a collective does: nobody runs far ahead
    distributed.leave()
    print(calls, stop.status, file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_processes_stop_at_the_same_call(tmp_path):
    """Three of them, at a pace of their own between collectives; one, then two of them, then another, are asked."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    when = random.Random(0).uniform(0.5, 1.0)
    for asked in ({2}, {0, 1}, {1}):
        words = [sys.executable, str(tmp_path / "program.py"), f"localhost:{port}", "3"]
        running = [
            subprocess.Popen(
                [*words, str(i), str(when if i in asked else 0)],
                cwd=Path(__file__).parents[2],
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])},
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(3)
        ]
        said = [process.communicate(timeout=100)[1].strip().splitlines() for process in running]
        assert [process.returncode for process in running] == [0, 0, 0], said
        last = {lines[-1] for lines in said}
        assert len(last) == 1 and last.pop().endswith(" 75"), said
