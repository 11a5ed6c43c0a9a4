"""Shapes for a budget: `python -m leanformer.plan --config=FILE --budget=params:40e6 [--runs=SWEEP] [--out=DIR]`

Enumerates shapes of the config's family (depth, width, heads, head width, MLP) that spend the budget, counts each one
exactly, and ranks them by a predictor that is named. Budgets: params:N, all parameters; flops:N, training FLOPs of an
example, attention's T² products counted; seconds:X@h100, a training step of the config's batch on that GPU, at --share
of its dense bfloat16 peak, which is an assumption; memory:BYTES[@h100], the most that a training step of the config's
batch holds on a device. Memory is estimated for every shape, of its traced step (training/memory.py), and the best are
compiled, minutes each: for this machine, or for a GPU that need not be here (the extra `gpu-compile`). The table says
which figure is which; --nocompile leaves it at the estimate.

With --runs, finished runs of your own, the predictor is a response surface (Bayesian regression, analysis/surface.py)
fitted to them. It gives the expected error of each shape, a 90 % prediction interval, and whether the shape is worse
than the first with 95 % probability. Only shapes within the sizes of the trained ones are ranked: each size inside its
range, parameters at most 10 % outside. --extrapolate ranks the others apart. What the runs do not determine is listed.
Without --runs, the predictor is one of the published ones, which order shapes without an interval. How often each is
right is measured by experiments/planner.py; none is always better than counting parameters.

--proxies=20 first trains so many shapes, from a third of the budget up to all of it, as a sweep in OUT/proxies with
what --set says, and fits the surface to them. The same command resumes an interrupted sweep. The learning rate is the
config's, not tuned by shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from leanformer import cli
from leanformer.analysis import budgets, comparison, proxies, runs, surface
from leanformer.analysis.budgets import Budget
from leanformer.analysis.predictors import AXES, PREDICTORS, Dimensions, of_model
from leanformer.analysis.proxies import Base
from leanformer.analysis.surface import Scale, Surface
from leanformer.config import rules
from leanformer.config.rules import require
from leanformer.errors import ConfigError
from leanformer.reports.comparison import tables
from leanformer.training import memory, shapes
from leanformer.training.memory import Estimate
from leanformer.training.shapes import Costs, Shape


NEEDS_FLOPS = ("flops", "sovit")
Price = Callable[[Shape], int]


def dimensions(c: ConfigDict, costs: Costs, shape: Shape) -> Dimensions:
    """A shape as predictors take it."""
    model = c.model.to_dict() | dict(zip(AXES, shape, strict=True))
    flops = costs.of("forward_flops", shape) if "forward_flops" in costs.coefficients else None
    return of_model(model, costs.of("params", shape), flops, _tokens(c.model))


def _tokens(m: ConfigDict) -> int | None:
    """Of a sequence or an image, with the class token where there is one."""
    grid = rules.patches(m)
    return m.get("max_length") if grid is None else math.prod(grid) + (m.get("pool") == "token")


@dataclasses.dataclass(frozen=True)
class Fit:
    """Response surface of finished runs.

    Attributes:
        source: what it was fitted to, in words.
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


def rank(candidates: Sequence[Dimensions], by: str, fit: Surface | None) -> list[int]:
    """Return places in `candidates`, best first. Raises ConfigError for a predictor that lacks figures of them."""
    if fit is not None:
        return sorted(range(len(candidates)), key=fit.expected_error(candidates).__getitem__) if candidates else []
    guesses = [PREDICTORS[by].of(d) for d in candidates]
    if None in guesses:
        raise ConfigError(f"--predictor={by} needs figures that are not known of this model. Choose another predictor.")
    return sorted(range(len(candidates)), key=lambda i: -guesses[i])


def format_table(
    best: Sequence[Dimensions], costs: Mapping[str, Sequence[str]], fit: Surface | None, first: Dimensions
) -> str:
    """Format shapes with their costs, every predictor, and what the response surface expects.

    Args:
        first: shape that the others are compared with.
    """
    head = ["depth", "width", "heads", "head width", "MLP", "params", *costs]
    guesses = {name: [p.of(d) for d in best] for name, p in PREDICTORS.items()}
    guesses = {name: values for name, values in guesses.items() if None not in values and name != "params"}
    head += guesses
    rows = []
    for i, d in enumerate(best):
        row = [str(d.depth), str(d.width), str(d.heads[0]), str(d.head_dim[0]), str(d.mlp[0]), f"{d.params:,}"]
        row += [column[i] for column in costs.values()]
        rows.append(row + [f"{values[i]:.4g}" for values in guesses.values()])
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


