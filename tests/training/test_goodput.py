"""The books of a run's time add up over attempts that were killed, by a clock that the test moves."""

import json
import os

import pytest
from messages import mentions

from leanformer.training import goodput


class Time:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def time(monkeypatch):
    moved = Time()
    monkeypatch.setattr(goodput, "time", moved)
    return moved


def spend(time, clock, **seconds):
    for name, s in seconds.items():
        with clock(name):
            time.now += s


def test_books_of_one_attempt(time):
    fed = []
    clock = goodput.Clock(feed=fed.append)
    time.now += 5
    spend(time, clock, compile=7)
    clock.started()
    for _ in range(3):
        spend(time, clock, data=0.25)
        time.now += 2
    assert clock.books() == {"start-up": 5, "compile": 7, "data": 0.75, "steps": 6}
    assert clock.seconds() == 18.75
    step = fed[1]  # the name of what follows everything else
    assert fed == ["compile", step, *["data", step] * 3]


def test_laps_leave_out_what_is_not_training(time):
    clock = goodput.Clock()
    clock.started()
    spend(time, clock, **{"data wait": 1, "evaluation": 50, "probe": 20, "checkpoint": 9})
    time.now += 3
    assert clock.lap() == (4, 1)
    time.now += 2
    assert clock.lap() == (2, 0)


def test_what_a_killed_attempt_did_after_its_checkpoint_is_lost_and_the_gap_is_idle(time, tmp_path):
    def attempt(books, start_up):
        attempts, clock = goodput.Attempts(tmp_path), goodput.Clock()
        clock.go_on_from(books)
        time.now += start_up
        attempts.begin(step=0, processes=1, devices=1)
        clock.started()
        return attempts, clock

    attempts, clock = attempt({}, 4)
    time.now += 10
    saved = clock.books()
    time.now += 6  # 6 s of steps that a kill takes away
    attempts.alive()
    time.now += 100  # dead
    attempts, clock = attempt(saved, 3)
    time.now += 20
    spend(time, clock, evaluation=2)
    account = attempts.account(clock.books())
    assert account.seconds == pytest.approx({"start-up": 7, "steps": 30, "evaluation": 2, "lost to restarts": 6})
    assert account.attempts == 2 and account.idle == pytest.approx(100)
    assert account.goodput == pytest.approx(30 / 45)
    assert mentions(str(account), "66.7 %", "30.0 s", "lost to restarts 6.0", "2 attempts", "100.0 s")


def test_a_record_is_a_sign_of_life_too(time, tmp_path):
    goodput.Attempts(tmp_path).begin(step=0)
    time.now += 50
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.utime(tmp_path / "metrics.jsonl", (time.now, time.now))
    os.utime(tmp_path / "attempts.jsonl", (time.now - 50, time.now - 50))
    time.now += 30
    goodput.Attempts(tmp_path).begin(step=8)
    lines = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [(line["idle_s"], line["step"]) for line in lines] == [(0, 0), (30, 8)]


def test_nothing_is_touched_before_an_attempt_is_entered(time, tmp_path):
    goodput.Attempts(tmp_path).alive()
    assert not list(tmp_path.iterdir())
