"""Trade-off of heads, head dimension and depth at equal parameters, from many small trained models.

    python -m study.shapes.surface --out=DIR [--config=quickstart] [--budgets=120e3,270e3] [--shapes=20] [--seeds=3]
        [--epochs=5] [--set=KEY=VALUE ...]
    python -m study.shapes.surface --table=study/data/quickstart.csv

2026-11-23, 40 ViTs on the quickstart's data. Twice the heads: -8.8 % (-10.9 to -7.1) and -7.4 % (-8.4 to -6.3) error at
120,000 and 270,000 parameters, with a smaller MLP. Twice the heads in half the layers: no detectable difference.

Among all shapes up to 5 % below each budget, with the config's embedding dimension, --shapes far apart are trained by
`leanformer.sweep` at the config's learning rate. DIR/surface.csv has one line per run; data/quickstart.csv is such
a file, in which step_s is the time of a training step on two idle cores. Prints the effect of a doubling on the error
at equal parameters, FLOPs and step time, by least squares with 95 % bootstrap intervals; tests of the log-linear form
and of equivalence; and effects with the MLP held, at both budgets together.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from leanformer import cli, config
from leanformer.analysis import comparison, proxies, runs, shapes
from leanformer.analysis.design import AXES
from leanformer.analysis.shapes import Costs, Shape
from study import tables
from study.common import NEVER
from study.tables import Estimate


SLACK = 0.05
GRID = {"num_heads": [1, 2, 4, 8, 16, 32], "head_dim": [4, 8, 16, 32, 64], "depth": [1, 2, 3, 4, 6, 8]}
GRID |= {"mlp_dim": list(range(16, 1025, 8))}
DRAWS = 2000
FREE = ("depth", "num_heads", "head_dim")
LEAN = "heads for layers"  # twice the heads in half the layers
NARROW = "narrower heads"  # twice the heads of half the head dimension: the same total width
PAIRS = (*itertools.combinations_with_replacement(FREE, 2),)  # quadratic and interaction terms
SIZES = (*FREE, "mlp_dim")
VIT_B = {"num_heads": math.log2(16 / 12), "depth": math.log2(7 / 12), "mlp_dim": -1.0}
CHANGES_OF_SIZES = {  # in doublings of each size
    "twice the heads in half the layers": {"num_heads": 1.0, "depth": -1.0},
    "the trade of ViT-B: 12 layers of 12 heads to 7 of 16, half the MLP": VIT_B,
    "2 to 16 heads of fixed dimension": {"num_heads": 3.0},
    "2 to 16 heads at fixed total width": {"num_heads": 3.0, "head_dim": -3.0},
}
COST_NAMES = ("params", "forward_flops", "step_s")
MEASURES = ("attention_output", "attention_entropy", "largest_logit")
Row = dict[str, float]
Column = Callable[[Row], float]
Columns = Sequence[Column]


def list_candidates(c: config.ConfigDict, costs: Costs, budget: float) -> list[Shape]:
    """Return shapes that use a budget, with a total width of all heads of 1/6 to 2 times the embedding dimension."""
    width = c.model.width
    axes = shapes.axis_values(c, GRID | {"width": [width]})
    inside = shapes.enumerate_within(axes, lambda shape: costs.of("params", shape), budget, SLACK)
    return [s for s in inside if width / 6 <= s[2] * s[3] <= 2 * width]


def train(c: config.ConfigDict, args: argparse.Namespace) -> Path:
    """Train shapes spread over the budgets, and return the folder of the runs."""
    costs = Costs.fit(c, ["params"])
    candidates = [list_candidates(c, costs, budget) for budget in args.budgets]
    chosen = [shape for each in candidates for shape in shapes.select_spread(each, args.shapes)]
    keys = {f"{name}.every": NEVER for name in ("eval", "checkpoint", "probe")} | {"probe.measures": MEASURES}
    keys |= {"total_epochs": args.epochs, "optim.warmup_epochs": args.epochs / 10}
    configured = {text.partition("=")[0] for text in args.set}  # in the config files, which --set would override
    words = [f"--set={key}={value!r}" for key, value in keys.items() if key not in configured]
    why = f"spread over all shapes of {' or '.join(f'{budget:,.0f}' for budget in args.budgets)} parameters."
    base = proxies.Base.of(args.config, c)
    return proxies.train(args.out, base, chosen, costs, why=why, words=[f"--seeds={args.seeds}", *words])


def read(folder: Path, budgets: Sequence[float]) -> list[Row]:
    """Return one row per finished run of these budgets."""
    rows: list[Row] = []
    for run in runs.read([str(folder)]).runs:
        fits = [b for b in budgets if (1 - SLACK) * b <= run.summary["params"] <= b]
        if fits:
            row = {"budget": fits[0], "seed": run.seed, "epochs": run.keys["total_epochs"]}
            row |= {axis: run.keys[f"model.{axis}"] for axis in AXES}
            row |= {name: run.summary.get(name) for name in ("params", "forward_flops")}
            rows.append(row | {name: run.summary["final"][name] for name in ("top1", "loss")})
    return rows


def read_table(path: Path) -> list[Row]:
    """Return the rows of a surface.csv."""
    return [{name: float(text) for name, text in row.items()} for row in tables.read(path)]


def solve(rows: Sequence[Row], columns: Columns, error: str) -> np.ndarray:
    """Return coefficients of ln error by least squares on means over seeds, by draw and column.

    The first draw is the data, the others are bootstrap samples of shapes, then of the seeds of each.
    """
    design, logs = _design(rows, columns, error)
    chosen, picked = _resample(tuple(np.isfinite(logs).sum(axis=1)), DRAWS)
    samples = np.where(picked < 0, np.nan, logs[chosen[..., None], picked])
    every = np.arange(len(logs))[None]
    means = np.concatenate([np.nanmean(logs, axis=1)[every], np.nanmean(samples, axis=2)])
    designs = design[np.concatenate([every, chosen])]
    tolerance = np.finfo(float).eps * max(design.shape)
    return np.einsum("dcs,ds->dc", np.linalg.pinv(designs, rcond=tolerance), means)


@functools.cache
def _resample(counts: tuple[int, ...], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the shapes of each draw, and the seeds of each of them, padded with -1; `counts` are seeds by shape."""
    rng, shape = np.random.default_rng(0), (draws, len(counts))
    chosen, picked = np.empty(shape, int), np.full((*shape, max(counts)), -1)
    for draw in range(draws):
        chosen[draw] = rng.integers(len(counts), size=len(counts))
        for place, i in enumerate(chosen[draw]):
            picked[draw, place, : counts[i]] = rng.integers(counts[i], size=counts[i])
    return chosen, picked


