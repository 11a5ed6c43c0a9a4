"""Where a run's time went, over all of its attempts, killed ones included.

Seconds are booked under names (start-up with the first batch, compile, data wait, evaluation, probe, checkpoint); what
no name claims went to steps. Each checkpoint carries the books up to it, so an attempt that goes on from one goes on
with its books, and time after the last checkpoint of a killed attempt is in nobody's. `attempts.jsonl` has a line for
the start of every attempt, and its time of modification, or that of `metrics.jsonl`, says when the run was last alive.
From these,

  idle              from the last sign of life of each attempt to the start of the next
  lost to restarts  all the rest of the time since the first attempt began: work that was done again, or thrown away
  goodput           steps / (all names + lost to restarts)
"""

import collections
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from leanformer.runtime import files, peers


LEDGER, RECORD = "attempts.jsonl", "metrics.jsonl"
APART = ("start-up", "compile", "evaluation", "probe", "checkpoint")  # not part of the speed of training


class Clock:
    """Books the seconds of one attempt on top of those of the checkpoint it goes on from.

    Args:
        feed: called with the name of what begins, whenever something does.
    """

    def __init__(self, feed: Callable[[str], None] = lambda _: None):
        self.feed = feed
        self._began = self._lapped = time.monotonic()
        self._before: dict[str, float] = {}
        self._spent: dict[str, float] = collections.defaultdict(float)
        self._at_lap: dict[str, float] = {}

    def go_on_from(self, books: dict[str, float]) -> None:
        """Takes over the books of a checkpoint."""
        self._before = dict(books)

    def started(self) -> None:
        """Books what nobody has claimed so far as start-up, and begins the first lap."""
        self._spent["start-up"] += time.monotonic() - self._began - sum(self._spent.values())
        self.lap()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Books the time inside under `name`."""
        self.feed(name)
        before = time.monotonic()
        yield
        self._spent[name] += time.monotonic() - before
        self.feed("a step on the device")

    def books(self) -> dict[str, float]:
        """Seconds by name up to now, over all attempts as far as they count."""
        own = self._spent | {"steps": time.monotonic() - self._began - sum(self._spent.values())}
        return {name: self._before.get(name, 0.0) + own.get(name, 0.0) for name in [*self._before, *own]}

    def seconds(self) -> float:
        """Their sum."""
        return sum(self.books().values())

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap without start-up, compiling, evaluation, probe and saving; and how many of them
        waited for data."""
        now, new = time.monotonic(), {name: s - self._at_lap.get(name, 0.0) for name, s in self._spent.items()}
        seconds = now - self._lapped - sum(new.get(name, 0.0) for name in APART)
        self._lapped, self._at_lap = now, dict(self._spent)
        return max(seconds, 1e-9), new.get("data wait", 0.0)


class Attempts:
    """The ledger of a run's attempts. Process 0 alone writes."""

    def __init__(self, workdir: Path):
        self._path, self._began, self._entered = workdir / LEDGER, time.time(), False

    def begin(self, **facts: int) -> None:
        """Enters this attempt, with the time since the run was last alive."""
        if peers.first():
            signs = [path.stat().st_mtime for path in (self._path, self._path.with_name(RECORD)) if path.is_file()]
            idle = max(0.0, self._began - max(signs, default=self._began))
            lines = [*files.read_lines(self._path), {"began": self._began, "idle_s": round(idle, 3), **facts}]
            files.write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))
            self._entered = True

    def alive(self) -> None:
        """A sign of life."""
        if peers.first() and self._entered:
            os.utime(self._path, (time.time(),) * 2)  # by this machine's clock, not a file server's

    def account(self, books: dict[str, float]) -> "Account":
        """What became of all the time since the first attempt began."""
        lines = files.read_lines(self._path)
        idle = sum(line["idle_s"] for line in lines)
        lost = max(0.0, time.time() - lines[0]["began"] - idle - sum(books.values()))
        return Account(len(lines), books | {"lost to restarts": lost}, idle)


@dataclasses.dataclass(frozen=True)
class Account:
    """Seconds by name, with those lost to restarts, and between the attempts."""

    attempts: int
    seconds: dict[str, float]
    idle: float

    @property
    def goodput(self) -> float:
        return self.seconds["steps"] / sum(self.seconds.values())

    def __str__(self) -> str:
        others = ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items() if name != "steps")
        text = f"{100 * self.goodput:.1f} %: {self.seconds['steps']:.1f} s of steps; {others}"
        between = f"; {self.idle:.1f} s between them not counted" if self.attempts > 1 else ""
        return f"{text} ({self.attempts} attempt{'s' * (self.attempts > 1)}{between})"
