"""Layers against heads on ListOps: 2 layers x 2 heads, 1 x 4, and the controls 1 x 2 and 2 x 4.

    python -m study.heads.listops --out=DIR [--published] [--seeds=3] [--rows=FILE] [--tiny]
    python -m study.heads.listops                                  # what the rows say

Expressions of 100 to 200 symbols on CPUs; with --published the size of *Leaner Transformers* (500 to 2,000 symbols,
5,000 steps of 32), for a GPU. Attention is exact. Every finished run is a row of study/data/listops_controls.csv, or of
--rows: the best checkpoint by the validation split, scored on the test split.

2026-11-21, short, three seeds, whose runs are not in the table: test top-1 of 1x4 is 42.3 ± 1.3 %, of 2x2 37.6 ± 0.1
%, +4.7 points (1.6 to 7.8); 17 % is chance.
"""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from leanformer import cli, config, evaluate
from leanformer.analysis import statistics
from leanformer.data import sequences
from study import common
from study.heads import language


ROWS = language.ROWS.with_name("listops_controls.csv")
FIELDS = ("size", "depth", "num_heads", "seed", "top1", "params", "steps", "date", "device")
SHAPES = ((2, 2), (1, 4), (1, 2), (2, 4))
CONTRASTS = (((1, 4), (2, 2)), ((1, 4), (1, 2)), ((1, 2), (2, 2)))  # the paper's; heads added; layers taken away
SHORT, PUBLISHED, TINY = "short", "published", "tiny"


def get_config(size: str, depth: int, heads: int, seed: int, data: Path) -> config.ConfigDict:
    """Return the config of a run, with its expressions in a folder."""
    name = "nystromformer_listops" if size == PUBLISHED else "nystromformer_listops_short"
    c = config.load(f"{name}:depth={depth},heads={heads},landmarks=0").unlock()
    c.update(seed=seed, loggers=())
    c.data.name = f"listops:{data}"
    c.probe.every = 0
    if size == TINY:
        c.update(total_steps=2, batch_size=2)
        c.data.recipe.update(train=8, val=4, test=4)
        c.optim.warmup_steps = 1
        c.eval.update(every=2, batch_size=2)
    return c.lock()


def run(size: str, depth: int, heads: int, seed: int, out: Path) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row."""
    workdir = out / f"{size}-{depth}x{heads}-seed={seed}"
    c = get_config(size, depth, heads, seed, out / f"listops-{size}")
    sequences.build_sequences(c.data.name, None, c.data.recipe.to_dict())
    summary = common.train(c, workdir)
    if status := evaluate.main([f"--workdir={workdir}", "--best", "--split=test"]):
        raise SystemExit(status)
    top1 = json.loads((workdir / "evaluation.json").read_text())["top1"]
    row = {"size": size, "depth": depth, "num_heads": heads, "seed": seed, "top1": f"{top1:.5f}"}
    row |= {"params": summary["params"], "steps": c.total_steps, "device": jax.devices()[0].device_kind}
    return row | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")}


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the mean of each shape in percent, and the differences with Welch's 95 % intervals."""
    for size in dict.fromkeys(row["size"] for row in rows):
        scores = {
            shape: np.array(
                [100 * r["top1"] for r in rows if (r["size"], r["depth"], r["num_heads"]) == (size, *shape)]
            )
            for shape in SHAPES
        }
        for (depth, heads), values in scores.items():
            yield f"{size}, {depth}x{heads}: {np.mean(values):.2f} %, {len(values)} seeds" if len(values) else ""
        for a, b in CONTRASTS:
            if min(len(scores[a]), len(scores[b])) > 1:
                difference = statistics.welch(scores[a], scores[b])
                interval = f"({difference.interval().low:+.2f} to {difference.interval().high:+.2f})"
                yield f"  {a[0]}x{a[1]} - {b[0]}x{b[1]}: {difference.value:+.2f} {interval}"


@cli.command(
    cli.Flag("out", "Folder for the data and the runs; without it the rows are reported."),
    cli.Flag("published", "The published size.", bool),
    cli.Flag("seeds", "Seeds of each shape.", int, default=3),
    cli.Flag("rows", "Table to append to, if not study/data/listops_controls.csv, whose runs are not repeated."),
    cli.Flag("tiny", "Two steps on short expressions, to try it.", bool),
)
def main(f: cli.Values) -> None:
    path, size = Path(f.rows or ROWS), TINY if f.tiny else PUBLISHED if f.published else SHORT
    if not f.out:
        print(*report(language.read_rows(path)), sep="\n")
        return
    for seed in range(f.seeds):
        for depth, heads in SHAPES:
            rows = [row for table in dict.fromkeys((path, ROWS)) for row in language.read_rows(table)]
            if (size, depth, heads, seed) in [
                tuple(r[n] for n in ("size", "depth", "num_heads", "seed")) for r in rows
            ]:
                continue
            row = run(size, depth, heads, seed, Path(f.out).expanduser().absolute())
            language.append_row(row, path, FIELDS)
            print("  ".join(f"{name} {row[name]}" for name in FIELDS[:5]), flush=True)


if __name__ == "__main__":
    cli.run(main)