def _design(rows: Sequence[Row], columns: Columns, error: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the design matrix, and the logarithms of the errors by shape and seed, padded with NaN."""
    by_shape: dict[tuple, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(tuple(row[axis] for axis in AXES), []).append(row)
    groups = [*by_shape.values()]
    logs = np.full((len(groups), max(map(len, groups))), np.nan)
    for values, group in zip(logs, groups, strict=True):
        values[: len(group)] = np.log([1 - row["top1"] if error == "top1" else row[error] for row in group])
    return np.array([[1, *(column(group[0]) for column in columns)] for group in groups]), logs


def summarise(draws: np.ndarray, level: float = 0.95) -> Estimate:
    """Return the change of the error in percent that draws of a difference of ln error mean."""
    ends = np.quantile(draws[1:], ((1 - level) / 2, (1 + level) / 2))
    return Estimate(*(100 * math.expm1(value) for value in (draws[0], *ends)))


def list_columns(rows: Sequence[Row], cost: str, axes: Sequence[str] = FREE) -> dict[str, Column]:
    """Return the columns of the regression: ln cost, and log2 of each size that varies."""
    sizes = {axis: _log2(axis) for axis in axes if len({row[axis] for row in rows}) > 1}
    return {cost: lambda row: math.log(row[cost])} | sizes


def _log2(*axes: str) -> Column:
    return lambda row: math.prod(math.log2(row[axis]) for axis in axes)


def effects(rows: Sequence[Row], cost: str, error: str) -> dict[str, Estimate]:
    """Return the effect of a doubling on the error, in percent, at equal cost, with its 95 % interval.

    LEAN is the difference of the effects of heads and depth, NARROW of heads and head dimension.
    """
    return {name: summarise(draws) for name, draws in _by_change(rows, cost, error).items()}


def _by_change(rows: Sequence[Row], cost: str, error: str) -> dict[str, np.ndarray]:
    columns = list_columns(rows, cost)
    result = dict(zip(columns, solve(rows, [*columns.values()], error).T[1:], strict=True))
    del result[cost]
    for name, axis in ((LEAN, "depth"), (NARROW, "head_dim")):
        if {"num_heads", axis} <= result.keys():
            result[name] = result["num_heads"] - result[axis]
    return result


def effects_at_equal_sizes(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return the effect of changes with all other sizes held, in percent of the top-1 error: all budgets together,
    parameters free."""
    columns = [_log2(axis) for axis in SIZES]
    draws = dict(zip(SIZES, solve(rows, columns, "top1").T[1:], strict=True))
    changes = {axis: {axis: 1.0} for axis in SIZES} | CHANGES_OF_SIZES
    return {name: summarise(sum(draws[axis] * times for axis, times in c.items())) for name, c in changes.items()}


def explained(rows: Sequence[Row], cost: str | None) -> float:
    """Return R² of the regression of ln top-1 error, with all sizes if `cost` is None."""
    columns = [_log2(axis) for axis in SIZES] if cost is None else [*list_columns(rows, cost).values()]
    residual, total, _ = _residual(rows, columns)
    return 1 - residual / total


def test_form(rows: Sequence[Row], pairs: Sequence[tuple[str, str]] = PAIRS) -> float:
    """Return the p value of an F test of the log-linear form at equal parameters against products of these pairs.

    NaN with too few shapes.
    """
    columns = [*list_columns(rows, "params").values()]
    before, _, _ = _residual(rows, columns)
    after, _, freedom = _residual(rows, [*columns, *(_log2(*pair) for pair in pairs)])
    if freedom < 1:
        return math.nan
    return float(stats.f.sf((before - after) / len(pairs) / (after / freedom), len(pairs), freedom))


def _residual(rows: Sequence[Row], columns: Columns) -> tuple[float, float, int]:
    """Return the residual and the total sum of squares, and the degrees of freedom."""
    design, logs = _design(rows, columns, "top1")
    means = np.nanmean(logs, axis=1)
    rest = means - design @ np.linalg.lstsq(design, means, rcond=None)[0]
    return float(rest @ rest), float(np.square(means - means.mean()).sum()), len(means) - design.shape[1]


def equivalence(rows: Sequence[Row]) -> tuple[Estimate, float, str]:
    """Return LEAN at equal parameters with its 90 % interval, the default margin of `leanformer.compare` in percent of
    the error, and its verdict. Two one-sided tests; the margin was chosen after the runs."""
    result = summarise(_by_change(rows, "params", "top1")[LEAN], 0.9)
    top1 = float(np.mean([row["top1"] for row in rows]))
    margin = 100 * comparison.MARGIN * top1 / (1 - top1)
    verdict = "equivalent" if -margin < result.low and result.high < margin else "inconclusive"
    return result, margin, verdict


def report(rows: Sequence[Row]) -> None:
    """Print the tables."""
    print("Effect of a doubling on the error in percent, the MLP keeping the cost equal, with a 95 % interval\n")
    print(f"{'budget':<10}{'error':<8}{'equal':<15}" + "".join(f"{axis:<24}" for axis in (*FREE, LEAN, NARROW)))
    by_budget = {
        budget: [row for row in rows if row["budget"] == budget] for budget in {row["budget"]: 0 for row in rows}
    }
    for budget, part in by_budget.items():
        for name in ("top1", "loss"):
            for cost in (cost for cost in COST_NAMES if cost in rows[0]):
                cells = (f"{x:+.1f}" for x in effects(part, cost, name).values())
                print(f"{budget:<10,.0f}{name:<8}{cost:<15}{''.join(f'{cell:<24}' for cell in cells)}")
    print("\nLog-linear form at equal parameters; twice the heads in half the layers by compare's default margin")
    for budget, part in by_budget.items():
        lean, margin, verdict = equivalence(part)
        p = [test_form(part), test_form(part, [("depth", "num_heads")])]
        form = (
            "too few shapes to test it"
            if math.isnan(p[0])
            else f"F test p = {p[0]:.3f}, heads x depth alone {p[1]:.3f}"
        )
        fit = f"R² {explained(part, 'params'):.2f}, {form}"
        print(f"{budget:<10,.0f}{fit}; {lean:+.1f} at 90 %, margin {margin:.1f}: {verdict}")
    print(f"\nAll budgets, other sizes held, R² {explained(rows, None):.2f}")
    for name, effect in effects_at_equal_sizes(rows).items():
        print(f"{name:<67}{effect:+.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--budgets", type=lambda text: [float(x) for x in text.split(",")], default=[120e3, 270e3])
    for name, kind, default in (("shapes", int, 20), ("seeds", int, 3), ("epochs", float, 5.0)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    if args.table:
        report(read_table(args.table))
        return
    words = [f"--config={args.config}", *(f"--config.{text}" for text in args.set)]
    rows = read(train(cli.parse([cli.CONFIG], words).config, args), args.budgets)
    tables.write(args.out / "surface.csv", rows)
    report(rows)


if __name__ == "__main__":
    main()
