"""GLUE, all tasks with several seeds, and its table: `python -m leanformer.glue --init_from=RUN --data=FOLDER
--workdir=DIR [--tasks=cola,sst2,...] [--seeds=5]`

      ... [--config=FILE[:ARGUMENT]] [--set=KEY=VALUE] [--cluster=local|slurm] [--parallel=N] [--slurm=KEY=VALUE]
      [--together]

Fine-tunes the weights of a pre-trained run, with the shape of its model, its tokenizer and a new head, once a task and
seed, by configs/glue.py or another config that takes an argument `task`. Members are ordinary runs in DIR and the same
command goes on where it was stopped, as a sweep does; --together, seeds of a task are one program. Without --init_from
the config's own model starts from scratch, or from what --set=init_from.path=FILE names, and --set=data.tokenizer=FILE
says what it reads by.

The score is that of dev after the last epoch, by each task's own metric, times 100: Matthews of CoLA, F1 of MRPC and
QQP, Pearson of STS-B, else accuracy. Printed are medians over seeds, the lowest and the highest, and the mean of the
columns, as Leaner Transformers' Table 1 has it without MNLI-mm, as Cramming's with it. In DIR is glue.json.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer import cli, config
from leanformer.config.sentences import GLUE, MISMATCHED
from leanformer.data.sentences import open_table
from leanformer.errors import ConfigError
from leanformer.runtime import files, interrupt
from leanformer.tasks import beginnings
from leanformer.training import executor, report
from leanformer.training.grid import Member, members


ORDER = ("mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")  # of the paper's columns
SECOND = "mnli-mm"  # the column of MNLI's other split, `eval.more.mm`


def fixed(f: cli.Values) -> list[str]:
    """KEY=VALUE of all members: data, and of a pre-trained run its weights and the shape that they need.

    Raises:
        ConfigError: --init_from is no run.
    """
    found = {"data.dir": str(Path(f.data).expanduser().absolute())}
    if f.init_from is not None:
        run = beginnings.run_of(f.init_from)
        if run is None:
            raise ConfigError(
                f"--init_from={f.init_from} is no folder of a run. Weights of a file: --set=init_from.path=FILE, with "
                "--set=data.tokenizer=FILE and the keys of their model."
            )
        found |= {"init_from.path": str(run.absolute()), "init_from.new_head": True}
        found |= {f"model.{key}": value for key, value in beginnings.of_model(run).items() if value is not None}
        found |= _lengths(f, report.read_config(run).model.max_length)
    return [*(f"{key}={value}" for key, value in found.items()), *f.set]


def _lengths(f: cli.Values, most: int) -> dict[str, int]:
    """Positions as pre-trained, and rows of no more tokens."""
    return {"model.max_length": most, "data.max_length": min(most, config.load(_with(f, "sst2")).data.max_length)}


def _with(f: cli.Values, task: str) -> str:
    return f"{f.config}{',' if ':' in f.config else ':'}task={task}"


def check_data(names: Sequence[str], folder: str) -> None:
    """Raises DataError for the first table that cannot be used, before anything is trained on another."""
    for name in names:
        known = GLUE[name]
        for split in ("train", known.dev, *((MISMATCHED,) * (name == "mnli"))):
            open_table(name, split, dir=folder, numbers=known.outputs == 1)


def columns(found: Mapping[tuple[str, int], Member]) -> dict[str, dict[int, float | None]]:
    """By column and seed, the scores of members that have ended; None for what is not finite."""
    told: dict[str, dict[int, float | None]] = {}
    for (task, seed), member in found.items():
        if not member.finished:
            continue
        told.setdefault(task, {})[seed] = files.read_json(member.workdir / "summary.json")["score"]["score"]
        others = [r for r in report.read_records(member.workdir / "metrics.jsonl") if r["kind"] == "eval mm"]
        if others:
            told.setdefault(SECOND, {})[seed] = others[-1]["accuracy"]
    return told


def means(told: Mapping[str, Mapping[int, float | None]]) -> dict[str, dict[str, Any]]:
    """The mean of the columns, by which they are: of their medians, and of each seed that all of them have."""
    found = {}
    for name, left_out in (("mean", SECOND), ("mean with mnli-mm", None)):
        chosen = {column: scores for column, scores in told.items() if column != left_out}
        if (name != "mean" and SECOND not in told) or any(None in scores.values() for scores in chosen.values()):
            continue
        seeds = sorted(set.intersection(*(set(scores) for scores in chosen.values())))
        by_seed = {seed: statistics.fmean(scores[seed] for scores in chosen.values()) for seed in seeds}
        medians = [statistics.median(scores.values()) for scores in chosen.values()]
        found[name] = {"columns": [*chosen], "of_medians": statistics.fmean(medians), "by_seed": by_seed}
    return found


def table(told: Mapping[str, Mapping[int, float | None]], seeds: int) -> str:
    """A line a column, then the means."""
    lines = [f"  {'':<18} {'metric':<9} {'median':>7} {'lowest':>7} {'highest':>7}  seeds"]
    for column, scores in told.items():
        known = [100 * score for score in scores.values() if score is not None]
        metric = "accuracy" if column == SECOND else GLUE[column].score
        shown = [statistics.median(known), min(known), max(known)] if known else []
        broken = f", {len(scores) - len(known)} not finite" * (len(known) < len(scores))
        numbers = " ".join(f"{x:7.2f}" for x in shown) or f"{'':>23}"
        lines.append(f"  {column:<18} {metric:<9} {numbers}  {len(known)} of {seeds}{broken}")
    for name, mean in means(told).items():
        by_seed = [100 * score for score in mean["by_seed"].values()]
        spread = f" {min(by_seed):7.2f} {max(by_seed):7.2f}" if by_seed else f" {'':>15}"
        title = f"{name}, of {len(mean['columns'])}"
        lines.append(f"  {title:<28} {100 * mean['of_medians']:7.2f}{spread}  {len(by_seed)} of {seeds}")
    return "\n".join(lines)


@cli.command(
    cli.Flag("init_from", "Folder of a pre-trained run; from scratch if not given."),
    cli.Flag("config", "Config file that takes an argument task.", default="glue"),
    cli.Flag("data", "Folder of GLUE's download: SST-2/train.tsv, ...", default="data/glue"),
    cli.Flag("tasks", f"Those wanted of {', '.join(ORDER)}.", list, default=[*ORDER]),
    cli.Flag("set", "KEY=VALUE: a config key that is the same in all members.", default=(), many=True),
    cli.Flag("seeds", "Seeds of each task, from 0.", int, default=5),
    *executor.FLAGS,
)
def main(f: cli.Values) -> int:
    folder = Path(f.workdir).expanduser().absolute()
    if unknown := [name for name in f.tasks if name not in GLUE]:
        raise ConfigError(f"--tasks={','.join(f.tasks)}: {unknown[0]} is none of {', '.join(ORDER)}.")
    same = fixed(f)
    found = {}
    for task in (name for name in ORDER if name in f.tasks):
        found |= {(task, i): one for i, one in enumerate(members([_with(f, task)], [], same, f.seeds, folder))}
    check_data([*dict.fromkeys(task for (task, _), one in found.items() if not one.finished)], f.data)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        failed = executor.finish([*found.values()], folder, f)
    except KeyboardInterrupt as stopped:
        return interrupt.STATUS[stopped.args[0]]
    executor.tell(failed)
    told = columns(found)
    asked, names = {"config": f.config, "set": same}, [one.workdir.name for one in failed]
    content = {"asked": asked, "scores": told, "means": means(told), "failed": names}
    report.write_json(folder / "glue.json", content)
    if told:
        print(f"GLUE's dev after the last epoch, times 100; {folder / 'glue.json'}\n{table(told, f.seeds)}")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
