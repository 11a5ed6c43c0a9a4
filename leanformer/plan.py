"""From a budget to shapes: `python -m leanformer.plan --config=FILE --budget=params:40e6 [--runs=SWEEP] [--out=DIR]`

Enumerates shapes of the config's family (depth, width, heads, head width, MLP) that spend the budget, counts each one
exactly, and ranks them by a predictor that is named. Budgets: params:N, all parameters; flops:N, training FLOPs of an
example, attention's T² products counted; seconds:X@h100, a training step of the config's batch on that GPU, at --share
of its dense bfloat16 peak, which is an assumption; memory:BYTES[@h100], the most that a training step of the config's
batch holds on a device. Memory is estimated for every shape, of its traced step (training/memory.py), and the best are
compiled, minutes each: for this machine, or for a GPU that need not be here (the extra `gpu-compile`). The table says
which figure is which; --nocompile leaves it at the estimate.

With --runs, finished runs of your own, the predictor is a response surface fitted to them: the error it expects, a 90 %
interval, and which shapes cannot be told from the first. Without, it is one of the published ones, which order shapes
and promise nothing: benchmarks/planner.py says how often each is right, and none is always better than counting
parameters. --proxies=20 trains so many shapes of a third of the budget up to all of it first, as an ordinary sweep in
OUT/proxies with what --set says, and fits the surface to them; the same command goes on where it was stopped. Their
learning rate is the config's, not tuned by shape.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from leanformer import cli
from leanformer.config import rules
from leanformer.config.rules import require
from leanformer.errors import ConfigError
from leanformer.reports.comparison import tables
from leanformer.studies import budgets, comparison, proxies, runs, surface
from leanformer.studies.budgets import Budget
from leanformer.studies.predictors import AXES, PREDICTORS, Dimensions, of_model
from leanformer.studies.proxies import Base
from leanformer.studies.surface import Surface
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


def fitted(paths: Sequence[str], metric: str | None) -> Surface:
    """The response surface of finished runs. Raises ConfigError where they are too few, or of several questions."""
    found = runs.read(paths, metric)
    groups = comparison.group(found.runs)
    known = [runs.dimensions(group.runs[0]) for group in groups]
    return surface.fit(known, [runs.errors([run.value for run in group.runs], found.score) for group in groups])


def ranked(found: Sequence[Dimensions], by: str, fit: Surface | None) -> list[int]:
    """Places in `found`, best first. Raises ConfigError for a predictor that knows nothing of these shapes."""
    if fit is not None:
        return sorted(range(len(found)), key=fit.error(found).__getitem__)
    guesses = [PREDICTORS[by].of(d) for d in found]
    if None in guesses:
        raise ConfigError(f"--predictor={by} needs figures that {by} has not of this model: choose another.")
    return sorted(range(len(found)), key=lambda i: -guesses[i])


def table(best: Sequence[Dimensions], costs: Mapping[str, Sequence[str]], fit: Surface | None) -> str:
    """The best shapes, what they cost, what every predictor says of them, and what the surface expects."""
    head = ["depth", "width", "heads", "head width", "MLP", "params", *costs]
    said = {name: [p.of(d) for d in best] for name, p in PREDICTORS.items()}
    said = {name: guesses for name, guesses in said.items() if None not in guesses and name != "params"}
    head += [*said, *(["expected error", "90 % of runs", "as the first"] if fit else [])]
    rows = []
    for i, d in enumerate(best):
        row = [str(d.depth), str(d.width), str(d.heads[0]), str(d.head_dim[0]), str(d.mlp[0]), f"{d.params:,}"]
        row += [column[i] for column in costs.values()]
        row += [f"{guesses[i]:.4g}" for guesses in said.values()]
        if fit:
            low, high = fit.interval(best)[:, i]
            row += [f"{fit.error(best)[i]:.4g}", f"{low:.4g} to {high:.4g}", "yes" if fit.as_good(best)[i] else "worse"]
        rows.append(row)
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
    known = [*f.runs]
    fit = fitted(known, f.metric) if known and not f.proxies else None
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
        known.append(str(trained))
        fit = fitted(known, f.metric)
    order = [inside[i] for i in ranked([dimensions(c, costs, shape) for shape in inside], f.predictor, fit)]
    chosen, columns, notes = _charged(budget, held, order, price, number=f.best, compiles=f.compile)
    costs.confirm(c, chosen)
    best = [dimensions(c, costs, shape) for shape in chosen]
    by = f"a surface fitted to {', '.join(known)}" if fit else f"{f.predictor}: {PREDICTORS[f.predictor].what}"
    print(
        f"{len(inside):,} of {math.prod(map(len, axes.values())):,} shapes of {c.model.name} within --budget={f.budget}"
    )
    print(f"Ranked by {by}.\n{table(best, columns, fit)}")
    for note in (*notes, *budgets.told(budget, c, f.share, float(price(chosen[0])))):
        print(note)
    if not fit:
        print(
            "No interval: nothing was fitted to your data. To train proxies for one first, in as few epochs as can be"
        )
        print("afforded: the same command with --proxies=20 --set=total_epochs=EPOCHS --out=DIR")
    if f.proxies:
        print("Learning rates were not tuned by shape: of the config's own, some shapes may have wanted another.")
    if out is not None:
        names = {f"{c.model.name}_{i}_{'x'.join(map(str, shape))}": shape for i, shape in enumerate(chosen, 1)}
        why = f"--budget={f.budget}, ranked by {by}."
        print("Written:", *proxies.write(out, base, names, [d.params for d in best], why))


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
