"""Wall-clock seconds by phase, with a clock that the tests move."""

import pytest

from leanformer.runtime import timing


class Time:
    """Replacement of the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = Time()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def spend(time, clock, **seconds):
    for name, s in seconds.items():
        with clock(name):
            time.now += s


def test_phases_add_up_and_name_the_current_activity(time):
    clock = timing.Timer()
    time.now += 5
    spend(time, clock, compile=7)
    clock.started()
    for step in range(3):
        clock.begin_step(step + 4)
        spend(time, clock, data=0.25)
        time.now += 2
    assert clock.seconds() == {"start-up": 5, "compile": 7, "data": 0.75, "steps": 6}
    assert clock.activity == (time.now - 2, timing.DEVICE, 6, False)
    with clock("evaluation"):
        assert clock.activity.name == "evaluation" and clock.activity.since == time.now


def test_laps_exclude_phases_other_than_training(time):
    clock = timing.Timer()
    clock.started()
    spend(time, clock, **{"data wait": 1, "evaluation": 50, "probe": 20, "checkpoint": 9})
    time.now += 3
    assert clock.lap() == (4, 1)
    time.now += 2
    assert clock.lap() == (2, 0)


def test_a_resumed_run_adds_to_the_seconds_of_its_checkpoint(time):
    first = timing.Timer()
    time.now += 4
    first.started()
    time.now += 10
    saved = first.seconds()
    time.now += 6  # steps after the checkpoint; then 100 s until the next process starts
    time.now += 100
    second = timing.Timer()
    second.resume(saved)
    time.now += 3
    second.started()
    time.now += 20
    spend(time, second, evaluation=2)
    assert second.seconds() == pytest.approx({"start-up": 7, "steps": 30, "evaluation": 2})
