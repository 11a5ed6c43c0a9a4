"""Ctrl-C and SIGTERM as a wish to stop after the current step; a second Ctrl-C stops at once."""

import signal
import sys
from types import FrameType


class StopRequest:
    """A context manager; `bool(stop)` says whether a stop was asked for, `stop.status` what to exit with."""

    def __init__(self) -> None:
        self.status = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.status != 0

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.status and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.status = 128 + number
        name = signal.Signals(number).name
        print(f"\n{name}: saving after this step. Ctrl-C again stops at once.", file=sys.stderr, flush=True)
