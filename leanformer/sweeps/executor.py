"""Execution of the runs of a sweep: in parallel processes on this machine, or as one SLURM array."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmInfoWatcher

from leanformer import cli
from leanformer.config.key_docs import iterate_keys
from leanformer.costs.count import format_count
from leanformer.errors import ConfigError, first_line
from leanformer.runtime import cuda, signals, text
from leanformer.sweeps import member_process
from leanformer.sweeps.grid import SweepRun, parse_assignment, select_unfinished
from leanformer.training import checks, progress


LOG_LINES = 15  # lines shown from the log of a failed run
CPUS = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'  # otherwise srun of SLURM >= 22.05 gives a task 1 CPU
SQUEUE = ("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T")
NOT_TEXT = {"additional_parameters", "setup", "srun_args", "teardown"}  # parameters of submitit that are lists
GONE = "GONE"  # submitit treats every unknown state as the end of a job


def check(members: Sequence[SweepRun]) -> None:
    """Raise ConfigError for the first run with an invalid config, or with that of another run, and name the run.

    Of runs that differ only in the seed, one is checked.
    """
    points = {member.words[:-1]: member for member in reversed(members)}
    names: dict[str, str] = {}
    for member in reversed(points.values()):
        try:
            checks.check(member.config)
        except ConfigError as error:
            raise ConfigError(f"{member.workdir.name}: {error}\nNo run was started.") from error
        keys = json.dumps({key: value for key, value in iterate_keys(member.config) if key != "seed"}, default=str)
        if (other := names.setdefault(keys, member.workdir.name)) != member.workdir.name:
            raise ConfigError(
                f"{other} and {member.workdir.name} have the same config. Leave one out.\nNo run was started."
            )


def finish(members: Sequence[SweepRun], folder: Path, f: cli.Values) -> dict[SweepRun, str]:
    """Execute all unfinished runs, and finished ones that are to train longer (`select_unfinished`).

    Prints the numbers of runs and the progress. The summary.json of a run that is extended is deleted at the start.

    Args:
        members: runs of the sweep.
        folder: folder of the sweep; logs are written to folder/logs.
        f: flags of a command, with those of `cli.commands.SWEEP_FLAGS`.

    Returns:
        The failed runs, each with the last lines of its log; {} if none failed.

    Raises:
        ConfigError: a flag or a config is invalid, a folder belongs to a different run, or SLURM refused the job array;
            no run was started.
        KeyboardInterrupt: a stop was requested; the argument is the signal's number. Active runs have saved.
    """
    pending = select_unfinished(members)
    check(pending)
    executor = make_executor(folder / "logs", f) if pending else None
    places = environments(os.environ, f.parallel) if pending and f.cluster == "local" else []
    number = format_count(len(members), "run")
    print(text.wrap(f"{number} in {folder}: {len(members) - len(pending)} already finished, {len(pending)} to run."))
    logs = {} if executor is None else run(pending, executor, places, f)
    return {member: log for member, log in logs.items() if not member.finished}


def print_failures(failed: Mapping[SweepRun, str]) -> None:
    """Print failed runs to the standard error; `failed` is {run: last lines of its log}, as `finish` returns it."""
    for member, log in failed.items():
        print(f"\nFAILED: {member.workdir}\n  {log.replace(chr(10), chr(10) + '  ')}", file=sys.stderr)


def make_executor(logs: Path, f: cli.Values) -> submitit.AutoExecutor:
    """Return submitit's executor for --cluster, which executes runs on this machine or as SLURM jobs.

    Args:
        logs: folder of its logs.
        f: flags of the command; cluster, slurm and minutes are used.

    Raises:
        ConfigError: SLURM is not installed, or --slurm is given without --cluster=slurm or has an unknown parameter.
    """
    parameters = [(flag, *parse_assignment(flag, "--slurm")) for flag in f.slurm]
    if parameters and f.cluster != "slurm":
        raise ConfigError(f"--slurm={f.slurm[0]}: --cluster={f.cluster} does not use it. Pass --cluster=slurm.")
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=f.cluster)
    except RuntimeError as error:
        raise ConfigError(
            "--cluster=slurm: this machine has no SLURM, the program srun was not found. Run the command on a node of "
            "the cluster, or pass --cluster=local."
        ) from error
    executor.update_parameters(timeout_min=f.minutes, name="leanformer")
    for flag, key, value in parameters:
        try:
            if key in NOT_TEXT:
                raise NameError(key)
            executor.update_parameters(**{f"slurm_{key}": value})
        except (NameError, ValueError) as error:
            names = ", ".join(sorted(submitit.SlurmExecutor._valid_parameters() - NOT_TEXT))
            raise ConfigError(f"--slurm={flag}: unknown parameter or wrong value. Choose from {names}.") from error
    return executor


def run(
    units: Sequence[SweepRun], executor: submitit.AutoExecutor, places: list[dict[str, str]], f: cli.Values
) -> dict[SweepRun, str]:
    """Execute runs, wait for their end, and return the failed ones, each with the last lines of its log.

    Args:
        units: runs to execute.
        executor: executor from `make_executor`.
        places: environments from `environments`, one per run at the same time on this machine; not used with SLURM.
        f: flags of the command; cluster, parallel (runs at once with SLURM) and slurm are used.

    Raises:
        ConfigError: SLURM refused the job array.
        KeyboardInterrupt: a stop was requested on this machine, and the active runs have saved.
    """
    if f.cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=f.parallel, slurm_setup=[CPUS])
        if not has_accounts():
            submitit.SlurmJob.watcher = QueueWatcher()
        try:
            with executor.batch():
                jobs = {member: executor.submit(member_process.run, member.command) for member in units}
        except FailedJobError as error:
            given = " ".join(f"--slurm={flag}" for flag in f.slurm) or "no --slurm"
            raise ConfigError(
                f"SLURM refused the job array ({given}): {first_line(error)}. Correct the values of --slurm, or "
                "--minutes, and run the same command again."
            ) from error
        _forget_summaries(units)  # no job can have ended yet: Python has not even started in it
        array = next(iter(jobs.values())).job_id.partition("_")[0]
        print(f"SLURM array {array} of {format_count(len(jobs), 'run')}; logs in {executor.folder}.", flush=True)
        return dict(_failures(jobs))
    _forget_summaries(units)
    with _handle_signals(_stop, *signals.handled()):
        signals.install()
        return _run_here(executor, units, places)


def _forget_summaries(units: Sequence[SweepRun]) -> None:
    """Delete each summary.json, so that a run that is extended does not keep that of the shorter run if it fails."""
    for member in units:
        (member.workdir / "summary.json").unlink(missing_ok=True)


def has_accounts() -> bool:
    """Return whether this SLURM cluster keeps records of finished jobs (`sacct` works)."""
    if shutil.which("sacct") is None:
        return False
    return subprocess.run(["sacct", "--noheader"], capture_output=True, check=False).returncode == 0


class QueueWatcher(SlurmInfoWatcher):
    """Watcher of SLURM jobs for clusters where `sacct` fails: it queries `squeue`.

    SLURM removes a job from the queue some minutes after its end, so a missing job counts as ended.
    """

    def update(self) -> None:
        """Store the states of all registered jobs as `squeue` lists them; a job that it does not list is "GONE" (GONE).

        The base class calls this at intervals. If squeue exits with an error, the stored states stay as they are.
        """
        self._last_status_check = time.time()
        done = subprocess.run(SQUEUE, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            states = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
            self._info_dict = {job: {"State": states.get(job, GONE)} for job in self._registered}


def environments(environ: Mapping[str, str], parallel: int) -> list[dict[str, str]]:
    """Return the environments of `parallel` runs, with the GPUs in CUDA_VISIBLE_DEVICES divided evenly between them.

    Each is a copy of `environ` with an equal number of GPUs; a remainder is not used. If the variable is unset or
    hides all GPUs, all are equal. Raises ConfigError if there are fewer GPUs than parallel runs.
    """
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not visible or parallel == 1 or not cuda.is_wanted(environ):
        return [dict(environ)] * parallel
    count = len(visible) // parallel
    if not count:
        number = format_count(len(visible), "GPU")
        raise ConfigError(f"--parallel={parallel}: CUDA_VISIBLE_DEVICES names only {number}. Lower --parallel.")
    shares = (visible[i * count : (i + 1) * count] for i in range(parallel))
    return [{**environ, "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _run_here(executor: Any, units: Sequence[SweepRun], places: list[dict[str, str]]) -> dict[SweepRun, str]:
    """Execute runs on this machine. After a stop signal (`signals.STATUS`), let the active runs save, then raise."""
    jobs, running, waiting = {}, {}, [*units]
    begun, ended = time.monotonic(), 0
    try:
        while waiting or running:
            for place, (member, job) in [*running.items()]:
                if job.done():
                    del running[place]
                    ended += 1
                    print(text.wrap(_progress_line(member, ended, len(units), time.monotonic() - begun)), flush=True)
            while waiting and len(running) < len(places):
                member = waiting.pop(0)
                place = min(set(range(len(places))) - running.keys())
                # A terminal sends Ctrl-C to all processes, and submitit would kill the run at once.
                with _handle_signals(signal.SIG_IGN, signal.SIGINT):
                    job = executor.submit(member_process.run, member.command, places[place], os.getpid())
                running[place] = member, job
                jobs[member] = job
            time.sleep(0.2)
        return dict(_failures(jobs))
    except KeyboardInterrupt:
        left = [job for job in jobs.values() if not job.done()]
        number = format_count(len(left), "active run")
        print(f"Stopping: saving {number} first. Run the same command again to resume.", flush=True)
        for job in left:
            os.kill(int(job.job_id), signal.SIGTERM)  # submitit passes it on to `member_process.run`
        for job in left:
            job.exception()  # waits for it
        raise


def _progress_line(member: SweepRun, ended: int, total: int, seconds: float) -> str:
    """Return the line about a run that ended: its score, and the time left if all take as long as those so far."""
    parts = [f"[{ended}/{total}] {member.workdir.name}", member.final_score or "failed"]
    if ended < total:
        parts.append(f"about {progress.format_duration(seconds / ended * (total - ended))} left")
    return "  ".join(parts)


def _stop(number: int, _: Any) -> NoReturn:
    for other in signals.STATUS:
        signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the saving
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _handle_signals(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle signals with `handler` within a `with` block.

    A child process started within it ignores the signals that this process ignores, unless it installs handlers of its
    own, as training does.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)


def _failures(jobs: Mapping[SweepRun, Any]) -> Iterator[tuple[SweepRun, str]]:
    for member, job in jobs.items():
        error = job.exception()  # waits for it
        if error is not None or not member.finished:
            log = "\n".join(filter(None, [job.stdout(), job.stderr(), str(error or "")]))
            yield member, "\n".join(log.strip().splitlines()[-LOG_LINES:])
