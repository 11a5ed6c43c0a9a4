"""Watchdog that prints the stacks of all threads and ends the process if a run makes no progress."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from leanformer.runtime import multihost


HUNG = os.EX_SOFTWARE  # 70: exit status of a run that the watchdog ended
FIRST = 3  # factor of the time limit while programs are compiled
REAL_STDERR = 2  # faulthandler needs a file descriptor, which a notebook's sys.stderr does not have
_TIMER = threading.RLock()  # held while the timer outside the interpreter is set, and while it must not be
GRACE = 60  # seconds beyond the limit after which a timer outside the interpreter ends the process


def give_up(message: str, status: int) -> NoReturn:
    """Print `message` and the stacks of all threads to the standard error, and end the process at once.

    `status` is the exit status.
    """
    process = f"process {multihost.index()} of {multihost.count()}: " if multihost.count() > 1 else ""
    print(f"\nError: {process}{message}\nStacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(REAL_STDERR, all_threads=True)
    sys.stdout.flush()
    os._exit(status)


def _suspend(*_: object) -> None:
    """Stop this process until SIGCONT, without the timer outside the interpreter, which would go off at once then."""
    with _TIMER:  # the thread may not set it again before the process stops
        faulthandler.cancel_dump_traceback_later()
        os.kill(os.getpid(), signal.SIGSTOP)


class Watchdog:
    """Context manager with a thread that ends the process if one activity takes too long. Enter it in the main thread.

    The stacks of all threads are printed, and the exit status is HUNG (70), or 1 if a library blocks the interpreter.
    Time in which the process was suspended does not count (SIGTSTP, from Ctrl-Z or SLURM; SIGSTOP up to the limit,
    since it cannot stop the timer outside the interpreter).

    Args:
        seconds: time limit of one activity in seconds, three times as long before the second step; 0 for no limit.
        activity: function that returns the current `timer.Activity`.
    """

    def __init__(self, seconds: float, activity: Callable[[], Any]):
        self.seconds, self._activity = seconds, activity
        self._pause = min(10.0, seconds / 10)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self._thread.start()
            self._previous = signal.signal(signal.SIGTSTP, _suspend)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.seconds:
            self._thread.join()
            signal.signal(signal.SIGTSTP, self._previous)

    def _watch(self) -> None:
        resumed = before = time.monotonic()
        while not self._done.wait(self._pause):
            before, late = time.monotonic(), time.monotonic() - before > 2 * self._pause
            resumed = before if late else resumed
            now = self._activity()
            idle, allowed = before - max(now.since, resumed), self.seconds * (1 if now.steps > 1 else FIRST)
            if idle > allowed:
                where = "before the first step" if now.step is None else f"in step {now.step}"
                give_up(f"no progress for {idle:.0f} s (limit {allowed:g} s) {where}. Activity: {now.name}.", HUNG)
            # This thread needs the interpreter lock, which a call into a library may never release. A timer outside
            # the interpreter then prints the stacks and ends the process.
            with _TIMER:
                seconds = min(allowed + GRACE, threading.TIMEOUT_MAX)
                faulthandler.dump_traceback_later(seconds, exit=True, file=REAL_STDERR)
        faulthandler.cancel_dump_traceback_later()
