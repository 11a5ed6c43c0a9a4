"""Watchdog: ends a hung run, dumps all stacks, and does not stop a run that makes progress."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from messages import mentions

from leanformer.runtime.watchdog import Watchdog
from leanformer.training.timer import Timer


SETUP = """
import ctypes, os, signal, subprocess, threading, time
from leanformer.runtime import watchdog
from leanformer.training.timer import Timer
timer = Timer()
"""


def run_program(program):
    begin = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return process.returncode, process.stderr, time.monotonic() - begin


def test_hang_shows_every_thread_and_the_current_activity():
    program = """
        def elsewhere():
            time.sleep(100)
        threading.Thread(target=elsewhere, daemon=True).start()
        with watchdog.Watchdog(0.5, lambda: timer.activity):
            timer.begin_step(7)
            timer.begin_step(8)
            timer.touch("data wait")
            time.sleep(100)
    """
    status, errors, seconds = run_program(program)
    assert status == 70 and seconds < 40, errors
    assert mentions(errors, "step 8", "data wait")
    assert mentions(errors, "elsewhere", "_watch")  # stacks of all threads


def test_hang_that_holds_the_gil_is_ended():
    """No Python thread runs during a C call that does not release the GIL."""
    program = """
        watchdog.GRACE = 1
        with watchdog.Watchdog(1.0, lambda: timer.activity):
            timer.begin_step(1)
            timer.begin_step(2)
            time.sleep(0.5)
            ctypes.PyDLL(None).sleep(50)
    """
    status, errors, seconds = run_program(program)
    assert status == 1 and seconds < 40, errors
    assert "Timeout" in errors and "Thread" in errors


def test_the_first_steps_may_take_three_times_as_long():
    program = """
        with watchdog.Watchdog(1.0, lambda: timer.activity):
            timer.touch("compile")
            time.sleep(2)
            timer.begin_step(1)
            timer.touch("a step on the device")
            time.sleep(2)
        print("done")
    """
    status, errors, _ = run_program(program)
    assert status == 0, errors


def test_suspended_run_goes_on():
    """As after Ctrl-Z and fg: the seconds between do not count, also if the thread runs just before the stop."""
    program = """
        cancel = watchdog.faulthandler.cancel_dump_traceback_later
        watchdog.faulthandler.cancel_dump_traceback_later = lambda: (cancel(), time.sleep(0.5))
        watchdog.GRACE = 1
        with watchdog.Watchdog(1.0, lambda: timer.activity):
            timer.begin_step(1)
            timer.begin_step(2)
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTSTP)
            time.sleep(0.3)
        assert signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
        print("done")
    """
    status, errors, seconds = run_program(program)
    assert (status, seconds > 3) == (0, True), errors


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1e30])  # the last is beyond what timers of the system can hold
def test_run_that_makes_progress_is_not_stopped(seconds):
    timer = Timer()
    with Watchdog(seconds, lambda: timer.activity):
        for step in range(8):
            timer.begin_step(step)
            timer.touch("a step on the device")
            time.sleep(0.2)
