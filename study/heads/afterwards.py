"""Readings of the study's rows that no plan asked for: in no rule, and none of them changes a verdict.

    python -m study.heads.afterwards

Prints when narrow heads reach a loss, what they lose at the same step of a longer schedule, the doublings with errors
pooled over arms, changes after 4,000 steps against the plan's margin, what added heads change in all ViTs together,
κ with the intervention as unit, and wider intervals of the response surface.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from leanformer import cli
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from study import tables
from study.heads import causes, curves, language, verdicts, vision
from study.shapes import surface
from study.tables import Estimate


LEVELS = (3.5, 3.0, 2.6)  # training losses, nats per token
SETTINGS = ((48, 5), (48, 15), (96, 5))  # width and epochs of the study's ViTs
FAMILIES = {"graying": "graying", "spectral": "λI", "sigma,": "σReparam"}  # by the first word; others are their own


def read_curves() -> dict[int, dict[int, dict[int, float]]]:
    """Return the training loss by heads, seed and step, at the learning rate of `curves`."""
    result: dict[int, dict[int, dict[int, float]]] = {}
    for row in language.read_rows(curves.ROWS):
        if row["lr"] == curves.RATE and row["seed"] in language.SEEDS:
            result.setdefault(row["num_heads"], {}).setdefault(row["seed"], {})[row["step"]] = row["loss"]
    return {n: by_seed for n, by_seed in sorted(result.items()) if len(by_seed) == len(language.SEEDS)}


def first_step(curve: Mapping[int, float], level: float) -> float:
    """Return the step at which a loss first reaches a level, on straight lines between logged steps."""
    steps = sorted(curve)
    for before, after in itertools.pairwise(steps):
        if curve[after] <= level < curve[before]:
            return before + (after - before) * (curve[before] - level) / (curve[before] - curve[after])
    return math.nan


def arrivals(level: float) -> dict[int, np.ndarray]:
    """Return by heads the step of each seed at which the training loss reaches a level."""
    return {n: np.array([first_step(c[s], level) for s in language.SEEDS]) for n, c in read_curves().items()}


def plateau(step: int = 400) -> tuple[float, float]:
    """Return the least and the largest training loss of all these runs at a step."""
    losses = [curve[step] for by_seed in read_curves().values() for curve in by_seed.values()]
    return min(losses), max(losses)


def behind_pooled(step: int) -> Estimate:
    """Return the training loss of the most heads minus one head's, with an error pooled over all heads and seeds.

    The interval of three paired seeds is by chance a tenth of what neighbouring steps give.
    """
    table = {n: np.array([c[s][step] for s in language.SEEDS]) for n, c in read_curves().items()}
    return Estimate.of(pool(table)[min(table), max(table)])


def pool(table: Mapping[int, np.ndarray]) -> dict[tuple[int, int], Difference]:
    """Return the difference of each arm to each with fewer heads, with the residual of arm + seed as error."""
    heads, losses = list(table), np.array([*table.values()])
    rest = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    df = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    spread = math.sqrt(2 * (rest**2).sum() / df)
    error, count = spread / math.sqrt(losses.shape[1]), losses.shape[1]
    return {
        (few, many): Difference("pooled", float(table[many].mean() - table[few].mean()), error, df, count, spread)
        for i, few in enumerate(heads)
        for many in heads[i + 1 :]
    }


def pooled_doublings(block: str) -> dict[tuple[int, int], tuple[Difference, float]]:
    """Return the change of each doubling in a block with a pooled error, and its p value by Holm."""
    found = pool(verdicts.read_values(language.read_rows(), block, "loss"))
    steps = {pair: d for pair, d in found.items() if pair[1] == 2 * pair[0]}
    corrected = statistics.holm([d.p_differs() for d in steps.values()])
    return {pair: (d, p) for (pair, d), p in zip(steps.items(), corrected, strict=True)}


LONG = (("D", 4, 32), ("D", 1, 32), ("I", 1, 16))  # comparisons after 4,000 steps


def per_doubling() -> dict[tuple[str, int, int], tuple[Estimate, bool]]:
    """Return changes per doubling after 4,000 steps with 90 % intervals, and if they are inside the plan's margin."""
    result = {}
    for block, few, many in LONG:
        loss, doublings = verdicts.read_values(language.read_rows(), block, "loss"), math.log2(many / few)
        scaled = Estimate(*(x / doublings for x in Estimate.of(statistics.paired(loss[many], loss[few]), 0.9)))
        result[block, few, many] = scaled, scaled.low > -verdicts.MARGIN and scaled.high < verdicts.MARGIN
    return result


def added_heads(arms: Sequence[str] = tuple(vision.CONTROLS)) -> Estimate:
    """Return what added heads change in the study's ViTs: the mean over settings of each setting's mean over arms and
    seeds. Settings are strata with their own variances (Satterthwaite); seeds of two settings are different runs."""
    rows, changes = language.read_rows(vision.ROWS), []
    for width, epochs in SETTINGS:
        errors = vision.read_errors(rows, width, epochs)
        scale = 100 / errors["original"].mean()
        changes.append(np.mean([scale * (errors[name] - errors[vision.CONTROLS[name]]) for name in arms], axis=0))
    variances = [x.var(ddof=1) / len(x) for x in changes]
    df = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, changes, strict=True))
    error, mean = math.sqrt(sum(variances)) / len(changes), float(np.mean([x.mean() for x in changes]))
    return Estimate.of(Difference("Satterthwaite", mean, error, df, len(changes), math.nan))


