"""Wall-clock time of a run by phase: start-up, compile, data wait, evaluation, probe, checkpoint; the rest is steps.

Every checkpoint holds the seconds up to it, and a run that resumes adds to them. The time that a killed process spent
after its last checkpoint is counted nowhere.
"""

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple


NOT_TRAINING = ("start-up", "compile", "evaluation", "probe", "checkpoint")  # phases outside the speed of training
DEVICE = "a step on the device"  # activity outside all phases


class Activity(NamedTuple):
    """What the process is doing, for the watchdog."""

    since: float  # time.monotonic()
    name: str
    step: int | None  # None before the first step
    steps: int  # begun by this process


class Timer:
    """Clock of one process, on top of the seconds in the checkpoint it resumes from."""

    def __init__(self) -> None:
        self._began = self._lapped = time.monotonic()
        self._before: dict[str, float] = {}
        self._spent: dict[str, float] = collections.defaultdict(float)
        self._at_lap: dict[str, float] = {}
        self.activity = Activity(self._began, "start-up", None, 0)

    def resume(self, seconds: Mapping[str, float]) -> None:
        """Add to the seconds by phase that a checkpoint holds."""
        self._before = dict(seconds)

    def started(self) -> None:
        """Count the time so far that belongs to no phase as start-up, and begin the first lap."""
        self._spent["start-up"] += time.monotonic() - self._began - sum(self._spent.values())
        self.lap()

    def touch(self, name: str) -> None:
        """Note progress; `name` is the next activity."""
        self.activity = self.activity._replace(since=time.monotonic(), name=name)

    def begin_step(self, step: int) -> None:
        """Note that step `step` begins."""
        self.activity = self.activity._replace(step=step, steps=self.activity.steps + 1)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside as `phase`."""
        self.touch(phase)
        before = time.monotonic()
        yield
        self._spent[phase] += time.monotonic() - before
        self.touch(DEVICE)

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, those of the checkpoint included."""
        own = self._spent | {"steps": time.monotonic() - self._began - sum(self._spent.values())}
        return {phase: self._before.get(phase, 0.0) + own.get(phase, 0.0) for phase in [*self._before, *own]}

    def total(self) -> float:
        """Return the sum of `seconds`."""
        return sum(self.seconds().values())

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last lap without NOT_TRAINING, and those of them that waited for data."""
        now, new = time.monotonic(), {name: s - self._at_lap.get(name, 0.0) for name, s in self._spent.items()}
        seconds = now - self._lapped - sum(new.get(name, 0.0) for name in NOT_TRAINING)
        self._lapped, self._at_lap = now, dict(self._spent)
        return max(seconds, 1e-9), new.get("data wait", 0.0)
