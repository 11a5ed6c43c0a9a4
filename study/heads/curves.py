"""Training losses of the study's long runs by step: when do narrow heads fall behind, and when do they catch up?

    python -m study.heads.curves [--runs=DIR]

With --runs, the folder of the runs that `study.heads.language --blocks=D --out=DIR` has trained, writes the
finished ones to study/data/study_curves.csv; rows of other runs stay. Without it, prints the loss of each
number of heads at one learning rate minus the fewest heads', with the same seeds, so with the same batches. This was
not planned: it looks for what explains the planned result.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from leanformer.errors import DataError
from leanformer.runtime import files
from leanformer.training import run_files
from study.heads import language
from study.tables import Estimate


ROWS = language.ROWS.with_name("study_curves.csv")
KEY = ("block", "num_heads", "lr", "seed")  # of a run
FIELDS = (*KEY, "step", "loss")  # loss: a mean over the last 100 steps
BLOCK, RATE = "D", 4e-3  # the best rate of all numbers of heads but 4


def read_curve(workdir: Path) -> dict[int, float]:
    """Return the training loss of a run by step; {} without a run."""
    return {record["step"]: record["loss"] for record in run_files.read_records(workdir, "train")}


def collect(runs: Path) -> list[dict[str, Any]]:
    """Return a row for each logged step of the block's recorded runs, of those that are finished in `runs`.

    Raises DataError if there is none.
    """
    rows = []
    for run in language.read_rows():
        workdir = runs / language.name_run(language.Arm(run["block"], run["num_heads"]), run["lr"], run["seed"])
        if run["block"] == BLOCK and run["steps"] in (curve := read_curve(workdir)):
            key = {name: run[name] for name in KEY}
            rows += [key | {"step": step, "loss": f"{loss:.4f}"} for step, loss in curve.items()]
    if not rows:
        raise DataError(f"--runs={runs} holds no finished run of block {BLOCK}.")
    return rows


def behind(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[int, Difference]]:
    """Return by number of heads and step the training loss minus the fewest heads', at the same learning rate.

    It is paired by seed, of the numbers of heads that have all three seeds at that rate, at the steps of all runs.
    """
    curves: dict[int, dict[int, dict[int, float]]] = {}
    for row in rows:
        if row["lr"] == RATE and row["seed"] in language.SEEDS:
            curves.setdefault(row["num_heads"], {}).setdefault(row["seed"], {})[row["step"]] = row["loss"]
    complete = [n for n in sorted(curves) if len(curves[n]) == len(language.SEEDS)]
    if not complete:
        return {}
    steps = sorted(set.intersection(*(set(curve) for n in complete for curve in curves[n].values())))
    losses = {n: {t: np.array([curves[n][seed][t] for seed in language.SEEDS]) for t in steps} for n in complete}
    fewest, *more = complete
    return {n: {t: statistics.paired(losses[n][t], losses[fewest][t]) for t in steps} for n in more}


@cli.command(cli.Flag("runs", "Folder of the runs; without it the table is reported."))
def main(f: cli.Values) -> None:
    if f.runs:
        rows = collect(Path(f.runs).expanduser())
        found = {tuple(row[name] for name in KEY) for row in rows}
        others = [row for row in language.read_rows(ROWS) if tuple(row[name] for name in KEY) not in found]
        rows = [row | {"loss": f"{row['loss']:.4f}"} for row in others] + rows
        with files.atomic_write(ROWS) as path:
            for row in rows:
                language.append_row(row, path, FIELDS)
    print(f"Training loss minus the loss of the fewest heads, block {BLOCK}, rate {RATE:g}, nats per token")
    for heads, by_step in behind(language.read_rows(ROWS)).items():
        for step, difference in by_step.items():
            print(f"{heads:>4} heads, step {step:>5}: {Estimate.of(difference):+.3f}")


if __name__ == "__main__":
    cli.run(main)
