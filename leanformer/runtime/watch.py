"""A watchdog: a run that stops making progress shows where every thread stands, and ends. It never hangs in silence."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from leanformer.runtime import peers


HUNG = os.EX_SOFTWARE  # 70: exit status of a run that the watchdog ended
FIRST = 3  # times the usual patience, while programs are compiled
REAL_STDERR = sys.__stderr__  # a notebook's own stands for no file, which these tools need
GRACE = 60  # seconds after which a thread that holds the interpreter is ended from outside it


def give_up(words: str, status: int) -> NoReturn:
    """Says why, prints the stacks of all threads, and ends the process without waiting for anything."""
    who = f"Process {peers.index()} of {peers.count()}: " if peers.count() > 1 else ""
    print(f"\n*** {who}{words}\n*** Where every thread stands:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(REAL_STDERR, all_threads=True)
    sys.stdout.flush()
    os._exit(status)


class Watchdog:
    """A context manager with a thread that ends the process when `feed` was not called for too long.

    Args:
        seconds: that one activity may take, and three times as much before the second step; 0 for no limit.
        beat: called about every ten seconds, from the thread.
    """

    def __init__(self, seconds: float, beat: Callable[[], None] = lambda: None):
        self.seconds, self._beat = seconds, beat
        self._steps = 0
        self._where = "before the first step"
        self._fed = time.monotonic(), "start-up"
        self._pause = min(10.0, seconds / 10) if seconds else 10.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def feed(self, awaited: str) -> None:
        """Something was achieved, and `awaited` comes next."""
        self._fed = time.monotonic(), awaited

    def step(self, step: int) -> None:
        """A new step begins."""
        self._steps, self._where = self._steps + 1, f"in step {step}"

    def _watch(self) -> None:
        while not self._done.wait(self._pause):
            self._beat()
            if not self.seconds:
                continue
            since, awaited = self._fed
            idle, allowed = time.monotonic() - since, self.seconds * (1 if self._steps > 1 else FIRST)
            if idle > allowed:
                give_up(f"NO PROGRESS FOR {idle:.0f} s (over {allowed:g}) {self._where}. AWAITED: {awaited}", HUNG)
            # This thread needs the interpreter, and a call into a library may never give it back: then a timer
            # outside of it prints the stacks and ends the process.
            faulthandler.dump_traceback_later(allowed + GRACE, exit=True, file=REAL_STDERR)
        faulthandler.cancel_dump_traceback_later()
