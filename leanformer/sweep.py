"""Train every member of a grid, each with the ordinary command in a folder of its own.

python -m leanformer.sweep --config=FILE[:ARGUMENT][,FILE] --over=model.num_heads=8,12,16 --seeds=3 --workdir=DIR
      ... [--over=...] [--set=KEY=VALUE] [--cluster=local|slurm] [--parallel=N] [--slurm=gpus_per_node=8] [--vmap]

Members are the product of the configs, every --over and the seeds 0, 1, ... The local executor runs --parallel of them
at once, with the GPUs of CUDA_VISIBLE_DEVICES=0,1,... shared out among them; SLURM gets them as one array. Run the same
command again to finish what is missing: finished members are left alone, stopped ones go on from their checkpoints, and
failed ones are listed with the end of their log. Points and seeds may be added, and total_steps or total_epochs raised;
else a member that was asked something else is refused. Ctrl-C and SIGTERM end it when those that run have saved.
With --vmap, members that differ in seed and learning rates alone are one program (`leanformer.train_vmap`), which
small models need to fill a device. Nothing is decided here but what to run: DIR/<member> is a run like any other. It
ends with DIR/compare/compare.html: which of them are different (`leanformer.compare`).
"""

from collections.abc import Sequence
from pathlib import Path

from leanformer import cli
from leanformer.analysis import comparison as analysis
from leanformer.analysis import runs
from leanformer.errors import ConfigError
from leanformer.reports import comparison
from leanformer.runtime import files, interrupt
from leanformer.sweeps import executor
from leanformer.sweeps.grid import Member, members
from leanformer.tasks import scores
from leanformer.training import report


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
        comparison.tell(analysis.compare(known), folder / "compare")
    except ConfigError as error:
        print(f"Not compared: {error}")


@cli.command(
    cli.Flag("config", "Config files, each with its argument: FILE[:ARGUMENT],FILE.", list, default=()),
    cli.Flag("over", "KEY=VALUE,VALUE,...: a config key and what it takes in turn.", default=(), many=True),
    cli.Flag("set", "KEY=VALUE: a config key that is the same in all members.", default=(), many=True),
    cli.Flag("seeds", "Seeds of each point of the grid, from 0.", int, default=1),
    *executor.FLAGS,
)
def main(f: cli.Values) -> int:
    folder = Path(f.workdir).expanduser().absolute()
    found = members(f.config, f.over, f.set, f.seeds, folder)
    try:
        failed = executor.finish(found, folder, f)
    except KeyboardInterrupt as stopped:
        return interrupt.STATUS[stopped.args[0]]
    print(table(found))
    executor.tell(failed)
    content = {"members": [member.workdir.name for member in found], "failed": [m.workdir.name for m in failed]}
    report.write_json(folder / "sweep.json", content)
    _compare(folder, found)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
