"""Wall-clock time of a run by phase, lines about slow phases, and the watchdog that ends a run without progress.

Every checkpoint contains the seconds up to it, and a resumed run adds to them. The time that a killed process spent
after its last checkpoint is not counted.
"""

import collections
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn

from leanformer.runtime import multihost


NOT_TRAINING = ("start-up", "compile", "evaluation", "probe", "checkpoint")  # phases outside the speed of training
ANNOUNCED = {  # lines about the first time of a phase, if it is slow
    "compile": "Compiling the training step",
    "start-up": "Reading the first batch",
    "evaluation": "Compiling the evaluation step, and evaluating",
    "probe": "Compiling the probe, and measuring conditioning",
    "checkpoint": "Saving the first checkpoint",
}
DEVICE = "a step on the device"  # activity outside all phases
SLOW = 2.0  # seconds after which a phase is announced
HUNG = os.EX_SOFTWARE  # 70: exit status of a run that the watchdog ended
COMPILING = 6  # factor of the time limit while an activity happens for the first time, and programs are compiled
TICK = 1.0  # seconds
REAL_STDERR = 2  # faulthandler needs a file descriptor, which a notebook's sys.stderr does not have


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of training from those by phase: steps, and the wait for data, in which the device may work.

    Steps are dispatched ahead of the device, so the host also waits for a batch while the device computes, and "steps"
    alone would lack that time.
    """
    return sum(spent for phase, spent in seconds.items() if phase not in NOT_TRAINING)


class Activity(NamedTuple):
    since: float  # in seconds of time.monotonic()
    name: str
    step: int | None  # None before the first step
    first: bool  # it happens for the first time in this process, which includes compilation


class Timer:
    """Wall-clock timer of a run by phase: `with timer("evaluation"):` counts the block as this phase."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before: dict[str, float] = {}
        self._spent: dict[str, float] = collections.defaultdict(float)
        self._steps = 0  # steps that this process has started
        self.activity = Activity(self._began, "start-up", None, first=True)

    def resume(self, seconds: Mapping[str, float]) -> None:
        self._before = dict(seconds)

    def started(self) -> None:
        """Count the time so far that belongs to no phase as start-up. Call it once."""
        self._spent["start-up"] += time.monotonic() - self._began - sum(self._spent.values())

    def touch(self, name: str) -> None:
        self.activity = self.activity._replace(since=time.monotonic(), name=name)

    def begin_step(self, step: int) -> None:
        self._steps += 1
        self.activity = self.activity._replace(step=step, first=self._steps == 1)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        first = phase not in self._spent
        self.touch(phase)
        self.activity = self.activity._replace(first=first)
        before = time.monotonic()
        with announce(ANNOUNCED[phase]) if first and phase in ANNOUNCED else contextlib.nullcontext():
            yield
        self._spent[phase] += time.monotonic() - before
        self.touch(DEVICE)
        self.activity = self.activity._replace(first=self._steps <= 1)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase since the run began, in all its processes; the rest as "steps"."""
        new = self._spent | {"steps": time.monotonic() - self._began - sum(self._spent.values())}
        return {phase: self._before.get(phase, 0.0) + new.get(phase, 0.0) for phase in [*self._before, *new]}


@contextlib.contextmanager
def announce(phase: str) -> Iterator[None]:
    """Print a description of a phase to stderr, in process 0, if the `with` block takes longer than SLOW seconds."""
    timer = threading.Timer(SLOW, lambda: print(f"{phase}.", file=sys.stderr, flush=True))
    timer.daemon = True
    if multihost.is_primary():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """Context manager with a thread that ends the process if one activity takes longer than `seconds` (0: no limit).

    It counts ticks, not the time of a clock: while the process is stopped (SIGSTOP, Ctrl-Z, suspension by SLURM) there
    are none, so it is not ended when it continues.
    """

    def __init__(self, seconds: float, activity: Callable[[], Activity]):
        self.seconds, self._activity = seconds, activity
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.seconds:
            self._thread.join()

    def _watch(self) -> None:
        since, ticks = 0.0, 0
        while not self._done.wait(TICK):
            now = self._activity()
            since, ticks = now.since, ticks + 1 if now.since == since else 0
            allowed = self.seconds * (COMPILING if now.first else 1)
            if ticks * TICK > allowed:
                where = "before the first step" if now.step is None else f"in step {now.step}"
                give_up(f"no progress for {ticks * TICK:.0f} s (limit {allowed:g} s) {where}. Activity: {now.name}.")


def give_up(message: str) -> NoReturn:
    """Print a message and the stacks of all threads to the standard error, and end the process at once."""
    process = f"process {multihost.index()} of {multihost.count()}: " if multihost.count() > 1 else ""
    print(f"\nError: {process}{message}\nStacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(REAL_STDERR, all_threads=True)
    sys.stdout.flush()
    os._exit(HUNG)
