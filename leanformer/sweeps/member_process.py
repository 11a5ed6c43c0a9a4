"""What submitit's own process runs for a member of many. It imports nothing: that process only waits, and need not hold
JAX, nor take the seconds to load it, once for every member."""

import os
import signal
import subprocess
import sys


EVERY = 1.0  # seconds between looks at the process that started a member


def run(command: list[str], environ: dict[str, str] | None = None, starter: int | None = None) -> None:
    """Run a command in a process of its own, which is told to save when submitit or SLURM wants an end.

    Args:
        environ: the command's environment, since submitit's local executor hides all GPUs.
        starter: process whose end ends the command too. Killed, a sweep could tell nobody, and what went on would hold
            folders that the next sweep needs.
    """
    with subprocess.Popen(command, env=environ) as process:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
        while (status := _status(process)) is None:
            if starter is not None and not _is_alive(starter):
                process.send_signal(signal.SIGTERM)
                starter = None
    print(f"Ended with status {status}.", file=sys.stderr)


def _status(process: subprocess.Popen) -> int | None:
    try:
        return process.wait(EVERY)
    except subprocess.TimeoutExpired:
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