def _over(texts: Sequence[str]) -> dict[str, list[int]]:
    found = {}
    for text in texts:
        key, _, values = text.partition("=")
        if (name := key.removeprefix("model.")) in found:
            raise ConfigError(f"--over={text}: {key} is told twice. Give all of its values in one --over.")
        try:
            found[name] = [int(value) for value in values.split(",")]
        except ValueError as error:
            raise ConfigError(f'--over="{text}" is not model.KEY=NUMBER,NUMBER,...') from error
    return found


@cli.command(
    cli.CONFIG,
    cli.Flag("budget", "params:N, flops:N, seconds:X@DEVICE, memory:BYTES or memory:BYTES@DEVICE.", required=True),
    cli.Flag("slack", "Share of the budget that may be left.", float, default=0.05),
    cli.Flag("over", "model.KEY=NUMBER,...: sizes that an axis of the shape may take.", default=(), many=True),
    cli.Flag("predictor", "What ranks the shapes, where there are no runs.", tuple(PREDICTORS), default="nsc"),
    cli.Flag("runs", "Finished sweeps or runs of other shapes, for a surface.", list, default=()),
    cli.Flag("extrapolate", "Rank shapes outside the sizes of the runs too, apart.", bool, default=False),
    cli.Flag("proxies", "So many shapes, trained first in OUT/proxies for a surface; 0 trains none.", int, default=0),
    cli.Flag("set", "KEY=VALUE of the proxies: total_epochs=5, for instance.", default=(), many=True),
    cli.Flag("seeds", "Of each proxy.", int, default=2),
    cli.Flag("metric", "NAME[:higher|lower] that the surface predicts; the runs' own score if not given."),
    cli.Flag("share", "Of a GPU's peak that a step reaches, for seconds.", float, default=0.4),
    cli.Flag("compile", "Compile the best shapes, for memory; minutes each.", bool, default=True),
    cli.Flag("best", "How many shapes are shown and written.", int, default=5),
    cli.Flag("out", "Folder for a config file of each of them.", writes=True),
)
def main(f: cli.Values) -> None:
    c = f.config
    budget = budgets.parse(f.budget, c, f.share)
    of_model(c.model.to_dict(), 0)  # refuses stages before anything is counted
    out = None if f.out is None else Path(f.out).expanduser()
    base = Base.of(f.files["config"], c)
    require(f.best >= 1, f"--best={f.best}: take 1 at least.")
    require(f.proxies == 0 or out is not None, f"--proxies={f.proxies} need a folder: give --out.")
    require(f.proxies == 0 or f.proxies >= surface.FEWEST, f"--proxies={f.proxies}: take {surface.FEWEST} at least.")
    paths = [*f.runs]
    require(not f.extrapolate or bool(paths or f.proxies), "--extrapolate needs runs: give --runs or --proxies.")
    fit = fit_runs(paths, f.metric) if paths and not f.proxies else None
    axes = shapes.ranges(c, _over(f.over))
    counted = {"params", budget.counted or "params"} | ({"forward_flops"} if f.predictor in NEEDS_FLOPS else set())
    costs = shapes.settle(c, sorted(counted))
    held = memory.estimate(c, budget.device) if budget.kind == "memory" else None
    price = held.of if held else functools.partial(costs.of, budget.counted)
    inside = shapes.enumerate_within(axes, price, budget.amount, f.slack)
    if f.proxies:
        able = shapes.enumerate_within(axes, price, budget.amount, 1 - proxies.SMALLEST)
        why = f"a proxy for --budget={f.budget}, at the config's own learning rate."
        words = [f"--seeds={f.seeds}", "--together", *(f"--set={text}" for text in f.set)]
        trained = proxies.train(out / "proxies", base, shapes.spread(able, f.proxies), costs, why=why, words=words)
        paths.append(str(trained))
        fit = fit_runs(paths, f.metric)
    by = fit.source if fit else f"{f.predictor}: {PREDICTORS[f.predictor].what}"
    print(
        f"{len(inside):,} of {math.prod(map(len, axes.values())):,} shapes of {c.model.name} within --budget={f.budget}"
    )
    print(f"Ranked by {by}.")
    candidates = {shape: dimensions(c, costs, shape) for shape in inside}
    groups = _grouped(candidates, fit.surface if fit else None, f.extrapolate)
    names: dict[str, Shape] = {}
    params: list[int] = []
    notes: list[str] = []
    first = None
    for title, prefix, group in groups:
        order = [group[i] for i in rank([candidates[shape] for shape in group], f.predictor, fit and fit.surface)]
        chosen, columns, more = _charged(budget, held, order, price, number=f.best, compiles=f.compile)
        costs.confirm(c, chosen)
        best = [candidates[shape] for shape in chosen]
        first = first or best[0]
        print(title + format_table(best, columns, fit and fit.surface, first))
        names |= {f"{prefix}{i}_{'x'.join(map(str, shape))}": shape for i, shape in enumerate(chosen, 1)}
        params += [d.params for d in best]
        notes += [note for note in more if note not in notes]
    if fit and not f.extrapolate and (left := len(inside) - len(groups[0][2])):
        print(f"{left:,} shapes outside those sizes are not ranked; --extrapolate ranks them apart.")
    for note in (
        *(fit.notes if fit else ()),
        *notes,
        *budgets.told(budget, c, f.share, float(price(next(iter(names.values()))))),
    ):
        print(note)
    if not fit:
        print(
            "No interval: nothing was fitted to your data. To train proxies first, in as few epochs as you can afford,"
        )
        print("run the same command with --proxies=20 --set=total_epochs=EPOCHS --out=DIR")
    if f.proxies:
        print("Learning rates were not tuned by shape: the config's own may favour some shapes.")
    if out is not None:
        named = {f"{c.model.name}_{name}": shape for name, shape in names.items()}
        print("Written:", *proxies.write(out, base, named, params, f"--budget={f.budget}, ranked by {by}."))