def over_interventions() -> dict[str, Any]:
    """Return the interventions' slope per tenfold fall of κ by the jackknife over interventions and over families, and
    the rank correlation of fall and gain with its p value."""
    effects = causes.compare(language.read_rows(causes.ROWS))
    names = list(causes.INTERVENTIONS)
    family = {name: FAMILIES.get(name.split()[0], name) for name in names}

    def jackknife(groups: Mapping[str, list[str]]) -> Estimate:
        def slope(chosen: list[str]) -> float:
            return -causes.fit_slope(effects, chosen).mean()

        count, full = len(groups), slope(names)
        rest = np.array([slope([n for n in names if n not in group]) for group in groups.values()])
        error = math.sqrt((count - 1) / count * ((rest - full) ** 2).sum())
        return Estimate.of(Difference("jackknife", full, error, count - 1.0, count, math.nan))

    falls = [-effects[name].dose.value for name in names]
    gains = [effects[name].response.value for name in names]
    correlation, interval = statistics.spearman(np.array(falls), np.array(gains))
    return {
        "one": jackknife({name: [name] for name in names}),
        "family": jackknife({f: [n for n in names if family[n] == f] for f in set(family.values())}),
        "correlation": correlation,
        "low": interval.low,
        "high": interval.high,
        "p": float(stats.spearmanr(falls, gains).pvalue),
        "better": sum(Estimate.of(effects[name].response).low > 0 for name in names),
        "worse": sum(Estimate.of(effects[name].response).high < 0 for name in names),
        "count": len(names),
    }


def surface_by_jackknife(budget: float) -> Estimate:
    """Return heads at fixed total width and equal parameters, in percent of the error, by the jackknife over shapes."""
    rows = [row for row in surface.read_table(tables.EVIDENCE / "quickstart.csv") if row["budget"] == budget]
    shapes = sorted({tuple(row[axis] for axis in surface.AXES) for row in rows})

    def slope(part: list[Mapping[str, float]]) -> float:
        columns = surface.list_columns(part, "params")
        design, logs = surface._design(part, [*columns.values()], "top1")
        fitted = dict(zip(columns, np.linalg.lstsq(design, logs.mean(1), rcond=None)[0][1:], strict=True))
        return fitted["num_heads"] - fitted["head_dim"]

    full = slope(rows)
    rest = [slope([r for r in rows if tuple(r[axis] for axis in surface.AXES) != s]) for s in shapes]
    error = math.sqrt((len(shapes) - 1) / len(shapes) * ((np.array(rest) - full) ** 2).sum())
    half = error * stats.t.ppf(0.975, len(shapes) - 1)
    return Estimate(*(100 * math.expm1(x) for x in (full, full - half, full + half)))


def surface_steps() -> list[float]:
    """Return the change of the error per doubling of heads, in percent, between each two neighbouring shapes of a
    budget with the same depth and total width."""
    rows, groups = surface.read_table(tables.EVIDENCE / "quickstart.csv"), {}
    for row in rows:
        key = row["budget"], row["depth"], row["num_heads"] * row["head_dim"]
        groups.setdefault(key, {}).setdefault(row["num_heads"], []).append(math.log(1 - row["top1"]))
    return [
        100 * math.expm1((np.mean(by_heads[many]) - np.mean(by_heads[few])) / math.log2(many / few))
        for by_heads in groups.values()
        for few, many in itertools.pairwise(sorted(by_heads))
    ]


def tuning_runs(block: str, heads: int, key: str = "loss") -> dict[float, float]:
    """Return a value of the tuning seed's runs by learning rate."""
    found = language.rows_of(language.read_rows(), language.Arm(block, heads), language.TUNING_SEED)
    return {row["lr"]: row[key] for row in sorted(found, key=lambda row: row["lr"])}


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    for level in LEVELS:
        steps = arrivals(level)
        late = {n: Estimate.of(statistics.paired(x, steps[1])) for n, x in steps.items() if n > 1}
        yield f"Training loss {level}: step {steps[1].mean():.0f} with one head, later by " + ", ".join(
            f"{d:.0f} with {n}" for n, d in late.items()
        )
    yield "All runs at step 400: {:.2f} to {:.2f} nats".format(*plateau())
    yield f"32 heads minus one at step 1,000 of 4,000, pooled error: {behind_pooled(1000):+.3f}"
    for block in "AFGD":
        for (few, many), (d, p) in pooled_doublings(block).items():
            yield f"{block}, {few} to {many} heads, pooled error: {Estimate.of(d):+.3f}, Holm p {p:.3f}"
    for (block, few, many), (change, inside) in per_doubling().items():
        word = "equivalent" if inside else "not equivalent"
        yield f"{block}, {few} to {many} heads, 90 %, per doubling: {change:+.4f} {word}"
    for arms in (*((name,) for name in vision.CONTROLS), tuple(vision.CONTROLS)):
        yield f"Added heads, {'; '.join(arms)}: {added_heads(arms):+.1f %}"
    found = over_interventions()
    yield f"Per tenfold fall of κ, by intervention {found['one']:+.1f}, by family {found['family']:+.1f}"
    yield f"Rank correlation of fall and gain {found['correlation']:+.2f}, p {found['p']:.2f}"
    for budget in (120e3, 270e3):
        yield f"{budget:,.0f} parameters, heads at fixed total width, jackknife {surface_by_jackknife(budget):+.1f %}"
    steps = surface_steps()
    yield f"{sum(x < 0 for x in steps)} of {len(steps)} steps gain: {min(steps):+.1f} to {max(steps):+.1f} %"


@cli.command()
def main(_: cli.Values) -> None:
    print(*report(), sep="\n")


if __name__ == "__main__":
    cli.run(main)
