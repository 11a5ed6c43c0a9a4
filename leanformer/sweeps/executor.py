"""Commands of many runs at once: on this machine, so many at a time, or by SLURM as one array."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import submitit
from submitit.slurm.slurm import SlurmInfoWatcher

from leanformer import cli
from leanformer.errors import ConfigError
from leanformer.sweeps import member_process
from leanformer.sweeps.grid import Group, Member, grouped, pair, unfinished
from leanformer.training import checks


LOG_LINES = 15  # of a failed member's log
Unit = Member | Group
CPUS = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'  # or, from SLURM 22.05 on, srun gives a task one
SQUEUE = ("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T")
GONE = "GONE"  # submitit takes every unknown state for an end
FLAGS = (  # of a command that runs members
    cli.Flag("workdir", "Folder of the members.", required=True, writes=True),
    cli.Flag("cluster", "Where to run them.", ("local", "slurm"), default="local"),
    cli.Flag("parallel", "Members at once: processes here, or tasks of the SLURM array.", int, default=1),
    cli.Flag("slurm", "KEY=VALUE: a parameter of SLURM's sbatch.", default=(), many=True),
    cli.Flag("minutes", "Time limit of a member.", int, default=60 * 24),
    cli.Flag("vmap", "Train members that differ in seed and learning rates alone as one program.", bool, default=False),
)


def check(found: Sequence[Member]) -> None:
    """Raises ConfigError on the first config that cannot work, by its member's name. One seed speaks for all."""
    points = {member.words[:-1]: member for member in reversed(found)}
    for member in reversed(points.values()):
        try:
            checks.check(member.config)
        except ConfigError as error:
            raise ConfigError(f"{member.workdir.name}: {error}\nNo member was started.") from error


def finish(found: Sequence[Member], folder: Path, f: cli.Values) -> dict[Member, str]:
    """Runs those that have not ended as they are asked for, and returns the failed ones with the end of their logs.

    Args:
        folder: of all of them.
        f: the values of FLAGS.

    Raises:
        ConfigError: a config that cannot work, or a folder of another run; nothing was started.
        KeyboardInterrupt: told to stop, with the signal's number; those that ran have saved.
    """
    wanted = unfinished(found)
    check(wanted)
    units = grouped(wanted) if f.vmap else wanted
    for member in wanted:  # the end of a shorter run, which one that fails now would leave
        (member.workdir / "summary.json").unlink(missing_ok=True)
    print(f"{len(found)} members, {len(found) - len(wanted)} finished already, {len(wanted)} to run in {folder}.")
    logs = run(units, folder / "logs", f) if wanted else {}
    return {member: log for unit, log in logs.items() for member in unit.members if not member.finished}


def tell(failed: Mapping[Member, str]) -> None:
    """Lists failed members."""
    for member, log in failed.items():
        print(f"\nFAILED: {member.workdir}\n  {log.replace(chr(10), chr(10) + '  ')}", file=sys.stderr)


def run(wanted: Sequence[Unit], logs: Path, f: cli.Values) -> dict[Unit, str]:
    """Runs members, at most --parallel at once, and returns the failed ones with the end of their logs."""
    executor = submitit.AutoExecutor(folder=logs, cluster=f.cluster)
    parameters = {f"slurm_{key}": value for key, value in (pair(text, "--slurm") for text in f.slurm)}
    executor.update_parameters(timeout_min=f.minutes, name="leanformer", **parameters)
    if f.cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=f.parallel, slurm_setup=[CPUS])
        if not has_accounts():
            submitit.SlurmJob.watcher = QueueWatcher()
        with executor.batch():
            jobs = {member: executor.submit(member_process.run, member.command) for member in wanted}
        array = next(iter(jobs.values())).job_id.partition("_")[0]
        print(f"SLURM array {array} of {len(jobs)} members; logs in {logs}.", flush=True)
        return dict(_failures(jobs))
    places = environments(os.environ, f.parallel)
    with _answered(_stop, signal.SIGINT, signal.SIGTERM):  # whatever started this may have had them ignored
        return _run_here(executor, wanted, places)


def has_accounts() -> bool:
    """Return whether this cluster keeps accounts of finished jobs."""
    return subprocess.run(["sacct", "--noheader"], capture_output=True, check=False).returncode == 0


class QueueWatcher(SlurmInfoWatcher):
    """submitit's watcher of SLURM jobs for clusters without accounts, where `sacct` fails: it asks `squeue`. A job that
    SLURM has forgotten, some minutes after its end, has ended."""

    def update(self) -> None:
        """Query the state of all jobs. A failed query changes nothing and is repeated later."""
        self._last_status_check = time.time()
        done = subprocess.run(SQUEUE, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            states = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
            self._info_dict = {job: {"State": states.get(job, GONE)} for job in self._registered}


def environments(environ: Mapping[str, str], parallel: int) -> list[dict[str, str]]:
    """Of members that run at once on this machine: each gets its share of the GPUs that CUDA_VISIBLE_DEVICES names.

    Raises:
        ConfigError: fewer GPUs than members.
    """
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not visible or parallel == 1:
        return [dict(environ)] * parallel
    each = len(visible) // parallel
    if not each:
        raise ConfigError(
            f"--parallel={parallel}, and CUDA_VISIBLE_DEVICES names {len(visible)} GPUs. Lower --parallel."
        )
    shares = (visible[i * each : (i + 1) * each] for i in range(parallel))
    return [{**environ, "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _run_here(executor: Any, wanted: Sequence[Unit], places: list[dict[str, str]]) -> dict[Unit, str]:
    """Runs members on this machine. Ctrl-C and SIGTERM end it once those that run have saved."""
    jobs, running = {}, {}
    try:
        for member in wanted:
            while len(running) >= len(places):
                time.sleep(0.2)
                running = {place: job for place, job in running.items() if not job.done()}
            place = min(set(range(len(places))) - running.keys())
            with _answered(
                signal.SIG_IGN, signal.SIGINT
            ):  # on a terminal Ctrl-C goes to everybody; submitit would kill at once
                job = executor.submit(member_process.run, member.command, places[place], os.getpid())
            print(f"Started {member.workdir.name}", flush=True)
            running[place] = jobs[member] = job
        return dict(_failures(jobs))
    except KeyboardInterrupt:
        left = [job for job in jobs.values() if not job.done()]
        print(f"Stopping: {len(left)} running, which save first. Run the same command again to go on.", flush=True)
        for job in left:
            os.kill(int(job.job_id), signal.SIGTERM)  # submitit hands it on to `member_process.run`
        for job in left:
            job.exception()  # waits for it
        raise


def _stop(number: int, _: Any) -> NoReturn:
    for heard in (signal.SIGINT, signal.SIGTERM):
        signal.signal(heard, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _answered(handler: Any, *numbers: int) -> Iterator[None]:
    """Signals go to `handler` meanwhile. What is started then ignores those that this process ignores, unless it sets a
    handler of its own, as training does."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)


def _failures(jobs: Mapping[Unit, Any]) -> Iterator[tuple[Unit, str]]:
    for member, job in jobs.items():
        error = job.exception()  # waits for it
        if error is not None or not member.finished:
            log = "\n".join(filter(None, [job.stdout(), job.stderr(), str(error or "")]))
            yield member, "\n".join(log.strip().splitlines()[-LOG_LINES:])
