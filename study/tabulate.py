"""Table of the finished runs of sweeps: one row per run.

    python -m study.tabulate --runs=SWEEP,... --keys=model.num_heads,... --metrics=top1,... --out=FILE

Columns: the last part of each config key, the seed, final metrics, the number of parameters, and the commit of the run.
study/data/README.md lists the sweeps whose tables are committed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer import cli
from leanformer.analysis import runs
from study import tables


def tabulate(folders: Sequence[str], keys: Sequence[str], metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row per finished run, in the order of the folders' names."""
    for folder in folders:
        for run in runs.read([folder]).runs:
            row = {key.rpartition(".")[2]: run.keys[key] for key in keys} | {"seed": run.seed}
            row |= {name: run.summary["final"][name] for name in metrics}
            commit = run.made_by.removeprefix("commit ").partition(",")[0]
            yield row | {"params": run.summary["params"], "commit": commit}


@cli.command(
    cli.Flag("runs", "Folders of sweeps.", list, required=True),
    cli.Flag("keys", "Config keys that differ.", list, required=True),
    cli.Flag("metrics", "Final metrics.", list, required=True),
    cli.Flag("out", "CSV file to write.", required=True),
)
def main(f: cli.Values) -> None:
    tables.write(Path(f.out), [*tabulate(f.runs, f.keys, f.metrics)])


if __name__ == "__main__":
    cli.run(main)
