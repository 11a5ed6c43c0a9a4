"""Shapes for a budget: `python -m leanformer.plan --config=FILE --budget=params:40e6 [--runs=SWEEP] [--out=DIR]`

Enumerates the shapes of the config's model (depth, width, heads, head dimension, MLP) that spend a budget, counts each
one exactly, and ranks them by a response surface (Bayesian regression, analysis/surface.py). Budgets: params:N, all
parameters; flops:N, training FLOPs of an example, attention's T² products counted. Beside one of them,
--budget=memory:BYTES[@h100] compiles the first shapes, minutes each, for this machine or for a GPU that need not be
here (the extra `gpu-compile`), and skips those whose training step needs more on a device.

The surface is fitted to finished runs, --runs, or to proxy runs: --proxies=20 first trains so many shapes, from a third
of the budget up to all of it, as a sweep in OUT/proxies with what --set says. The same command resumes an interrupted
sweep. The surface gives the expected error of each shape, a 90 % prediction interval, and whether the shape is worse
than the first with 95 % probability. Only shapes within the sizes of the trained ones are ranked: each size inside its
range, parameters at most 10 % outside. --extrapolate ranks the others apart. What the runs do not determine is listed.
Learning rates are the config's, not tuned by shape.

Without runs nothing is ranked: the shapes shown are spread over all sizes. Published predictors are no better than
counting parameters on three of six tables (experiments/planner.py).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from leanformer import cli
from leanformer.analysis import comparison, compiled, proxies, runs, shapes, surface
from leanformer.analysis.dimensions import AXES, Dimensions, of_model
from leanformer.analysis.proxies import Base
from leanformer.analysis.shapes import Costs, Shape
from leanformer.analysis.surface import Scale, Surface
from leanformer.config import ConfigDict
from leanformer.config.rules import require
from leanformer.costs import hardware, plugin
from leanformer.costs.count import human
from leanformer.errors import ConfigError
from leanformer.reports.comparison import tables


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a shape may cost.

    Attributes:
        counted: "params" or "flops", of which a shape may have `amount`.
        memory: bytes of a device that a training step may need, None without a limit.
        device: GPU that it is compiled for, None for this machine.
    """

    counted: str
    amount: float
    memory: float | None = None
    device: str | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Budget":
        """Read the values of --budget. Raises ConfigError for what is no budget, or more than the device has."""
        amounts: dict[str, float] = {}
        device = None
        for text in texts:
            kind, _, rest = text.partition(":")
            number, at, name = rest.partition("@")
            try:
                amounts[kind] = float(number)
            except ValueError:
                amounts[kind] = math.nan
            fits = kind in ("params", "flops", "memory") and 0 < amounts[kind] < math.inf
            if not fits or bool(at) != bool(name) or (at and kind != "memory"):
                raise ConfigError(f"--budget={text}: give params:40e6 or flops:1e9, and memory:60e9[@h100] beside it.")
            device = name.lower() or device
        memory, counted = amounts.pop("memory", None), [*amounts]
        if len(counted) != 1:
            raise ConfigError(f"--budget: found {', '.join(counted) or 'no count'}. Give one of params:N and flops:N.")
        if device and memory > (most := plugin.memory(device)):
            raise ConfigError(f"--budget=memory:{memory:g}@{device}: it has {human(float(most))}B. Give less.")
        return cls(counted[0], amounts[counted[0]], memory, device)

    def notes(self) -> list[str]:
        """Warn of a limit above the memory that JAX takes by default."""
        taken = hardware.TAKEN * plugin.memory(self.device) if self.device else math.inf
        if self.memory is None or self.memory <= taken:
            return []
        return [
            f"WARNING: JAX takes {human(taken)}B ({hardware.TAKEN:.0%}) of {self.device}'s memory, under the budget, "
            "unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."
        ]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Response surface of finished runs.

    Attributes:
        source: description of the runs.
        notes: lines on what the runs do not determine.
    """

    surface: Surface
    source: str
    notes: list[str]


def fit_runs(paths: Sequence[str], metric: str | None) -> Fit:
    """Fit the response surface to finished runs. Raises ConfigError for too few shapes, or runs of several tasks."""
    data = runs.read(paths, metric)
    groups = comparison.group(data.runs)
    trained = [runs.dimensions(group.runs[0]) for group in groups]
    errors = [runs.errors([run.value for run in group.runs], data.score) for group in groups]
    scale = Scale(runs.error_limit(data.score))
    result = surface.fit(trained, errors, scale)
    error = f"1 - {data.score.name}, between 0 and {scale.limit:g}, on a logit scale"
    if math.isinf(scale.limit):
        error = f"{data.score.name}, above 0, on a log scale"
    source = f"a response surface of {error}, fitted to {len(data.runs)} runs of {len(groups)} shapes"
    notes = [f"  {sentence}" for sentence in result.design.undetermined()]
    if notes:
        notes.insert(0, "Not determined by these runs (a prior stands for it, which widens the intervals):")
    others = [key for key in runs.differing(data.runs) if key.removeprefix("model.") not in AXES]
    if others:
        notes.append(f"WARNING: the runs differ in {', '.join(others)} too, which the response surface does not model.")
    return Fit(result, f"{source} in {', '.join(paths)}", notes)


def format_table(
    best: Sequence[Dimensions], costs: Mapping[str, Sequence[int]], fit: Surface | None, first: Dimensions
) -> str:
    """Format shapes with their costs, and what the response surface expects.

    Args:
        first: shape that the others are compared with.
    """
    head = ["depth", "width", "heads", "head width", "MLP", *costs]
    rows = []
    for i, d in enumerate(best):
        row = [str(d.depth), str(d.width), str(d.heads[0]), str(d.head_dim[0]), str(d.mlp[0])]
        rows.append(row + [f"{column[i]:,}" for column in costs.values()])
    if fit:
        head += ["expected error", "90 % interval", "against the first"]
        worse, limit = fit.probability_worse(best, first), (1 + surface.LEVEL) / 2
        for row, d, error, low, high, probability in zip(
            rows, best, fit.expected_error(best), *fit.interval(best), worse, strict=True
        ):
            verdict = "worse" if probability > limit else "better" if probability < 1 - limit else "not told apart"
            row += [f"{error:.4g}", f"{low:.4g} to {high:.4g}", "-" if d == first else verdict]
        if any(outside := [fit.design.outside(d) for d in best]):
            head.append("outside the range of")
            for row, axes in zip(rows, outside, strict=True):
                row.append(", ".join(axes))
    return tables.aligned(head, rows)


def fitting(c: ConfigDict, budget: Budget, ranked: Sequence[Shape], number: int) -> tuple[dict[Shape, int], list[str]]:
    """Compile shapes in turn until `number` fit the memory or twice as many were compiled.

    Returns:
        The bytes of those that fit, and a line for each that does not.

    Raises:
        ConfigError: none fits.
    """
    fit: dict[Shape, int] = {}
    notes = []
    for shape in ranked[: 2 * number]:
        peak = compiled.peak(shapes.config_of(c, shape), budget.device)
        if peak <= budget.memory:
            fit[shape] = peak
        else:
            notes.append(f"Too large: {shapes.describe(shape)}, {peak:,} B.")
        if len(fit) == number:
            break
    if not fit:
        raise ConfigError(f"None of the first {len(notes)} shapes fits {budget.memory:g} B. {' '.join(notes)}")
    return fit, notes


def _over(texts: Sequence[str]) -> dict[str, list[int]]:
    result = {}
    for text in texts:
        key, _, values = text.partition("=")
        if (name := key.removeprefix("model.")) in result:
            raise ConfigError(f"--over={text}: {key} is given twice. Give all of its values in one --over.")
        try:
            result[name] = [int(value) for value in values.split(",")]
        except ValueError as error:
            raise ConfigError(f'--over="{text}" is not model.KEY=NUMBER,NUMBER,...') from error
    return result


@cli.command(
    cli.CONFIG,
    cli.Flag("budget", "params:N or flops:N; besides, memory:BYTES or memory:BYTES@DEVICE.", required=True, many=True),
    cli.Flag("slack", "Share of the budget that may be left.", float, default=0.05),
    cli.Flag("over", "model.KEY=NUMBER,...: sizes that an axis of the shape may take.", default=(), many=True),
    cli.Flag("runs", "Finished sweeps or runs of other shapes, for a surface.", list, default=()),
    cli.Flag("extrapolate", "Rank shapes outside the sizes of the runs too, apart.", bool, default=False),
    cli.Flag("proxies", "So many shapes, trained first in OUT/proxies for a surface; 0 trains none.", int, default=0),
    cli.Flag("set", "KEY=VALUE of the proxies: total_epochs=5, for instance.", default=(), many=True),
    cli.Flag("seeds", "Seeds of each proxy.", int, default=2),
    cli.Flag("metric", "NAME[:higher|lower] that the surface predicts; the runs' own score if not given."),
    cli.Flag("best", "How many shapes are shown and written.", int, default=5),
    cli.Flag("out", "Folder for a config file of each of them.", writes=True),
)
def main(f: cli.Values) -> None:
    c, budget = f.config, Budget.parse(f.budget)
    of_model(c.model.to_dict(), 0)  # refuses stages before anything is counted
    out = None if f.out is None else Path(f.out).expanduser()
    require(f.best >= 1, f"--best={f.best}: take 1 at least.")
    require(f.proxies == 0 or out is not None, f"--proxies={f.proxies} need a folder: give --out.")
    require(f.proxies == 0 or f.proxies >= surface.FEWEST, f"--proxies={f.proxies}: take {surface.FEWEST} at least.")
    require(not f.extrapolate or bool(f.runs or f.proxies), "--extrapolate needs runs: give --runs or --proxies.")
    base, fit = Base.of(f.files["config"], c), fit_runs(f.runs, f.metric) if f.runs and not f.proxies else None
    axes, names = shapes.ranges(c, _over(f.over)), [*dict.fromkeys(("params", budget.counted))]
    costs = Costs.fit(c, names)
    price = functools.partial(costs.of, budget.counted)
    inside = shapes.enumerate_within(axes, price, budget.amount, f.slack)
    if f.proxies:
        able = shapes.enumerate_within(axes, price, budget.amount, 1 - proxies.SMALLEST)
        why = f"a proxy for --budget={','.join(f.budget)}, at the config's own learning rate."
        words = [f"--seeds={f.seeds}", "--vmap", *(f"--set={text}" for text in f.set)]
        trained = proxies.train(out / "proxies", base, shapes.spread(able, f.proxies), costs, why=why, words=words)
        fit = fit_runs([*f.runs, str(trained)], f.metric)
    ranked = f"ranked by {fit.source}" if fit else "not ranked, spread over all sizes"
    number = math.prod(map(len, axes.values()))
    print(f"{len(inside):,} of {number:,} shapes of {c.model.name} within the budget, {ranked}.")
    sizes = {shape: _dimensions(c, costs, shape) for shape in inside}
    named: dict[str, Shape] = {}
    notes, first = [*(fit.notes if fit else ()), *budget.notes()], None
    for title, prefix, group in _grouped(sizes, fit and fit.surface, f.extrapolate, 2 * f.best):
        chosen, columns = group[: f.best], {}
        if budget.memory is not None:
            peaks, skipped = fitting(c, budget, group, f.best)
            chosen, columns, notes = [*peaks], {"bytes": [*peaks.values()]}, notes + skipped
        costs.confirm(c, chosen)
        columns = {name: [costs.of(name, shape) for shape in chosen] for name in names} | columns
        best = [sizes[shape] for shape in chosen]
        first = first or best[0]
        print(title + format_table(best, columns, fit and fit.surface, first))
        named |= {f"{c.model.name}_{prefix}{i}_{'x'.join(map(str, s))}": s for i, s in enumerate(chosen, 1)}
    print(*notes, sep="\n", end="\n" * bool(notes))
    if not fit:
        print("To rank them, train proxies in as few epochs as you can afford: the same command with --proxies=20")
        print("--set=total_epochs=EPOCHS --out=DIR, or give finished runs with --runs.")
    if out is not None:
        print("Written:", *base.write(out, named, costs, f"--budget={','.join(f.budget)}, {ranked}."))


def _dimensions(c: ConfigDict, costs: Costs, shape: Shape) -> Dimensions:
    return of_model(c.model.to_dict() | dict(zip(AXES, shape, strict=True)), costs.of("params", shape))


def _grouped(
    sizes: Mapping[Shape, Dimensions], fit: Surface | None, extrapolate: bool, spread: int
) -> list[tuple[str, str, list[Shape]]]:
    """Return the title, the prefix of names and the shapes of each table, best first.

    Args:
        spread: how many shapes to choose if there is no surface.

    Raises:
        ConfigError: no shape lies within the sizes of the runs, and extrapolation is off.
    """
    if fit is None:
        return [("", "", shapes.spread([*sizes], spread))]
    order = [[*sizes][i] for i in fit.expected_error([*sizes.values()]).argsort(kind="stable")]
    outside = {shape for shape in order if fit.design.outside(sizes[shape])}
    within, beyond = ([shape for shape in order if (shape in outside) is apart] for apart in (False, True))
    if not within and not extrapolate:
        raise ConfigError(
            f"--runs: none of the {len(sizes):,} shapes within the budget lies within the sizes of the runs: "
            f"{fit.design.ranges()}. Train shapes of this budget (--proxies=20 --out=DIR), give sizes with --over, or "
            "rank by extrapolation (--extrapolate)."
        )
    more = "" if extrapolate or not beyond else f" {len(beyond):,} others are not ranked; --extrapolate does it."
    groups = [
        (f"{len(within):,} shapes within the sizes of the runs: {fit.design.ranges()}.{more}\n", "", within),
        (f"By extrapolation: {len(beyond):,} shapes outside those sizes.\n", "extrapolated_", beyond),
    ]
    return [group for group in groups[: 1 + extrapolate] if group[2]]


if __name__ == "__main__":
    cli.run(main)
