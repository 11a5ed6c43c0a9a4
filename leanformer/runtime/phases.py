"""Lines about phases of a command that take longer than two seconds."""

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator

from leanformer.runtime import multihost


SLOW = 2.0  # seconds


@contextlib.contextmanager
def announce(phase: str, last: float | None = None) -> Iterator[None]:
    """Print one line to the standard error, in process 0, if a `with` block takes longer than SLOW (2) seconds.

    Args:
        phase: description, such as "Compiling the training step".
        last: seconds that the phase took the last time, if known.
    """
    text = f"{phase} ({last:.0f} s the last time)" if last else phase
    timer = threading.Timer(SLOW, lambda: print(f"{text}.", file=sys.stderr, flush=True))
    timer.daemon = True
    if multihost.is_primary():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def announce_first[T](items: Iterator[T], phase: str) -> Iterator[T]:
    """Get the first item, whose computation includes a compilation, and return an iterator of all items.

    If the first item takes longer than SLOW (2) seconds, process 0 prints the description `phase` to the standard
    error.
    """
    with announce(phase):
        first = [*itertools.islice(items, 1)]
    return itertools.chain(first, items)
