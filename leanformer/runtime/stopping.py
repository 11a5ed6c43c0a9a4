"""Stop requests by Ctrl-C and other signals (`signals.STATUS`): training stops after the current step and saves.

A second Ctrl-C stops at once. The exit status is 130 after Ctrl-C, as in shells; schedulers should not restart the run.
It is 75 (EX_TEMPFAIL, "try again") after SIGTERM, after SIGHUP (a closed terminal, unless `nohup` ignores it), and
after SIGUSR1, SIGUSR2 or SIGXCPU, which SLURM's --signal and others send before a time limit; the state is
saved and the run can be restarted. It is not 143, because that is also the status of a process that SIGTERM killed
before it could save.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import jax

from leanformer.runtime import multihost, signals
from leanformer.runtime.signals import STATUS


class Stopped(Exception):
    """Interruption of unfinished work by a stop request."""


class StopRequest:
    """Context manager that handles stop signals, so that training stops after a step and saves.

    `now()` returns whether to stop; the attribute `status` is the exit status, 0 without a stop request.

    A single process stops at the next call of `now`. Several processes stop at the same call of `now`, whichever
    received the signal. A thread of each process learns of the request within POLL seconds, publishes the number of
    calls it has answered, and blocks further answers until it knows the largest such number. The call after that one
    is the last in all processes. Without a stop request a call costs one lock and no collective.
    """

    POLL = 0.5  # seconds

    def __init__(self) -> None:
        self.status = 0
        self._last: int | None = None  # number of the call of `now` at which all processes stop
        self._calls, self._published = 0, False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._agree, name="stop", daemon=True)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if multihost.count() > 1:
            signals.install()  # all processes must stop at the same step, so none may exit by itself
        for number in signals.handled():
            self._before[number] = signal.signal(number, self._request)
        if multihost.count() > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if multihost.count() > 1:
            self._thread.join()
            self._publish_calls()  # so that no other process waits for this one
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def before_work(self) -> bool:
        """Return whether any process got a stop request before the first step.

        Sets `status` to the exit status of that request, or 0. All processes must call it.
        """
        self.status = max(multihost.all_gather_host(self.status))
        return self.status != 0

    def now(self) -> bool:
        """Return whether to stop training now, at the same call in all processes, which must call it equally often."""
        with self._lock:
            self._calls += 1
            if multihost.count() == 1:
                return self.status != 0
            return self._last is not None and self._calls >= self._last

    def during[T](self, items: Iterable[T], feed: Callable[[str], None]) -> Iterator[T]:
        """Yield the items, such as batches of an evaluation. Raises Stopped before an item if a stop was requested.

        Args:
            items: items, of which all processes must have equally many.
            feed: function that is called with the name of the activity before each item, for the watchdog.
        """
        for item in items:
            if self.now():
                raise Stopped
            feed("evaluation")
            yield item

    def _request(self, number: int, _: FrameType | None) -> None:
        if self.status and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.status = STATUS[signal.Signals(number)]
        name = signal.Signals(number).name
        print(
            f"\n{name}: stopping after this step, then saving. Ctrl-C again stops at once.", file=sys.stderr, flush=True
        )

    def _agree(self) -> None:
        """Publish and receive stop requests, then compute the last call of `now` from the numbers of all processes.

        A failed exchange is repeated. If it can never succeed, another process or the coordinator has ended, and JAX
        ends this process.
        """
        status = None
        while status is None:
            if self._done.wait(self.POLL):
                return
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self.status:
                    multihost.kv_set("stop/requested", self.status)
                status = multihost.kv_list("stop").get("requested")
        with self._lock:
            while not self._done.wait(self.POLL / 10):
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._publish_calls()
                    answers = multihost.kv_list("stop at")
                    if len(answers) == multihost.count():
                        self._last, self.status = max(answers.values()) + 1, status
                        return

    def _publish_calls(self) -> None:
        """Publish the number of answered calls, only once, because all processes must read the same number."""
        if not self._published:
            multihost.kv_set(f"stop at/{multihost.index()}", self._calls)
            self._published = True
