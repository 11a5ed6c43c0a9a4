"""Stop requests by Ctrl-C and other signals: training stops after the current step and saves.

The exit status is 130 after Ctrl-C, as in shells; schedulers should not restart the run. After other signals, which
schedulers send before a time limit, it is 75 (EX_TEMPFAIL, "try again"), and not 143: the state is saved.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from leanformer.runtime import multihost


AGAIN = os.EX_TEMPFAIL  # 75
STATUS = {  # exit status by signal
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: AGAIN,
    signal.SIGUSR1: AGAIN,
    signal.SIGUSR2: AGAIN,
    signal.SIGHUP: AGAIN,  # the terminal was closed
    signal.SIGXCPU: AGAIN,  # soft limit of CPU time, which some batch systems set
}


def handled() -> list[signal.Signals]:
    """Return the signals in STATUS that the parent process does not ignore: `nohup` ignores SIGHUP."""
    return [number for number in STATUS if signal.getsignal(number) != signal.SIG_IGN]


class Stopped(Exception):
    """Interruption of unfinished work by a stop request."""


class StopRequest:
    """Context manager that handles stop signals, after which `now` returns True. A second Ctrl-C interrupts at once.

    Several processes stop at the same call of `now`, whichever got the signal: JAX's preemption service, which handles
    SIGTERM, lets them agree on it. Other signals are passed on to it as SIGTERM.
    """

    def __init__(self) -> None:
        self.status = 0  # exit status once `now` is True
        self._requested = 0  # exit status of the signal that this process got
        self._calls = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in handled():
            if multihost.count() == 1 or number != signal.SIGTERM:
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def now(self) -> bool:
        """Return whether to stop training now, at the same call in all processes, which must call it equally often."""
        self._calls += 1
        single = multihost.count() == 1
        stop = self._requested if single else multihost_utils.reached_preemption_sync_point(self._calls)
        if stop:
            self.status = self._requested or AGAIN
        return self.status != 0

    def during[T](self, items: Iterable[T], feed: Callable[[str], None]) -> Iterator[T]:
        """Yield the items, and tell the watchdog by `feed`. Raises Stopped before an item if a stop was requested."""
        for item in items:
            if self.now():
                raise Stopped
            feed("evaluation")
            yield item

    def _request(self, number: int, _: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = STATUS[signal.Signals(number)]
        name = signal.Signals(number).name
        print(f"\n{name}: stopping after this step, then saving. Ctrl-C again stops at once.", file=sys.stderr)
        if multihost.count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
