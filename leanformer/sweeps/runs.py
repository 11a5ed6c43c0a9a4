"""Runs of a sweep: made from the grid, and executed in child processes on this machine or as one SLURM array."""

import dataclasses
import functools
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from leanformer import cli, tasks, text
from leanformer.config import find_file, is_run_only
from leanformer.config.key_docs import split_values
from leanformer.config.rules import LENGTHS
from leanformer.costs.count import format_count
from leanformer.errors import ConfigError
from leanformer.runtime import files, mesh, stopping
from leanformer.tasks import Score
from leanformer.text import lookup
from leanformer.training import model_setup, run_files, train_setup


LOG_LINES = 15  # lines shown from the log of a failed run
ARRAY_SCRIPT = """#!/bin/bash
eval "exec $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {commands})"
"""


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """Run of a sweep."""

    workdir: Path
    words: tuple[str, ...]  # of the training command: --config=FILE, then --config.KEY=VALUE with the seed last

    @property
    def finished(self) -> bool:
        """True if the folder has a summary.json, which is written at the end of training."""
        return (self.workdir / "summary.json").is_file()

    @property
    def final_score(self) -> str:
        """Final score and loss as text, as far as the run recorded them; empty if it has not finished."""
        if not self.finished:
            return ""
        summary = files.read_json(self.workdir / "summary.json")
        final, score = summary["final"], Score.read(summary["score"])
        names = [name for name in dict.fromkeys((score.name, "loss")) if final.get(name) is not None]
        return "  ".join(f"{lookup(name).label} {text.format_value(name, final[name])}" for name in names)

    @functools.cached_property
    def config(self) -> ConfigDict:
        """Config of the run, not validated yet."""
        config = cli.parse([cli.CONFIG], self.words).config
        tasks.resolve(config)
        return config

    @property
    def command(self) -> list[str]:
        """Words of the command that trains the run."""
        return [sys.executable, "-m", "leanformer.train", *self.words, f"--workdir={self.workdir}"]


def make_runs(
    configs: Sequence[str], over: Sequence[str], fixed: Sequence[str], seeds: int, folder: Path
) -> list[SweepRun]:
    """Return one run per point of the grid and seed, in a folder such as "quickstart,num_heads=8,seed=0".

    The arguments are the values of the command's flags. Raises ConfigError if a file does not exist, a key is given
    twice or is the seed, or two runs would have the same folder.
    """
    axes = [_parse_over(text) for text in over]
    same = [parse_assignment(text, "--set") for text in fixed]
    keys = [*(key for key, _ in same), *(key for points in axes for key in points[0]), "seed"]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]} is given twice. Pass all its values in one --over, and seeds as --seeds=N.")
    axes.append([{"seed": str(seed)} for seed in range(seeds)])
    common = tuple(f"--config.{key}={value}" for key, value in same)
    result = []
    for config, points in itertools.product(_join_arguments(configs), itertools.product(*axes)):
        file, *argument = config.split(":", 1)
        changes = {key: value for point in points for key, value in point.items()}
        values = [f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()]
        words = tuple(f"--config.{key}={value}" for key, value in changes.items())
        config = ":".join([str(find_file(file).absolute()), *argument])
        name = ",".join([Path(file).stem, *argument, *values]).replace("/", "_")  # a value may be a path
        result.append(SweepRun(folder / name, (f"--config={config}", *common, *words)))
    names = [member.workdir.name for member in result]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two runs of the sweep would have the folder {twice[0]}. Give each value once, rename a config file, or "
            "vary only one key ending in the same word with --over."
        )
    return result


def _parse_over(text: str) -> list[dict[str, str]]:
    """Return the points of one --over; "model.num_heads,model.head_dim=2x32,4x16" has two of two keys each."""
    names, values = parse_assignment(text, "--over")
    keys = names.split(",")
    points = [value.split("x") if len(keys) > 1 else [value] for value in split_values(values)]
    if wrong := [point for point in points if len(point) != len(keys) or not all(point)]:
        raise ConfigError(
            f"--over={text}: {'x'.join(wrong[0])} is not one value for each of {len(keys)} keys. Join them by x, as in "
            "--over=model.num_heads,model.head_dim=2x32,4x16."
        )
    return [dict(zip(keys, point, strict=True)) for point in points]