def _grouped(
    candidates: Mapping[Shape, Dimensions], fit: Surface | None, extrapolate: bool
) -> list[tuple[str, str, list[Shape]]]:
    """Return the title, the prefix of names and the shapes of each table.

    Raises:
        ConfigError: no shape lies within the sizes of the runs, and extrapolation is off.
    """
    if fit is None:
        return [("", "", [*candidates])]
    outside = {shape: bool(fit.design.outside(d)) for shape, d in candidates.items()}
    parts = [[shape for shape in candidates if outside[shape] is apart] for apart in (False, True)]
    if not parts[0] and not extrapolate:
        raise ConfigError(
            f"--runs: none of the {len(candidates):,} shapes within the budget lies within the sizes of the runs: "
            f"{fit.design.ranges()}. Train shapes of this budget (--proxies=20 --out=DIR), give sizes with --over, or "
            "rank by extrapolation (--extrapolate)."
        )
    titles = (
        f"{len(parts[0]):,} shapes within the sizes of the runs: {fit.design.ranges()}.\n",
        f"By extrapolation: {len(parts[1]):,} shapes outside those sizes. Train some of them to check.\n",
    )
    groups = [*zip(titles, ("", "extrapolated_"), parts, strict=True)]
    return [group for group in groups[: 1 + extrapolate] if group[2]]


def _charged(
    budget: Budget, held: Estimate | None, order: Sequence[Shape], price: Price, *, number: int, compiles: bool
) -> tuple[list[Shape], dict[str, list[str]], list[str]]:
    """The first `number` of shapes, columns of what the budget is of, and what must be said of them."""
    chosen = [*order[:number]]
    if held is None:
        columns = {} if budget.kind == "params" else {"train FLOPs": [f"{price(shape):,}" for shape in chosen]}
        return chosen, columns, []
    where = budget.device or "this machine"
    reason = budgets.missing(budget.device) if compiles else "--nocompile"
    c = held.config
    notes = [
        f"Memory, in bytes a device, is of a training step of batch {c.batch_size:,} in {c.accumulate} piece"
        f"{'s' if c.accumulate > 1 else ''} on {where}; estimated by what the traced step holds and keeps."
    ]
    if (c.model.get("unroll") or 1) > 1:
        notes.append(
            f"*** model.unroll={c.model.unroll} is not in the estimate, which is of model.unroll=1: two models "
            "compiled with all layers in one turn held 12 and 31 % more."
        )
    if reason:
        held.confirm(chosen)
        notes.append(f"*** Estimated, none compiled: {reason}")
        return chosen, {"estimated B": [f"{held.of(shape):,}" for shape in chosen]}, notes
    fit, passed = memory.fitting(held, order, budget.amount, number)
    columns = {"estimated B": [f"{held.of(s):,}" for s in fit], "compiled B": [f"{peak:,}" for peak in fit.values()]}
    return [*fit], columns, [*notes, *([passed] if passed else [])]


if __name__ == "__main__":
    cli.run(main)
