"""Layers against heads on ListOps: 2 layers x 2 heads, 1 x 4, and the controls 1 x 2 and 2 x 4.

    python -m study.heads.listops --out=DIR [--published] [--seeds=3] [--rows=FILE] [--tiny]
    python -m study.heads.listops                                  # what the rows say

Expressions of 100 to 200 symbols on CPUs; with --published the size of *Leaner Transformers* (500 to 2,000 symbols,
5,000 steps of 32), for a GPU. Attention is exact. Every finished run is a row of study/data/listops_controls.csv, or of
--rows: the best checkpoint by the validation split, scored on the test split.
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
from leanformer.analysis.statistics import Difference
from leanformer.data import sequences
from study import common
from study.heads import language


ROWS = language.ROWS.with_name("listops_controls.csv")
FIELDS = ("size", "depth", "num_heads", "seed", "top1", "params", "steps", "date", "device")
SHAPES = ((2, 2), (1, 4), (1, 2), (2, 4))
# The paper's change; heads added to one layer; layers added to two heads.
CONTRASTS = {"paper": ((1, 4), (2, 2)), "heads": ((1, 4), (1, 2)), "layers": ((2, 2), (1, 2))}
MARGIN = 1.0  # points that a layer may be worth, of layers that are not needed
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


def contrasts(rows: Sequence[Mapping[str, Any]], size: str) -> dict[str, Difference]:
    """Return the differences of CONTRASTS in points, by Welch, of those shapes that have two seeds."""
    scores = {
        shape: np.array([100 * r["top1"] for r in rows if (r["size"], r["depth"], r["num_heads"]) == (size, *shape)])
        for shape in SHAPES
    }
    return {
        name: statistics.welch(scores[a], scores[b])
        for name, (a, b) in CONTRASTS.items()
        if min(len(scores[a]), len(scores[b])) > 1
    }


def verdicts(found: Mapping[str, Difference]) -> Iterator[str]:
    """Yield the verdicts of the rules of PLAN2.md, line of 2026-11-29, 21:49."""
    if found.keys() < CONTRASTS.keys():
        return
    both, least = [found["heads"], found["layers"]], found["layers"].interval(0.9)
    corrected = statistics.holm([x.p_differs() for x in both])
    holds = all(x.value > 0 and p < 0.05 for x, p in zip(both, corrected, strict=True))
    refuted = found["heads"].interval().high < found["paper"].value / 2
    yield f"Heads carry it: {'holds' if holds else 'refuted' if refuted else 'undecided'}"
    holds, refuted = max(-least.low, least.high) <= MARGIN, found["layers"].interval().low > MARGIN
    yield f"Layers are not needed: {'holds' if holds else 'refuted' if refuted else 'undecided'}"


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the mean of each shape in percent, the differences with Welch's 95 % intervals, and the verdicts."""
    for size in dict.fromkeys(row["size"] for row in rows):
        for depth, heads in SHAPES:
            values = [100 * r["top1"] for r in rows if (r["size"], r["depth"], r["num_heads"]) == (size, depth, heads)]
            if values:
                yield f"{size}, {depth}x{heads}: {np.mean(values):.2f} %, {len(values)} seeds"
        found = contrasts(rows, size)
        for name, difference in found.items():
            (a, b), interval = CONTRASTS[name], difference.interval()
            text = f"{difference.value:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"
            yield f"  {a[0]}x{a[1]} - {b[0]}x{b[1]}: {text}"
        yield from verdicts(found)


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
