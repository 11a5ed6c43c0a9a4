"""GLUE scores of a pre-trained model: all tasks with several seeds, as one sweep, and a table.

    python -m study.trained.glue --init_from=RUN --data=data/glue --workdir=DIR [--tasks=cola,sst2,...] [--seeds=5] ...

2026-11-22. Not yet run at full size; pretraining.py has results of a small BERT.

Fine-tunes the weights of a pre-trained run with its architecture, its tokenizer and a new head by configs/glue.py. The
score is of the dev split after the last epoch, by the metric of the task, times 100: Matthews for CoLA, F1 for
MRPC and QQP, Pearson for STS-B, otherwise accuracy. Prints the median over seeds, lowest and highest, and the mean over
tasks: without MNLI-mm as in Table 1 of Leaner Transformers, with it as in Cramming. Other arguments are passed to
`leanformer.sweep`: --parallel=N, --set=KEY=VALUE. Without --init_from, the config's model is trained from
scratch.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer import config
from leanformer.config.texts import GLUE
from leanformer.errors import ConfigError
from leanformer.runtime import files
from leanformer.training import run_files
from study import common


ORDER = ("mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")  # columns of the paper
SECOND = "mnli-mm"  # the column of MNLI's other split, `eval.more.mm`
Scores = Mapping[str, Mapping[int, float | None]]  # by column and seed; None if not finite

# Keys of a model that affect no weight, or only weights above the blocks.
FREE_KEYS = {"num_classes", "pool", "pooler_dim", "transform", "head_bias", "packed", "dropout", "drop_path", "remat"}
FREE_KEYS |= {"unroll", "backend", "max_length"}


def settings(run: Path | None) -> dict[str, Any]:
    """Return the config keys that follow from a pre-trained run. Raise ConfigError if the folder is not of a run."""
    if run is None:
        return {}
    if not (run / "config.json").is_file():
        raise ConfigError(f"--init_from={run} is not the folder of a run.")
    model = run_files.load_config(run).model.to_dict()
    length = model["max_length"]
    keys = {f"model.{key}": x for key, x in model.items() if key not in FREE_KEYS and x is not None}
    keys |= {"model.max_length": length, "data.max_length": min(length, config.load("glue").data.max_length)}
    return keys | {"init_from.path": str(run.absolute()), "init_from.new_head": True}


def read(folder: Path) -> Scores:
    """Return the scores of finished runs of a sweep."""
    scores: dict[str, dict[int, float | None]] = {}
    for path in sorted(folder.glob("*/summary.json")):
        name = common.parse_run_name(path.parent)
        task, seed = name["task"], int(name["seed"])
        scores.setdefault(task, {})[seed] = files.read_json(path)["score"]["score"]
        if mismatched := run_files.read_records(path.parent, "eval mm"):
            scores.setdefault(SECOND, {})[seed] = mismatched[-1]["accuracy"]
    return {column: scores[column] for column in (ORDER[0], SECOND, *ORDER[1:]) if column in scores}


def means(scores: Scores) -> dict[str, list[float]]:
    """Return means over columns: of their medians, and of each seed that all have; none if a score is not finite."""
    result = {}
    for name, left_out in (("mean", SECOND), ("mean with mnli-mm", None)):
        chosen = [by_seed for column, by_seed in scores.items() if column != left_out]
        if (left_out or SECOND in scores) and not any(None in by_seed.values() for by_seed in chosen):
            seeds = sorted(set.intersection(*map(set, chosen)))
            medians = [statistics.median(by_seed.values()) for by_seed in chosen]
            result[name] = [
                statistics.fmean(x) for x in (medians, *([by_seed[s] for by_seed in chosen] for s in seeds))
            ]
    return result


def table(scores: Scores) -> str:
    """Format a line per column, then the means."""
    lines = [f"  {'':<18} {'metric':<9} {'median':>7} {'lowest':>7} {'highest':>7}  seeds"]
    for column, by_seed in scores.items():
        finite = [100 * score for score in by_seed.values() if score is not None] or [float("nan")]
        metric = "accuracy" if column == SECOND else GLUE[column].score
        values = " ".join(f"{x:7.2f}" for x in (statistics.median(finite), min(finite), max(finite)))
        lines.append(f"  {column:<18} {metric:<9} {values}  {len(by_seed)}")
    for name, (of_medians, *by_seed) in means(scores).items():
        ends = " ".join(f"{100 * x:7.2f}" for x in (of_medians, *((min(by_seed), max(by_seed)) if by_seed else ())))
        lines.append(f"  {name:<28} {ends}  {len(by_seed)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init_from", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data/glue"))
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(ORDER))
    parser.add_argument("--seeds", type=int, default=5)
    f, more = parser.parse_known_args(argv)
    keys = settings(f.init_from) | {"data.dir": f.data.expanduser().absolute()}
    arguments = [f"--config={','.join(f'glue:task={task}' for task in f.tasks.split(','))}", f"--seeds={f.seeds}"]
    common.sweep(f.workdir, *arguments, *(f"--set={key}={value}" for key, value in keys.items()), *more)
    print(f"GLUE dev scores after the last epoch, times 100\n{table(read(f.workdir))}")


if __name__ == "__main__":
    main()
