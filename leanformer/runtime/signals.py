"""Stop requests before the first training step, when there is nothing to save: the process exits at once.

This module imports nothing slow, so that a command can call `exit_on_stop` before it imports JAX. `stopping` installs
its own signal handlers later.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType


AGAIN = os.EX_TEMPFAIL  # 75
STATUS = {  # exit status by signal
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: AGAIN,
    signal.SIGUSR1: AGAIN,
    signal.SIGUSR2: AGAIN,
    signal.SIGHUP: AGAIN,  # the terminal was closed
    signal.SIGXCPU: AGAIN,  # soft limit of CPU time, which some batch systems set
}
_waiting = threading.Event()  # set while a signal ends the process
REPORT = 10.0  # longest time in seconds for telling the other processes
_reports: list[Callable[[int, str], object]] = []


def exit_on_stop() -> None:
    """Exit with the status in STATUS as soon as a stop signal arrives, until `install` is called.

    A line on the standard error names the signal. Python calls signal handlers between two instructions of the main
    thread. A compilation is one instruction and may take longer than a scheduler waits before SIGKILL. The signal
    itself writes to the wake-up pipe, which a thread reads.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in STATUS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # runs of a sweep ignore SIGINT
            signal.signal(number, _exit)
    _waiting.set()
    threading.Thread(target=_watch, args=(read,), name="early stop", daemon=True).start()


def handled() -> list[signal.Signals]:
    """Return the signals that stop a run: those in STATUS, without SIGHUP and SIGINT if the parent ignores them.

    `nohup` ignores SIGHUP, and a sweep SIGINT, which a terminal sends to its runs as well.
    """
    optional = (signal.SIGHUP, signal.SIGINT)
    return [number for number in STATUS if number not in optional or signal.getsignal(number) != signal.SIG_IGN]


def install() -> None:
    """End the effect of `exit_on_stop`: from now on the handlers of `stopping`, which save first, get stop signals."""
    _waiting.clear()


def report_to(function: Callable[[int, str], object]) -> None:
    """Set the function that is called before `exit_on_stop` ends this process, to tell the other processes.

    Args:
        function: takes the exit status and a message; it is waited for at most REPORT (10) seconds.
    """
    _reports[:] = [function]


def _watch(read: int) -> None:
    while content := os.read(read, 1):
        if _waiting.is_set() and content[0] in STATUS:
            _exit(content[0])


def _exit(number: int, _: FrameType | None = None) -> None:
    status = STATUS[signal.Signals(number)]
    message = f"{signal.Signals(number).name}: no step is under way, so there is nothing to save."
    with contextlib.suppress(OSError, RuntimeError):  # the terminal is closed, or is being written to
        print(f"\n{message}", file=sys.stderr, flush=True)
    for report in _reports:
        thread = threading.Thread(target=report, args=(status, message), daemon=True)
        thread.start()
        thread.join(REPORT)  # the coordinator may not answer
    os._exit(status)
