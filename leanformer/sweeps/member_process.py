"""What submitit's own process runs for a member of many. It imports nothing: that process only waits, and need not hold
JAX, nor take the seconds to load it, once for every member."""

import signal
import subprocess
import sys


def run(command: list[str], environ: dict[str, str] | None = None) -> None:
    """A command in a process of its own, told to save when submitit or SLURM wants an end.

    The environment is ours, since submitit's local executor hides all GPUs.
    """
    with subprocess.Popen(command, env=environ) as process:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
        status = process.wait()
    print(f"Ended with status {status}.", file=sys.stderr)