def _join_arguments(parts: Sequence[str]) -> list[str]:
    """Return config files with their arguments, which were split at commas: "a:x=1", "y=2" becomes "a:x=1,y=2"."""
    configs: list[str] = []
    for part in parts:
        head = part.partition(":")[0]
        if configs and "=" in head and not head.endswith(".py"):
            configs[-1] += f",{part}"
        else:
            configs.append(part)
    return configs


def parse_assignment(text: str, flag: str) -> tuple[str, str]:
    """Return the key and the value in a flag's value KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ConfigError(f'{flag}="{text}" is not KEY=VALUE.')
    return key, value


def select_unfinished(members: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the runs to execute: unfinished or longer ones. Raises ConfigError if a folder holds a different run."""
    pending = []
    for member in members:
        started = member.finished or (member.workdir / "config.json").is_file()
        changes = run_files.config_changes(member.workdir, member.config) if started else {}
        changes = {key: ends for key, ends in changes.items() if not is_run_only(key)}
        longer = {
            key: ends for key, ends in changes.items() if key in LENGTHS and None not in ends and ends[1] > ends[0]
        }
        if other := [f"{key}={was}, now {now}" for key, (was, now) in changes.items() if key not in longer]:
            raise ConfigError(
                f"{member.workdir} holds a run with a different config: {'; '.join(other)}. Use another --workdir, or "
                "delete this folder to train the run again. No run was started."
            )
        for key, (was, now) in longer.items():
            print(f"{member.workdir.name} is extended: {key} {was} -> {now}")
        if longer or not member.finished:
            pending.append(member)
    return pending


def check(members: Sequence[SweepRun]) -> None:
    """Raise ConfigError for the first run whose config or model is invalid; seeds are not checked one by one."""
    points = {member.words[:-1]: member for member in reversed(members)}
    for member in reversed(points.values()):
        try:
            train_setup.check(member.config)
            model_setup.abstract_model(member.config)
        except ConfigError as error:
            raise ConfigError(f"{member.workdir.name}: {error}\nNo run was started.") from error


def finish(members: Sequence[SweepRun], folder: Path, flags: cli.Values) -> dict[SweepRun, str]:
    """Execute all runs that `select_unfinished` returns, and return the failed ones with the ends of their logs.

    All runs share JAX's persistent compilation cache in folder/compiled. JAX's key of a program contains the versions,
    flags and features of the CPU or the kind of GPU, so no machine loads the code of another kind. Raises ConfigError
    before any run starts, and KeyboardInterrupt with the signal's number after a stop, when active runs have saved.
    """
    if flags.slurm and flags.cluster != "slurm":
        raise ConfigError(f"--slurm={flags.slurm[0]}: --cluster={flags.cluster} does not use it. Pass --cluster=slurm.")
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
    free, waiting, begun = environments(environment, flags.parallel), [*pending], time.monotonic()
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


def environments(environment: Mapping[str, str], parallel: int) -> list[dict[str, str]]:
    """Return the environments of `parallel` runs, with an equal share of CUDA_VISIBLE_DEVICES, by default all GPUs.

    Raises ConfigError if there are fewer GPUs than runs, each of which would take most of a GPU's memory, unless one of
    JAX's variables for its memory is set. Without GPUs, or with JAX_PLATFORMS=cpu, runs share the CPU.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(mesh.count_gpus()))))
    gpus = [gpu for gpu in visible.split(",") if gpu not in ("", "-1") and environment.get("JAX_PLATFORMS") != "cpu"]
    count = len(gpus) // parallel
    if gpus and not count and not any("XLA_PYTHON_CLIENT" in name for name in environment):
        raise ConfigError(
            f"--parallel={parallel}, but {format_count(len(gpus), 'GPU')}, of which each run takes most of the memory. "
            "Lower it, or set XLA_PYTHON_CLIENT_MEM_FRACTION to share a GPU."
        )
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
