"""Watchdog: ends a hung run, dumps all stacks, and does not end one that makes progress, compiles or was stopped."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from messages import mentions

from leanformer.runtime import timing
from leanformer.runtime.timing import Timer


SETUP = """
import os, signal, subprocess, threading, time
from leanformer.runtime import timing
from leanformer.runtime.timing import Timer
timing.TICK = 0.2
timer = Timer()
"""


def run_program(program):
    process = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return process.returncode, process.stderr


def test_hang_shows_every_thread_and_the_current_activity():
    program = """
        def elsewhere():
            time.sleep(100)
        threading.Thread(target=elsewhere, daemon=True).start()
        with timing.Watchdog(0.5, lambda: timer.activity):
            timer.begin_step(7)
            timer.begin_step(8)
            timer.touch("data wait")
            time.sleep(100)
    """
    status, errors = run_program(program)
    assert status == 70, errors
    assert mentions(errors, "step 8", "data wait", "elsewhere", "_watch")  # stacks of all threads


def test_stopped_run_goes_on():
    """The seconds between SIGSTOP and SIGCONT do not count, many times the limit."""
    program = """
        with timing.Watchdog(1.0, lambda: timer.activity):
            timer.begin_step(1)
            timer.begin_step(2)
            subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.3)
    """
    status, errors = run_program(program)
    assert status == 0, errors


def test_first_time_of_a_phase_may_compile(monkeypatch):
    """Also after many steps; the second time must be as fast as usual. Steps that make progress are not ended."""
    found, phase = [], "evaluation"
    monkeypatch.setattr(timing, "give_up", found.append)
    monkeypatch.setattr(timing, "TICK", 0.1)
    timer = Timer()
    with timing.Watchdog(0.5, lambda: timer.activity):
        for step in (1, 2, 3):
            timer.begin_step(step)
            timer.touch("a step on the device")
            time.sleep(0.3)
        with timer(phase):
            time.sleep(1.5)
        assert not found
        with timer(phase):
            time.sleep(1.5)
    assert found and mentions(found[0], phase, "step 3")
