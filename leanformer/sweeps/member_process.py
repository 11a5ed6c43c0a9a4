"""Function that submitit's process executes for one run of a sweep.

This module imports nothing slow: submitit's process only waits, so it needs neither the memory nor the seconds that
importing JAX takes, once per run.
"""

import signal
import subprocess
import sys


def run(command: list[str], environ: dict[str, str] | None = None) -> None:
    """Run a command in a child process; pass stop signals of submitit and SLURM on to it as SIGTERM.

    Args:
        command: command and its arguments.
        environ: environment of the child process; needed because submitit's local executor hides all GPUs.
    """
    with subprocess.Popen(command, env=environ) as process:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
        status = process.wait()
    print(f"Ended with status {status}.", file=sys.stderr)
