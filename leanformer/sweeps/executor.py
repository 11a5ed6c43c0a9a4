"""Execution of the runs of a sweep: in child processes on this machine, or as one SLURM array."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from leanformer import cli
from leanformer.costs.count import format_count
from leanformer.errors import ConfigError
from leanformer.runtime import stopping, text
from leanformer.sweeps.grid import SweepRun, parse_assignment, select_unfinished
from leanformer.training import train_setup


LOG_LINES = 15  # lines shown from the log of a failed run
ARRAY_SCRIPT = """#!/bin/bash
eval "exec $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {commands})"
"""


def check(members: Sequence[SweepRun]) -> None:
    """Raise ConfigError for the first run with an invalid config; runs that differ only in the seed are one check."""
    points = {member.words[:-1]: member for member in reversed(members)}
    for member in reversed(points.values()):
        try:
            train_setup.check(member.config)
        except ConfigError as error:
            raise ConfigError(f"{member.workdir.name}: {error}\nNo run was started.") from error


def finish(members: Sequence[SweepRun], folder: Path, flags: cli.Values) -> dict[SweepRun, str]:
    """Execute all unfinished runs, and finished ones that are to train longer (`select_unfinished`).

    Prints the progress. All runs share JAX's persistent compilation cache in folder/compiled, so that a program that
    several of them need is compiled once. JAX's key of a program contains the versions, flags and features of the CPU
    or the kind of GPU, so no machine loads the code of another kind. JAX_COMPILATION_CACHE_DIR sets another cache.

    Args:
        members: runs of the sweep.
        folder: folder of the sweep; logs are written to folder/logs.
        flags: flags of a command, with those of `sweep`.

    Returns:
        The failed runs, each with the last lines of its log.

    Raises:
        ConfigError: a flag or a config is invalid, a folder belongs to a different run, or SLURM refused the job array;
            no run was started.
        KeyboardInterrupt: a stop was requested; the argument is the signal's number. Active runs have saved.
    """
    if flags.slurm and flags.cluster != "slurm":
        raise ConfigError(f"--slurm={flags.slurm[0]}: --cluster={flags.cluster} does not use it. Pass --cluster=slurm.")
    if flags.cluster == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError("--cluster=slurm: sbatch was not found. Run the command on a node of the cluster.")
    pending = select_unfinished(members)
    check(pending)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    number = format_count(len(members), "run")
    print(text.wrap(f"{number} in {folder}: {len(members) - len(pending)} already finished, {len(pending)} to run."))
    if pending:
        environment = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **os.environ}
        print(f"Logs in {logs}.", flush=True)
        (_run_as_array if flags.cluster == "slurm" else _run_here)(pending, logs, environment, flags)
    return {member: _end_of_log(member, logs) for member in pending if not member.finished}


def print_failures(failed: Mapping[SweepRun, str]) -> None:
    """Print failed runs, each with the last lines of its log, to the standard error."""
    for member, log in failed.items():
        print(f"\nFAILED: {member.workdir}\n  {log.replace(chr(10), chr(10) + '  ')}", file=sys.stderr)


def _log_file(member: SweepRun, logs: Path) -> Path:
    return logs / f"{member.workdir.name}.log"


def _end_of_log(member: SweepRun, logs: Path) -> str:
    log = _log_file(member, logs)
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else ["It was not started."]
    return "\n".join(lines[-LOG_LINES:])


def _run_as_array(pending: Sequence[SweepRun], logs: Path, environment: Mapping[str, str], flags: cli.Values) -> None:
    """Submit one SLURM array, and wait for its end. SLURM sends SIGTERM before the time limit, and the runs save."""
    commands = logs / "commands.txt"
    lines = [f"{shlex.join(member.command)} >{shlex.quote(str(_log_file(member, logs)))} 2>&1" for member in pending]
    commands.write_text("\n".join(lines) + "\n")
    words = ["sbatch", "--wait", f"--array=0-{len(pending) - 1}%{flags.parallel}", f"--time={flags.minutes}"]
    words += ["--job-name=leanformer", "--signal=B:TERM@90", f"--output={logs}/slurm_%a.log"]
    given = [parse_assignment(text, "--slurm") for text in flags.slurm]
    words += [f"--{key.replace('_', '-')}={value}" for key, value in given]
    script = logs / "array.sh"
    script.write_text(ARRAY_SCRIPT.format(commands=shlex.quote(str(commands))))
    with subprocess.Popen([*words, script], env=dict(environment), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        submitted = process.stdout.readline()
        if not submitted:
            raise ConfigError(f"SLURM refused the job array; its reason is above ({' '.join(words)}).")
        print(submitted.strip(), flush=True)
        for member in pending:
            _forget_summary(member)


def _run_here(pending: Sequence[SweepRun], logs: Path, environment: Mapping[str, str], flags: cli.Values) -> None:
    """Execute runs on this machine. After a stop signal, let the active runs save, then raise KeyboardInterrupt."""
    free, waiting, begun = divide_gpus(environment, flags.parallel), [*pending], time.monotonic()
    running: dict[subprocess.Popen[bytes], tuple[SweepRun, dict[str, str]]] = {}
    for number in stopping.handled():
        signal.signal(number, _stop)
    try:
        while waiting or running:
            while waiting and free:
                member, place = waiting.pop(0), free.pop(0)
                running[_start(member, logs, place)] = member, place
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                member, place = running.pop(process)
                free.append(place)
                ended = len(pending) - len(waiting) - len(running)
                print(text.wrap(_progress_line(member, ended, len(pending), time.monotonic() - begun)), flush=True)
    except KeyboardInterrupt:
        number = format_count(len(running), "active run")
        print(f"Stopping: saving {number} first. Run the same command again to resume.", flush=True)
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise


def _start(member: SweepRun, logs: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own, since a terminal sends Ctrl-C to all processes of one."""
    _forget_summary(member)
    command = [sys.executable, "-m", "leanformer.sweeps.child", *member.command]
    with _log_file(member, logs).open("wb") as log:
        return subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log, start_new_session=True)


def _forget_summary(member: SweepRun) -> None:
    """Delete summary.json, so that a run that is extended does not keep the shorter run's if it fails."""
    (member.workdir / "summary.json").unlink(missing_ok=True)


def divide_gpus(environment: Mapping[str, str], parallel: int) -> list[dict[str, str]]:
    """Return the environments of `parallel` runs, with the GPUs in CUDA_VISIBLE_DEVICES divided evenly between them.

    Each is a copy of `environment`. If the variable names fewer GPUs than runs, all are equal.
    """
    gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    count = len(gpus) // parallel
    if not count:
        return [dict(environment)] * parallel
    shares = (gpus[i * count : (i + 1) * count] for i in range(parallel))
    return [{**environment, "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _progress_line(member: SweepRun, ended: int, total: int, seconds: float) -> str:
    """Return the line about a run that ended: its score, and the time left if all take as long as those so far."""
    parts = [f"[{ended}/{total}] {member.workdir.name}", member.final_score or "failed"]
    if ended < total:
        parts.append(f"about {text.format_duration(seconds / ended * (total - ended))} left")
    return "  ".join(parts)


def _stop(number: int, _: Any) -> NoReturn:
    raise KeyboardInterrupt(number)
