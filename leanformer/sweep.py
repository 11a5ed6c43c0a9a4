"""Train every member of a grid, each with the ordinary command in a folder of its own.

python -m leanformer.sweep --config=FILE[:ARGUMENT][,FILE] --over=model.num_heads=8,12,16 --seeds=3 --workdir=DIR
      ... [--over=...] [--set=KEY=VALUE] [--cluster=local|slurm] [--parallel=N] [--slurm=gpus_per_node=8] [--together]

Members are the product of the configs, every --over and the seeds 0, 1, ... The local executor runs --parallel of them
at once, with the GPUs of CUDA_VISIBLE_DEVICES=0,1,... shared out among them; SLURM gets them as one array. Run the same
command again to finish what is missing: finished members are left alone, stopped ones go on from their checkpoints, and
failed ones are listed with the end of their log. Ctrl-C and SIGTERM end it when the members that run have saved.
With --together, members that differ in seed and learning rates alone are one program (`leanformer.together`), which
small models need to fill a device. Nothing is decided here but what to run: DIR/<member> is a run like any other. It
ends with DIR/compare/compare.html: which of them are different (`leanformer.compare`).
"""

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

from leanformer import cli
from leanformer.errors import ConfigError
from leanformer.reports import comparison
from leanformer.runtime import files, interrupt, squeue
from leanformer.studies import comparison as studies
from leanformer.studies import runs
from leanformer.training import checks, report, scores
from leanformer.training.grid import Group, Member, grouped, members, pair


LOG_LINES = 15  # of a failed member's log
Unit = Member | Group
CPUS = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'  # or, from SLURM 22.05 on, srun gives a task one


def check(found: Sequence[Member]) -> None:
    """Raises ConfigError on the first config that cannot work, by its member's name. One seed speaks for all."""
    points = {member.words[:-1]: member for member in reversed(found)}
    for member in reversed(points.values()):
        try:
            checks.check(cli.parse([cli.CONFIG], member.words).config)
        except ConfigError as error:
            raise ConfigError(f"{member.workdir.name}: {error}\nNo member was started.") from error


def run(wanted: Sequence[Unit], logs: Path, f: cli.Values) -> dict[Unit, str]:
    """Runs members, at most --parallel at once, and returns the failed ones with the end of their logs."""
    executor = submitit.AutoExecutor(folder=logs, cluster=f.cluster)
    parameters = {f"slurm_{key}": value for key, value in (pair(text, "--slurm") for text in f.slurm)}
    executor.update_parameters(timeout_min=f.minutes, name="leanformer", **parameters)
    if f.cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=f.parallel, slurm_setup=[CPUS])
        if not squeue.accounts():
            submitit.SlurmJob.watcher = squeue.Watcher()
        with executor.batch():
            jobs = {member: executor.submit(_train, member.command) for member in wanted}
        array = next(iter(jobs.values())).job_id.partition("_")[0]
        print(f"SLURM array {array} of {len(jobs)} members; logs in {logs}.", flush=True)
        return dict(_failures(jobs))
    places = environments(os.environ, f.parallel)
    with _answered(_stop, signal.SIGINT, signal.SIGTERM):  # whatever started this may have had them ignored
        return _run_here(executor, wanted, places)


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
                job = executor.submit(_train, member.command, places[place])
            print(f"Started {member.workdir.name}", flush=True)
            running[place] = jobs[member] = job
        return dict(_failures(jobs))
    except KeyboardInterrupt:
        left = [job for job in jobs.values() if not job.done()]
        print(f"Stopping: {len(left)} running, which save first. Run the same command again to go on.", flush=True)
        for job in left:
            os.kill(int(job.job_id), signal.SIGTERM)  # submitit hands it on to `_train`
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


def _train(command: list[str], environ: dict[str, str] | None = None) -> None:
    """What submitit runs: the command in a process of its own, told to save when submitit or SLURM wants an end.

    The environment is ours, since submitit's local executor hides all GPUs.
    """
    with subprocess.Popen(command, env=environ) as process:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
        status = process.wait()
    print(f"Ended with status {status}.", file=sys.stderr)


def _failures(jobs: Mapping[Unit, Any]) -> Iterator[tuple[Unit, str]]:
    for member, job in jobs.items():
        error = job.exception()  # waits for it
        if error is not None or not member.finished:
            log = "\n".join(filter(None, [job.stdout(), job.stderr(), str(error or "")]))
            yield member, "\n".join(log.strip().splitlines()[-LOG_LINES:])


def table(found: Sequence[Member]) -> str:
    """One line a finished member: its name, final accuracy and loss."""
    lines = []
    for member in found:
        if member.finished:
            summary = files.read_json(member.workdir / "summary.json")
            final, (score, _) = summary["final"], scores.read(summary.get("score", {"top1": None}))
            shown = "  ".join(f"{key} {final[key]:.4f}" for key in dict.fromkeys((score.name, "loss")) if key in final)
            lines.append(f"  {member.workdir.name:<60} {shown}")
    return "\n".join(lines)


def _compare(folder: Path, found: Sequence[Member]) -> None:
    """Ends a sweep with what its members say together; where they cannot be compared, with the reason."""
    if not any(member.finished for member in found):
        return
    try:
        known = runs.read([str(folder)])
        comparison.tell(studies.compare(known), folder / "compare")
    except ConfigError as error:
        print(f"Not compared: {error}")


@cli.command(
    cli.Flag("config", "Config files, each with its argument: FILE[:ARGUMENT],FILE.", list, default=()),
    cli.Flag("over", "KEY=VALUE,VALUE,...: a config key and what it takes in turn.", default=(), many=True),
    cli.Flag("set", "KEY=VALUE: a config key that is the same in all members.", default=(), many=True),
    cli.Flag("seeds", "Seeds of each point of the grid, from 0.", int, default=1),
    cli.Flag("workdir", "Folder of the members.", required=True, writes=True),
    cli.Flag("cluster", "Where to run them.", ("local", "slurm"), default="local"),
    cli.Flag("parallel", "Members at once: processes here, or tasks of the SLURM array.", int, default=1),
    cli.Flag("slurm", "KEY=VALUE: a parameter of SLURM's sbatch.", default=(), many=True),
    cli.Flag("together", "Train members that differ in seed and rates alone as one program.", bool, default=False),
    cli.Flag("minutes", "Time limit of a member.", int, default=60 * 24),
)
def main(f: cli.Values) -> int:
    folder = Path(f.workdir).expanduser().absolute()
    found = members(f.config, f.over, f.set, f.seeds, folder)
    wanted = [member for member in found if not member.finished]
    check(wanted)
    print(f"{len(found)} members, {len(found) - len(wanted)} finished already, {len(wanted)} to run in {folder}.")
    try:
        units = grouped(wanted) if f.together else wanted
        logs = run(units, folder / "logs", f) if wanted else {}
    except KeyboardInterrupt as stopped:
        return interrupt.STATUS[stopped.args[0]]
    failed = {member: log for unit, log in logs.items() for member in unit.members if not member.finished}
    print(table(found))
    for member, log in failed.items():
        print(f"\nFAILED: {member.workdir}\n  {log.replace(chr(10), chr(10) + '  ')}", file=sys.stderr)
    content = {"members": [member.workdir.name for member in found], "failed": [m.workdir.name for m in failed]}
    report.write_json(folder / "sweep.json", content)
    _compare(folder, found)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
