"""Conditioning of attention in trained models, by number of heads (Leaner Transformers, Figure 2).

    python -m study.heads.heads --out=DIR [--heads=2,4,8,16] [--seeds=3] [--epochs=3]

2026-11-24. More heads condition better: after training κ falls from 3.3e4 to 387 at fixed head dimension, and from
1.5e4 to 464 at fixed total width, where the Gaussian prediction is constant. Top-1 rises from 74.1 to 76.9 % and from
74.7 to 76.4 %. `study/figures/front_picture.py` plots DIR/heads.csv.

Trains the quickstart (17 tokens; with smaller patches the attention output is singular in float32) with each number of
heads in both trades, and measures the attention output on the same images at initialisation and after training:
geometric means over seeds of medians over layers and images. Runs are stored in DIR, so the same command resumes.
"""

from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli, config
from leanformer.analysis import runs, statistics
from study import common, tables
from study.tables import Estimate


MEASURE, HEAD_DIM, WIDTH = "attention_output", 16, 96  # head dimension of one trade, total width of the other
TOKENS = 17  # of the quickstart, with the class token


def get_config(arguments: str = "") -> config.ConfigDict:
    """Return the config of a run."""
    a = config.arguments(arguments, heads=8, head_dim=HEAD_DIM, epochs=3.0)
    c = config.load("quickstart")
    c.model.update(num_heads=a["heads"], head_dim=a["head_dim"])
    c.update(total_epochs=a["epochs"])
    c.optim.warmup_epochs = min(1.0, a["epochs"] / 4)
    c.probe.update(every=common.NEVER, examples=64)
    c.eval.every = 0
    return c


def read(folder: Path) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Return log10 κ at the start and at the end, and top-1 in percent, by (heads, head dimension), over seeds."""
    result: dict[tuple[int, int], dict[str, list[float]]] = {}
    for run in runs.read([str(folder)], "top1").runs:
        values = result.setdefault((run.keys["model.num_heads"], run.keys["model.head_dim"]), {})
        probes = [np.median(r[MEASURE]["median"]) for r in run.records if r["kind"] == "probe"]
        row = {"start": np.log10(probes[0]), "end": np.log10(probes[-1]), "top1": 100 * run.value}
        for name, value in row.items():
            values.setdefault(name, []).append(float(value))
    return {shape: {name: np.array(x) for name, x in values.items()} for shape, values in sorted(result.items())}


def write(
    path: Path, trades: dict[str, list[tuple[int, int]]], results: dict[tuple[int, int], dict[str, np.ndarray]]
) -> None:
    """Write one line per trade, shape and seed: condition numbers at the start and at the end, and top-1 in percent."""
    rows = []
    for trade, (heads, head_dim) in ((trade, shape) for trade, shapes in trades.items() for shape in shapes):
        values = results[heads, head_dim]
        for seed, (start, end, top1) in enumerate(zip(*(values[x] for x in ("start", "end", "top1")), strict=True)):
            row = {"trade": trade, "num_heads": heads, "head_dim": head_dim, "seed": seed}
            row |= {"condition_start": f"{10**start:.5g}", "condition_end": f"{10**end:.5g}", "top1": f"{top1:.5g}"}
            rows.append(row)
    tables.write(path, rows)


def compare(path: Path | str, fewest: str = "2", most: str = "16") -> dict[str, dict[str, Any]]:
    """Return for each trade, from a heads.csv: the geometric mean of κ after training by number of heads, the paired
    change of top-1 from fewest to most heads in points, and the relative change of the error in percent."""
    result = {}
    for trade, rows in tables.group(tables.read(path), "trade").items():
        by_heads = tables.group(rows, "num_heads")
        top1 = {n: np.array([float(row["top1"]) for row in by_heads[n]]) for n in (fewest, most)}
        logs = {n: np.mean([np.log10(float(row["condition_end"])) for row in group]) for n, group in by_heads.items()}
        result[trade] = {
            "kappa": {int(n): float(10**value) for n, value in logs.items()},
            "gain": Estimate.of(statistics.paired(top1[most], top1[fewest])),
            "error": 100 * float((100 - top1[most].mean()) / (100 - top1[fewest].mean()) - 1),
        }
    return result


@cli.command(
    cli.Flag("out", "Folder for the runs and the table.", required=True),
    cli.Flag("heads", "Numbers of heads, divisors of 96.", list, default=["2", "4", "8", "16"]),
    cli.Flag("seeds", "Seeds of each.", int, default=3),
    cli.Flag("epochs", "Epochs of training.", float, default=3.0),
)
def main(f: cli.Values) -> None:
    out, heads = Path(f.out).expanduser(), [int(n) for n in f.heads]
    trades = {"fixed head dimension": [(n, HEAD_DIM) for n in heads]}
    trades["fixed total width"] = [(n, WIDTH // n) for n in heads]
    shapes = dict.fromkeys(shape for trade in trades.values() for shape in trade)
    files = [f"{Path(__file__)}:heads={n},head_dim={h},epochs={f.epochs}" for n, h in shapes]
    common.sweep(out / "runs", f"--config={','.join(files)}", f"--seeds={f.seeds}")
    result = read(out / "runs")
    print(f"{'trade':<22}{'heads':<8}{'κ at start':>11}{'κ at end':>11}   top-1, %")
    for trade, shapes in trades.items():
        for n, h in shapes:
            x = result[n, h]
            kappa = "".join(f"{10 ** x[when].mean():>11.3g}" for when in ("start", "end"))
            print(f"{trade:<22}{f'{n}x{h}':<8}{kappa}   {x['top1'].mean():.2f} (sd {x['top1'].std(ddof=1):.2f})")
    write(out / "heads.csv", trades, result)
    for trade, values in compare(out / "heads.csv", f.heads[0], f.heads[-1]).items():
        print(f"{trade}: top-1 {values['gain']:+.1f points}, error {values['error']:+.1f} %")


if __name__ == "__main__":
    cli.run(main)
