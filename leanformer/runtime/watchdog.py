"""Watchdog that prints the stacks of all threads and ends the process if a run makes no progress."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from leanformer.runtime import multihost


HUNG = os.EX_SOFTWARE  # 70: exit status of a run that the watchdog ended
COMPILING = 6  # factor of the time limit while an activity happens for the first time, and programs are compiled
TICK = 1.0  # seconds
REAL_STDERR = 2  # faulthandler needs a file descriptor, which a notebook's sys.stderr does not have


def give_up(message: str) -> NoReturn:
    """Print a message and the stacks of all threads to the standard error, and end the process at once."""
    process = f"process {multihost.index()} of {multihost.count()}: " if multihost.count() > 1 else ""
    print(f"\nError: {process}{message}\nStacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(REAL_STDERR, all_threads=True)
    sys.stdout.flush()
    os._exit(HUNG)


class Watchdog:
    """Context manager with a thread that ends the process if one activity takes too long.

    The thread counts ticks of one second, not the time of a clock: while the process is stopped (SIGSTOP, Ctrl-Z,
    suspension by SLURM) there are none, so it is not ended when it continues.

    Args:
        seconds: time limit of one activity in seconds; 0 for no limit. It is six times as long when an activity happens
            for the first time, which includes compilation.
        activity: function that returns the current `timer.Activity`.
    """

    def __init__(self, seconds: float, activity: Callable[[], Any]):
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
