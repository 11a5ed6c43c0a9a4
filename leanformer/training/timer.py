"""Wall-clock time of a run by phase: start-up, compile, data wait, evaluation, probe, checkpoint; the rest is steps.

Every checkpoint contains the seconds up to it, and a resumed run adds to them. The time that a killed process spent
after its last checkpoint is not counted.
"""

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from leanformer.runtime import phases


NOT_TRAINING = ("start-up", "compile", "evaluation", "probe", "checkpoint")  # phases outside the speed of training
ANNOUNCED = {  # lines about the first time of a phase, if it is slow (`phases.announce`)
    "compile": "Compiling the training step",
    "start-up": "Reading the first batch",
    "evaluation": "Compiling the evaluation step, and evaluating",
    "probe": "Compiling the probe, and measuring conditioning",
    "checkpoint": "Saving the first checkpoint",
}
DEVICE = "a step on the device"  # activity outside all phases


class Activity(NamedTuple):
    """Current activity of the process, for the watchdog.

    Attributes:
        since: start of the activity, in seconds of time.monotonic().
        name: description of the activity, such as "evaluation".
        step: current step; None before the first step.
        first: True while it happens for the first time in this process, which includes compilation.
    """

    since: float
    name: str
    step: int | None
    first: bool


class Timer:
    """Wall-clock timer of a run by phase, which continues from the seconds in a checkpoint (`resume`).

    Call it with the name of a phase for a context manager that counts the time within its block as this phase.

    Attributes:
        activity: current activity, for the watchdog.
    """

    def __init__(self) -> None:
        self._began = self._lapped = time.monotonic()
        self._before: dict[str, float] = {}
        self._spent: dict[str, float] = collections.defaultdict(float)
        self._at_lap: dict[str, float] = {}
        self._steps = 0  # steps that this process has started
        self.activity = Activity(self._began, "start-up", None, first=True)

    def resume(self, seconds: Mapping[str, float]) -> None:
        """Continue from the seconds by phase that a checkpoint contains, which `seconds` and `total` then include."""
        self._before = dict(seconds)

    def started(self) -> None:
        """Count the time so far that belongs to no phase as start-up, and begin the first lap. Call it once."""
        self._spent["start-up"] += time.monotonic() - self._began - sum(self._spent.values())
        self.lap()

    def touch(self, name: str) -> None:
        """Report progress to the watchdog; `name` describes the next activity of the process."""
        self.activity = self.activity._replace(since=time.monotonic(), name=name)

    def watched[T](self, items: Iterable[T], name: str) -> Iterator[T]:
        """Yield the items, and report progress to the watchdog before each.

        Args:
            items: items to iterate over.
            name: description of the activity.
        """
        self.touch(name)
        for item in items:
            yield item
            self.touch(name)

    def begin_step(self, step: int) -> None:
        """Report the start of step number `step` to the watchdog."""
        self._steps += 1
        self.activity = self.activity._replace(step=step, first=self._steps == 1)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time within a `with` block as `phase`."""
        first = phase not in self._spent
        self.touch(phase)
        self.activity = self.activity._replace(first=first)
        before = time.monotonic()
        slow = phase in ANNOUNCED and first
        with phases.announce(ANNOUNCED[phase]) if slow else contextlib.nullcontext():
            yield
        self._spent[phase] += time.monotonic() - before
        self.touch(DEVICE)
        self.activity = self.activity._replace(first=self._steps <= 1)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase since the run began, including those of the checkpoint from which it resumed.

        Time outside all phases is that of "steps".
        """
        new = self._spent | {"steps": time.monotonic() - self._began - sum(self._spent.values())}
        return {phase: self._before.get(phase, 0.0) + new.get(phase, 0.0) for phase in [*self._before, *new]}

    def total(self) -> float:
        """Return the seconds since the run began, including those of the checkpoint from which it resumed."""
        return sum(self.seconds().values())

    def lap(self) -> tuple[float, float]:
        """Return the seconds of training since the last lap, and the part that waited for data; begin a new lap.

        Phases of NOT_TRAINING, such as evaluations, are left out.
        """
        now, new = time.monotonic(), {name: s - self._at_lap.get(name, 0.0) for name, s in self._spent.items()}
        seconds = now - self._lapped - sum(new.get(name, 0.0) for name in NOT_TRAINING)
        self._lapped, self._at_lap = now, dict(self._spent)
        return max(seconds, 1e-9), new.get("data wait", 0.0)
