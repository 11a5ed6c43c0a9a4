"""Training of a grid of configs, keys and seeds, each run in a folder of its own.

python -m leanformer.sweep --config=FILE[:ARGUMENT][,FILE] --over=model.num_heads=8,12,16 --seeds=3 --workdir=DIR
      ... [--over=...] [--set=KEY=VALUE] [--cluster=local|slurm] [--parallel=N] [--slurm=gpus_per_node=8]

The runs are the product of the configs, of every --over and of the seeds 0, 1, ... Several keys of one --over move
together: --over=model.num_heads,model.head_dim=2x32,4x16,8x8 varies heads at the same total width. On this machine
--parallel runs execute at once and share its GPUs, or those in CUDA_VISIBLE_DEVICES; SLURM executes them as one job
array. DIR/<run> is an ordinary run. Runs of one shape share compiled programs (DIR/compiled).

Run the same command again to complete a sweep: finished runs are kept, stopped runs resume from their checkpoints, and
failed runs are listed with the last lines of their logs. Values and seeds may be added, and total_steps, total_epochs
or total_tokens raised; any other difference from a run in the folder that can change its result is an error. After
Ctrl-C or SIGTERM the active runs save before the sweep ends. At the end the runs are compared in
DIR/compare/compare.html (`leanformer.compare`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanformer import cli, text
from leanformer.errors import ConfigError


def compare_finished(folder: Path, members: Sequence[Any]) -> None:
    """Compare the finished runs and write the report, or print the reason if they cannot be compared."""
    from leanformer.analysis import comparison, runs
    from leanformer.reports import comparison as report

    if not any(member.finished for member in members):
        return
    try:
        report.write_and_print(comparison.compare(runs.read([str(folder)])), folder / "compare")
    except ConfigError as error:
        print(f"Not compared: {error}")


@cli.command(
    cli.Flag("config", "Config files, each with an optional argument: FILE[:ARGUMENT],FILE.", list, required=True),
    cli.Flag("over", "KEY=VALUE,VALUE,...: config key to vary, with its values.", default=(), many=True),
    cli.Flag("set", "KEY=VALUE: config key with the same value in all runs.", default=(), many=True),
    cli.Flag("seeds", "Number of seeds per point of the grid, counted from 0.", int, default=1, minimum=1),
    cli.Flag("workdir", "Folder that holds one folder per run.", required=True),
    cli.Flag(
        "cluster", "Run on this machine (local) or as a SLURM job array (slurm).", ("local", "slurm"), default="local"
    ),
    cli.Flag("parallel", "Runs at once, on this machine or in the SLURM array.", int, default=1, minimum=1),
    cli.Flag("slurm", "KEY=VALUE: parameter of SLURM's sbatch.", default=(), many=True),
    cli.Flag("minutes", "Time limit per run, in minutes.", int, default=60 * 24, minimum=1),
)
def main(flags: cli.Values) -> int:
    from leanformer.runtime import stopping
    from leanformer.sweeps import runs
    from leanformer.training import run_files

    folder = Path(flags.workdir).expanduser().absolute()
    members = runs.make_runs(flags.config, flags.over, flags.set, flags.seeds, folder)
    try:
        failed = runs.finish(members, folder, flags)
    except KeyboardInterrupt as stopped:
        return stopping.STATUS[stopped.args[0]]
    for member in members:
        if member.finished:
            print(text.wrap(f"  {member.workdir.name}  {member.final_score}", "    "))
    for member, log in failed.items():
        print(f"\nFAILED: {member.workdir}\n  {log.replace(chr(10), chr(10) + '  ')}", file=sys.stderr)
    content = {"members": [member.workdir.name for member in members], "failed": [m.workdir.name for m in failed]}
    run_files.write_json(folder / "sweep.json", content)
    compare_finished(folder, members)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
