"""Seconds by phase with a clock that the tests move; the watchdog ends a hung run, not one that makes progress."""

import sys
import textwrap
import time

import pytest
from commands import run
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
    status, _, errors = run([sys.executable, "-c", SETUP + textwrap.dedent(program)])
    assert status == 70, errors
    assert mentions(errors, "step 8", "data wait", "elsewhere", "_watch")  # stacks of all threads


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


class Time:
    """Clock in place of the module time."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def fake(monkeypatch):
    result = Time()
    monkeypatch.setattr(timing, "time", result)
    return result


def spend(fake, clock, **seconds):
    for name, s in seconds.items():
        with clock(name):
            fake.now += s


def test_phases_add_up_and_name_the_current_activity(fake):
    clock = timing.Timer()
    fake.now += 5
    spend(fake, clock, compile=7)
    clock.started()
    for step in range(3):
        clock.begin_step(step + 4)
        spend(fake, clock, data=0.25)
        fake.now += 2
    assert clock.seconds() == {"start-up": 5, "compile": 7, "data": 0.75, "steps": 6}
    assert clock.activity == (fake.now - 2, timing.DEVICE, 6, False)
    with clock("evaluation"):
        assert clock.activity.name == "evaluation" and clock.activity.since == fake.now


def test_training_includes_the_wait_for_data(fake):
    """The device computes while the host waits for a batch, so this wait is part of the training time."""
    clock = timing.Timer()
    clock.started()
    spend(fake, clock, **{"data wait": 5, "evaluation": 50, "compile": 7})
    fake.now += 3
    assert timing.training_seconds(clock.seconds()) == 8


def test_a_resumed_run_adds_to_the_seconds_of_its_checkpoint(fake):
    first = timing.Timer()
    fake.now += 4
    first.started()
    fake.now += 10
    saved = first.seconds()
    fake.now += 6  # steps after the checkpoint; then 100 s until the next process starts
    fake.now += 100
    second = timing.Timer()
    second.resume(saved)
    fake.now += 3
    second.started()
    fake.now += 20
    spend(fake, second, evaluation=2)
    assert second.seconds() == pytest.approx({"start-up": 7, "steps": 30, "evaluation": 2})
