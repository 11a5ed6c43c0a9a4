"""Function that submitit's process executes for one run of a sweep.

This module imports nothing slow: submitit's process only waits, so it needs neither the memory nor the seconds that
importing JAX takes, once per run.
"""

import os
import signal
import subprocess
import sys


EVERY = 1.0  # seconds between checks of the process that started the run


def run(command: list[str], environ: dict[str, str] | None = None, starter: int | None = None) -> None:
    """Run a command in a child process until it ends; pass stop signals of submitit and SLURM to it as SIGTERM.

    The exit status is printed to stderr; a failure raises no error.

    Args:
        command: words of the command.
        environ: environment of the child process, by default that of this process; needed because submitit's local
            executor hides all GPUs.
        starter: id of a process whose end stops the command too; None for no such process. A killed sweep cannot send a
            signal, and its runs would keep the folders that the next sweep needs.
    """
    with subprocess.Popen(command, env=environ) as process:
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
        while (status := _wait(process)) is None:
            if starter is not None and not _is_alive(starter):
                process.send_signal(signal.SIGTERM)
                starter = None
    print(f"Ended with status {status}.", file=sys.stderr)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status, or None if the process still runs after EVERY seconds."""
    try:
        return process.wait(EVERY)
    except subprocess.TimeoutExpired:
        return None


def _is_alive(pid: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
