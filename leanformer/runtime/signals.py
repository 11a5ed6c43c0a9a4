"""Signals that stop a run, with its exit status. This module imports nothing slow: data workers need it."""

import os
import signal


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
