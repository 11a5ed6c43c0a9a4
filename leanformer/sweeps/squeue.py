"""SLURM jobs watched by `squeue`, for clusters that keep no accounts: submitit asks `sacct`, which fails there at every
poll, and a job that dies without a word would be waited for for ever."""

import subprocess
import time

from submitit.slurm.slurm import SlurmInfoWatcher


COMMAND = ("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T")
GONE = "GONE"  # submitit takes every state for an end that it does not know to be none


def accounts() -> bool:
    """Whether this cluster keeps accounts of jobs that are over."""
    return subprocess.run(["sacct", "--noheader"], capture_output=True, check=False).returncode == 0


class Watcher(SlurmInfoWatcher):
    """submitit's watcher, asking the queue. A job that SLURM has forgotten, some minutes after its end, has ended."""

    def update(self) -> None:
        """Asks for the state of all jobs. No answer changes nothing, and it is asked again."""
        self._last_status_check = time.time()
        done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
            self._info_dict = {job: {"State": found.get(job, GONE)} for job in self._registered}
