"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 as a wish to stop after the current step; a second Ctrl-C stops at once.

Exit status: 130 after Ctrl-C, as shells have it: a person does not want the run back. 75 (EX_TEMPFAIL, "try again")
after SIGTERM, and SIGUSR1 or SIGUSR2, which SLURM's --signal and submitit send ahead of a time limit: the state is
saved, run me again. It is not 143, since that is also the status of a process that SIGTERM killed before it could save.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import jax

from leanformer.runtime import peers, signals
from leanformer.runtime.signals import STATUS


class Stopped(Exception):
    """Something was left unfinished because of a stop request."""


class StopRequest:
    """A context manager that takes the signals; `stop.now()` says when to stop, `stop.status` what to exit with.

    One process stops at the next call of `now`. Several stop at the same call of it, whichever of them had the signal:
    a thread of each hears of it within POLL seconds, tells how many calls it has answered, and holds back answers till
    it knows the largest such number; the call after that one is the last in all of them. No call in a run that nobody
    stops costs more than a lock, and there is no collective.
    """

    POLL = 0.5  # seconds

    def __init__(self) -> None:
        self.status = 0
        self._last: int | None = None  # the call of `now` at which all stop
        self._calls, self._told = 0, False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._agree, name="stop", daemon=True)
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if peers.count() > 1:
            signals.begin()  # they stop together or not at all
        for number in STATUS:
            self._before[number] = signal.signal(number, self._ask)
        if peers.count() > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if peers.count() > 1:
            self._thread.join()
            self._answer()  # nobody need wait for this one any more
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def before_work(self) -> bool:
        """Return whether to stop before the first step, where nothing has to be saved. All processes must call it."""
        self.status = max(peers.each(self.status))
        return self.status != 0

    def now(self) -> bool:
        """Whether to stop here. All processes must call it equally often."""
        with self._lock:
            self._calls += 1
            if peers.count() == 1:
                return self.status != 0
            return self._last is not None and self._calls >= self._last

    def during[T](self, items: Iterable[T], feed: Callable[[str], None]) -> Iterator[T]:
        """The items, each a place to stop at. Raises Stopped there."""
        for item in items:
            if self.now():
                raise Stopped
            feed("evaluation")
            yield item

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.status and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.status = STATUS[signal.Signals(number)]
        name = signal.Signals(number).name
        print(f"\n{name}: saving after this step. Ctrl-C again stops at once.", file=sys.stderr, flush=True)

    def _agree(self) -> None:
        """Hears and spreads the wish, and works out the last call. A failed exchange is tried again: where it can never
        succeed, a peer or the coordinator is gone, and JAX ends this process."""
        status = None
        while status is None:
            if self._done.wait(self.POLL):
                return
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self.status:
                    peers.tell("stop/asked", self.status)
                status = peers.told("stop").get("asked")
        with self._lock:
            while not self._done.wait(self.POLL / 10):
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._answer()
                    answers = peers.told("stop at")
                    if len(answers) == peers.count():
                        self._last, self.status = max(answers.values()) + 1, status
                        return

    def _answer(self) -> None:
        """Tells the others how many calls were answered; once, for all must read the same."""
        if not self._told:
            peers.tell(f"stop at/{peers.index()}", self._calls)
            self._told = True
