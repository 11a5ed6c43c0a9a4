"""Train every member of a grid, each with the ordinary command in a folder of its own.

python -m leanformer.sweep --config=FILE[,FILE] --over=model.num_heads=8,12,16 [--over=...] --seeds=3 --workdir=DIR
      ... [--set=KEY=VALUE] [--cluster=local|slurm] [--parallel=N] [--slurm=partition=gpu] [--slurm=gpus_per_node=8]

Members are the product of the configs, every --over and the seeds 0, 1, ... The local executor runs --parallel of them
at once; SLURM gets them as one array. Run the same command again to finish what is missing: finished members are left
alone, stopped ones go on from their checkpoints, and failed ones are listed with the end of their log. Nothing is
decided here but what to run: DIR/<member> is a run like any other.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from leanformer import cli, report
from leanformer.errors import ConfigError


LOG_LINES = 15  # of a failed member's log


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    workdir: Path
    words: tuple[str, ...]  # of the training command

    @property
    def finished(self) -> bool:
        return (self.workdir / "summary.json").is_file()

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "leanformer.train", *self.words, f"--workdir={self.workdir}"]


def members(
    configs: Sequence[str], over: Sequence[str], fixed: Sequence[str], seeds: int, folder: Path
) -> list[Member]:
    """Every point of the grid, by a name that says what it is.

    Raises:
        ConfigError: no config file, or a flag that is not KEY=VALUE.
    """
    files = [Path(file) for file in configs]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files or seeds < 1:
        raise ConfigError(f"--config: {', '.join(missing) or 'none'} cannot be found, --seeds={seeds}: at least 1.")
    grid = {}
    for text in over:
        key, values = _pair(text, "--over")
        grid[key] = values.split(",")
    grid["seed"] = [str(seed) for seed in range(seeds)]
    same = tuple("--config.{}={}".format(*_pair(text, "--set")) for text in fixed)
    found = []
    for file, *point in itertools.product(files, *grid.values()):
        changes = dict(zip(grid, point, strict=True))
        name = ",".join([file.stem, *(f"{key.rpartition('.')[2]}={value}" for key, value in changes.items())])
        words = tuple(f"--config.{key}={value}" for key, value in changes.items())
        found.append(Member(folder / name, (f"--config={file.absolute()}", *same, *words)))
    if len({member.workdir for member in found}) < len(found):
        raise ConfigError("Two members have the same name: config files, or last parts of --over keys, are alike.")
    return found


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ConfigError(f'{flag}="{text}" is not KEY=VALUE.')
    return key, value


def run(wanted: Sequence[Member], logs: Path) -> dict[Member, str]:
    """Runs members, at most --parallel at once, and returns the failed ones with the end of their logs."""
    import submitit

    executor = submitit.AutoExecutor(folder=logs, cluster=flags.FLAGS.cluster)
    parameters = {f"slurm_{key}": value for key, value in (_pair(text, "--slurm") for text in flags.FLAGS.slurm)}
    executor.update_parameters(timeout_min=flags.FLAGS.minutes, name="leanformer", **parameters)
    if flags.FLAGS.cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=flags.FLAGS.parallel)
        with executor.batch():
            jobs = [(member, executor.submit(_call(member))) for member in wanted]
        print(f"SLURM array {jobs[0][1].job_id.partition('_')[0]} of {len(jobs)} members; logs in {logs}.", flush=True)
        return dict(_failures(jobs))
    failed, running = {}, []
    with contextlib.ExitStack() as stack:
        for member in wanted:
            while len(running) >= flags.FLAGS.parallel:
                time.sleep(0.2)
                running = [(m, job) for m, job in running if not job.done()]
            job = executor.submit(_call(member))
            stack.callback(job.cancel)  # an interrupted sweep leaves nobody running behind
            print(f"Started {member.workdir.name}", flush=True)
            running.append((member, job))
            failed[member] = job
        return dict(_failures(list(failed.items())))


def _call(member: Member):
    import submitit

    return submitit.helpers.CommandFunction(member.command, verbose=True)


def _failures(jobs: Sequence[tuple[Member, object]]) -> Iterator[tuple[Member, str]]:
    for member, job in jobs:
        error = job.exception()  # waits for it
        if error is not None or not member.finished:
            log = "\n".join(filter(None, [job.stdout(), job.stderr(), str(error or "")]))
            yield member, "\n".join(log.strip().splitlines()[-LOG_LINES:])


def table(found: Sequence[Member]) -> str:
    """One line a finished member: its name, final accuracy and loss."""
    lines = []
    for member in found:
        if member.finished:
            final = json.loads((member.workdir / "summary.json").read_text())["final"]
            shown = "  ".join(f"{key} {final[key]:.4f}" for key in ("top1", "loss") if key in final)
            lines.append(f"  {member.workdir.name:<60} {shown}")
    return "\n".join(lines)


def main() -> int:
    folder = Path(flags.FLAGS.workdir).expanduser().absolute()
    found = members(flags.FLAGS.config, flags.FLAGS.over, flags.FLAGS.set, flags.FLAGS.seeds, folder)
    wanted = [member for member in found if not member.finished]
    print(f"{len(found)} members, {len(found) - len(wanted)} finished already, {len(wanted)} to run in {folder}.")
    failed = run(wanted, folder / "logs") if wanted else {}
    print(table(found))
    for member, log in failed.items():
        print(f"\nFAILED: {member.workdir}\n  {log.replace(chr(10), chr(10) + '  ')}", file=sys.stderr)
    content = {"members": [member.workdir.name for member in found], "failed": [m.workdir.name for m in failed]}
    report.write_json(folder / "sweep.json", content)
    return 1 if failed else 0


if __name__ == "__main__":
    flags.DEFINE_list("config", [], "Config files.")
    flags.DEFINE_multi_string("over", [], "KEY=VALUE,VALUE,...: a config key and what it takes in turn.")
    flags.DEFINE_multi_string("set", [], "KEY=VALUE: a config key that is the same in all members.")
    flags.DEFINE_integer("seeds", 1, "Seeds of each point of the grid, from 0.")
    flags.DEFINE_string("workdir", None, "Folder of the members.", required=True)
    flags.DEFINE_enum("cluster", "local", ["local", "slurm"], "Where to run them.")
    flags.DEFINE_integer("parallel", 1, "Members at once: processes here, or tasks of the SLURM array.")
    flags.DEFINE_multi_string("slurm", [], "KEY=VALUE: a parameter of SLURM's sbatch.")
    flags.DEFINE_integer("minutes", 60 * 24, "Time limit of a member.")
    cli.run(main)
