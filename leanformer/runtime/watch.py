"""A watchdog: a run that stops making progress shows where every thread stands, and ends. It never hangs in silence."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

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
    """A context manager with a thread that ends the process if one activity takes too long.

    Args:
        seconds: limit of one activity, three times as much before the second step; 0 for no limit.
        activity: function that returns what the process is doing, `timer.Activity`.
    """

    def __init__(self, seconds: float, activity: Callable[[], Any]):
        self.seconds, self._activity = seconds, activity
        self._pause = min(10.0, seconds / 10)
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
        while not self._done.wait(self._pause):
            now = self._activity()
            idle, allowed = time.monotonic() - now.since, self.seconds * (1 if now.steps > 1 else FIRST)
            if idle > allowed:
                where = "before the first step" if now.step is None else f"in step {now.step}"
                give_up(f"NO PROGRESS FOR {idle:.0f} s (over {allowed:g}) {where}. AWAITED: {now.name}", HUNG)
            # This thread needs the interpreter, and a call into a library may never give it back: then a timer
            # outside of it prints the stacks and ends the process.
            faulthandler.dump_traceback_later(allowed + GRACE, exit=True, file=REAL_STDERR)
        faulthandler.cancel_dump_traceback_later()
