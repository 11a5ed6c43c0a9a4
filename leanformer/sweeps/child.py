"""Process that waits for one run of a sweep: `python -m leanformer.sweeps.child COMMAND`. It imports nothing slow.

It passes SIGTERM on to the run, which saves, also when the sweep was killed: the run would otherwise write to a folder
that the next sweep uses.
"""

import os
import signal
import subprocess
import sys


POLL_SECONDS = 1.0


def run(command: list[str]) -> int:
    """Run a command until it ends, and return its exit status."""
    sweep = os.getppid()
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                return process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if os.getppid() != sweep:
                    process.terminate()
                    return process.wait()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
