"""Trade-off of heads, head dimension and depth at equal parameters, from many small trained models.

    python -m experiments.surface --out=DIR [--config=quickstart] [--budgets=120e3,270e3] [--shapes=20] [--seeds=3]
        [--epochs=5] [--set=KEY=VALUE ...]
    python -m experiments.surface --table=experiments/evidence/quickstart.csv

2026-11-23, 40 ViTs on the quickstart's data. Twice the heads: -8.8 % (-10.9 to -7.1) and -7.4 % (-8.4 to -6.3) error at
120,000 and 270,000 parameters, with a smaller MLP. Twice the heads in half the layers: no detectable difference.

Among all shapes up to 5 % below each budget, with the config's embedding dimension, --shapes far apart are trained by
`leanformer.sweep` at the config's learning rate. DIR/surface.csv has one line per run; evidence/quickstart.csv is such
a file, in which step_s is the time of a training step on two idle cores. Prints the effect of a doubling on the error
at equal parameters, FLOPs and step time, by least squares with 95 % bootstrap intervals.
"""

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.common import NEVER
from leanformer import cli, config
from leanformer.analysis import proxies, runs, shapes
from leanformer.analysis.dimensions import AXES
from leanformer.analysis.shapes import Costs, Shape


SLACK = 0.05
GRID = {"num_heads": [1, 2, 4, 8, 16, 32], "head_dim": [4, 8, 16, 32, 64], "depth": [1, 2, 3, 4, 6, 8]}
GRID |= {"mlp_dim": list(range(16, 1025, 8))}
DRAWS = 2000
FREE = ("depth", "num_heads", "head_dim")
LEAN = "heads for layers"  # twice the heads in half the layers
NARROW = "narrower heads"  # twice the heads of half the head dimension: the same total width
COST_NAMES = ("params", "forward_flops", "step_s")
MEASURES = ("attention_output", "attention_entropy", "largest_logit")
Row = dict[str, float]


def list_candidates(c: config.ConfigDict, costs: Costs, budget: float) -> list[Shape]:
    """Return shapes that use a budget, with a total width of all heads of 1/6 to 2 times the embedding dimension."""
    width = c.model.width
    axes = shapes.axis_values(c, GRID | {"width": [width]})
    inside = shapes.enumerate_within(axes, lambda shape: costs.of("params", shape), budget, SLACK)
    return [s for s in inside if width / 6 <= s[2] * s[3] <= 2 * width]


def train(c: config.ConfigDict, f: argparse.Namespace) -> Path:
    """Train shapes spread over the budgets, and return the folder of the runs."""
    costs = Costs.fit(c, ["params"])
    chosen = [s for budget in f.budgets for s in shapes.select_spread(list_candidates(c, costs, budget), f.shapes)]
    costs.confirm(c, chosen)
    keys = {f"{name}.every": NEVER for name in ("eval", "checkpoint", "probe")} | {"probe.measures": MEASURES}
    keys |= {"total_epochs": f.epochs, "optim.warmup_epochs": f.epochs / 10}
    configured = {text.partition("=")[0] for text in f.set}  # already in the config files, which --set would override
    words = [f"--set={key}={value!r}" for key, value in keys.items() if key not in configured]
    why = f"spread over all shapes of {' or '.join(f'{budget:,.0f}' for budget in f.budgets)} parameters."
    base = proxies.Base.of(f.config, c)
    return proxies.train(f.out, base, chosen, costs, why=why, words=[f"--seeds={f.seeds}", "--vmap", *words])


def read(folder: Path, budgets: Sequence[float]) -> list[Row]:
    """Return one row per finished run of these budgets."""
    rows: list[Row] = []
    for run in runs.read([str(folder)]).runs:
        fits = [b for b in budgets if (1 - SLACK) * b <= run.summary["params"] <= b]
        if fits:
            row = {"budget": fits[0], "seed": run.seed, "epochs": run.keys["total_epochs"]}
            row |= {axis: run.keys[f"model.{axis}"] for axis in AXES}
            row |= {name: run.cost(name) for name in ("params", "forward_flops")}
            rows.append(row | {name: run.summary["final"][name] for name in ("top1", "loss")})
    return rows


def read_table(path: Path) -> list[Row]:
    """Return the rows of a surface.csv."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]


def effects(rows: Sequence[Row], cost: str, error: str) -> dict[str, tuple[float, float, float]]:
    """Return the effect of a doubling on the error, in percent, at equal cost, with its 95 % interval.

    ln error = a + b ln cost + sum of c log2 axis, by least squares on means over seeds; bootstrap over shapes, then
    over the seeds of each. LEAN is the difference of heads and depth, NARROW of heads and head dimension.
    """
    by_shape: dict[tuple, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(tuple(row[axis] for axis in AXES), []).append(row)
    groups = [*by_shape.values()]
    free = [axis for axis in FREE if len({row[axis] for row in rows}) > 1]
    design = np.array([[1, math.log(g[0][cost]), *(math.log2(g[0][axis]) for axis in free)] for g in groups])
    logs = [np.log([1 - row["top1"] if error == "top1" else row[error] for row in group]) for group in groups]
    rng, solutions = np.random.default_rng(0), []
    for draw in range(DRAWS + 1):
        chosen = rng.integers(len(groups), size=len(groups)) if draw else np.arange(len(groups))
        means = [rng.choice(logs[i], len(logs[i])).mean() if draw else logs[i].mean() for i in chosen]
        solutions.append(np.linalg.lstsq(design[chosen], np.array(means), rcond=None)[0])
    result = {axis: np.array(solutions)[:, 2 + i] for i, axis in enumerate(free)}
    for name, other in ((LEAN, "depth"), (NARROW, "head_dim")):
        if {"num_heads", other} <= result.keys():
            result[name] = result["num_heads"] - result[other]
    ends = {axis: (x[0], *np.quantile(x[1:], (0.025, 0.975))) for axis, x in result.items()}
    return {axis: tuple(100 * math.expm1(value) for value in x) for axis, x in ends.items()}


def report(rows: Sequence[Row]) -> None:
    """Print the tables."""
    print("Effect of a doubling on the error in percent, the MLP keeping the cost equal, with a 95 % interval\n")
    print(f"{'budget':<10}{'error':<8}{'equal':<15}" + "".join(f"{axis:<24}" for axis in (*FREE, LEAN, NARROW)))
    for budget in dict.fromkeys(row["budget"] for row in rows):
        part = [row for row in rows if row["budget"] == budget]
        for name in ("top1", "loss"):
            for cost in (cost for cost in COST_NAMES if cost in rows[0]):
                cells = ("{:+.1f} [{:+.1f}, {:+.1f}]".format(*x) for x in effects(part, cost, name).values())
                print(f"{budget:<10,.0f}{name:<8}{cost:<15}{''.join(f'{cell:<24}' for cell in cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--budgets", type=lambda text: [float(x) for x in text.split(",")], default=[120e3, 270e3])
    for name, kind, default in (("shapes", int, 20), ("seeds", int, 3), ("epochs", float, 5.0)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--set", action="append", default=[])
    f = parser.parse_args()
    if f.table:
        report(read_table(f.table))
        return
    words = [f"--config={f.config}", *(f"--config.{text}" for text in f.set)]
    rows = read(train(cli.parse([cli.CONFIG], words).config, f), f.budgets)
    with (f.out / "surface.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    report(rows)


if __name__ == "__main__":
    main()
