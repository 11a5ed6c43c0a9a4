"""The watchdog ends what hangs, shows where, and leaves alone what goes on."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from messages import mentions

from leanformer.runtime.watch import Watchdog
from leanformer.training.timer import Timer


def run(program):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_a_hang_shows_every_thread_and_what_was_awaited():
    program = """
        import threading, time
        from leanformer.runtime.watch import Watchdog
        from leanformer.training.timer import Timer
        def elsewhere():
            time.sleep(100)
        threading.Thread(target=elsewhere, daemon=True).start()
        timer = Timer()
        with Watchdog(0.5, lambda: timer.activity):
            timer.begin_step(7)
            timer.begin_step(8)
            timer.touch("data wait")
            time.sleep(100)
    """
    status, said, seconds = run(program)
    assert status == 70 and seconds < 40, said
    assert mentions(said, "step 8", "data wait")
    assert mentions(said, "elsewhere", "_watch")  # stacks of all threads


def test_a_library_that_keeps_the_interpreter_is_ended_too():
    """No Python thread runs while a C function is called without giving up the interpreter."""
    program = """
        import ctypes
        from leanformer.runtime import watch
        from leanformer.training.timer import Timer
        watch.GRACE = 1
        timer = Timer()
        with watch.Watchdog(1.0, lambda: timer.activity):
            timer.begin_step(1)
            timer.begin_step(2)
            import time; time.sleep(0.5)
            ctypes.PyDLL(None).sleep(50)
    """
    status, said, seconds = run(program)
    assert status == 1 and seconds < 40, said
    assert "Timeout" in said and "Thread" in said


def test_the_first_steps_may_take_three_times_as_long():
    program = """
        import time
        from leanformer.runtime.watch import Watchdog
        from leanformer.training.timer import Timer
        timer = Timer()
        with Watchdog(1.0, lambda: timer.activity):
            timer.touch("compile")
            time.sleep(2)
            timer.begin_step(1)
            timer.touch("a step on the device")
            time.sleep(2)
        print("done")
    """
    status, said, _ = run(program)
    assert status == 0, said


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_run_that_makes_progress_is_left_alone(seconds):
    timer = Timer()
    with Watchdog(seconds, lambda: timer.activity):
        for step in range(8):
            timer.begin_step(step)
            timer.touch("a step on the device")
            time.sleep(0.2)
