"""Architectures for a budget: `python -m leanformer.plan --config=FILE --budget=params:40e6 [--runs=SWEEP] [--out=DIR]`

Enumerates the architectures of the config's model (depth, width, heads, head dimension, MLP) that spend a budget,
counts each exactly, and ranks them by a response surface (Bayesian regression, analysis/surface.py). The budget is
params:N (all parameters) or flops:N (training FLOPs per example, including attention's T² matmuls). With an additional
--budget=memory:BYTES, the first architectures are compiled for this machine (minutes each). Those whose training step
needs more memory per device are skipped.

The surface is fitted to finished runs (--runs) or to proxy runs. --proxies=20 first trains that many architectures,
which cost a third of the budget to all of it, as a sweep in OUT/proxies with the settings of --set. The same command
resumes an interrupted sweep. The surface gives the expected error of each architecture, a 90 % prediction interval, and
whether it is worse than the first with 95 % probability. Only architectures within the sizes of the trained ones are
ranked: each size within its range, parameters at most 10 % outside. --extrapolate ranks the others in a separate table.
Effects that the runs do not determine are listed. The learning rate is the config's, not tuned per architecture.

Without runs nothing is ranked; the printed architectures are spread over all sizes. On published tables no predictor
wins everywhere, and the surface loses to counting parameters on one of six (study/shapes/planner.py).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from leanformer import cli, text
from leanformer.analysis import comparison, proxies, runs, shapes, surface
from leanformer.analysis.design import AXES, Dimensions, model_dimensions
from leanformer.analysis.proxies import Base
from leanformer.analysis.shapes import Costs, Shape
from leanformer.analysis.surface import Scale, Surface
from leanformer.config import ConfigDict
from leanformer.config.architectures import listed_per_layer
from leanformer.config.rules import LENGTHS
from leanformer.costs.count import format_count
from leanformer.errors import ConfigError
from leanformer.sweeps.runs import parse_assignment


@dataclasses.dataclass(frozen=True)
class Budget:
    """Budget that architectures must spend."""

    counted: str  # "params", or "flops" for training FLOPs per example
    amount: float
    memory: float | None = None  # limit of the bytes per device of a training step

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Budget":
        """Return the budget in values of --budget, such as "params:40e6" or "flops:1e9", and "memory:60e9"."""
        try:
            amounts = {kind: float(number) for kind, _, number in (text.partition(":") for text in texts)}
        except ValueError:
            amounts = {}
        whole, memory = len(amounts) == len(texts), amounts.pop("memory", None)
        if not whole or len(amounts) != 1 or not {*amounts} < {"params", "flops"}:
            raise ConfigError(
                f"--budget={','.join(texts)}: expected one of params:N and flops:N, such as params:40e6 or flops:1e9. "
                "A second --budget may limit the memory, such as memory:60e9."
            )
        return cls(*amounts.popitem(), memory)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Response surface fitted to finished runs."""

    surface: Surface
    source: str  # description of the runs
    notes: list[str]  # lines on effects that the runs do not determine, and on ignored differences between the runs


def fit_runs(paths: Sequence[str], metric: str | None) -> Fit:
    """Return the response surface of a metric, as in `runs.read`, fitted to the finished runs in these folders."""
    data = runs.read(paths, metric)
    groups = comparison.group(data.runs)
    trained = [runs.run_dimensions(group.runs[0]) for group in groups]
    errors = [runs.to_errors([run.value for run in group.runs], data.score) for group in groups]
    scale = Scale(runs.error_limit(data.score))
    result = surface.fit(trained, errors, scale)
    error = f"1 - {data.score.name}, between 0 and {scale.limit:g}, on a logit scale"
    if math.isinf(scale.limit):
        error = f"{data.score.name}, above 0, on a log scale"
    source = f"a response surface of {error}, fitted to {len(data.runs)} runs of {len(groups)} architectures"
    notes = [f"  {sentence}" for sentence in result.design.undetermined()]
    if notes:
        notes.insert(0, "Effects not determined by these runs (the prior is used, which widens the intervals):")
    others = [key for key in runs.differing_keys(data.runs) if key.removeprefix("model.") not in AXES]
    if others:
        notes.append(f"WARNING: the runs also differ in {', '.join(others)}, which the response surface ignores.")
    return Fit(result, f"{source} in {', '.join(paths)}", notes)


def format_table(
    best: Sequence[Dimensions], costs: Mapping[str, Sequence[int]], fit: Surface | None, first: Dimensions
) -> str:
    """Format a table of architectures, with costs by title of the column, and predictions compared with `first`."""
    head = ["depth", "width", "heads", "head dim", "MLP", *costs]
    rows = []
    for i, d in enumerate(best):
        row = [str(d.depth), str(d.width), str(d.heads[0]), str(d.head_dim[0]), str(d.mlp[0])]
        rows.append(row + [f"{column[i]:,}" for column in costs.values()])
    if fit:
        head += ["expected error", "90 % prediction interval", "compared with the first"]
        worse, limit = fit.probability_worse(best, first), (1 + surface.LEVEL) / 2
        for row, d, error, low, high, probability in zip(
            rows, best, fit.expected_error(best), *fit.interval(best), worse, strict=True
        ):
            verdict = "worse" if probability > limit else "better" if probability < 1 - limit else "indistinguishable"
            row += [f"{error:.4g}", f"{low:.4g} to {high:.4g}", "-" if d == first else verdict]
        if any(outside := [fit.design.outside(d) for d in best]):
            head.append("outside the range of")
            for row, axes in zip(rows, outside, strict=True):
                row.append(", ".join(axes))
    return text.table(head, rows)


def select_fitting(
    config: ConfigDict, budget: Budget, ranked: Sequence[Shape], number: int
) -> tuple[dict[Shape, int], list[str]]:
    """Compile architectures, best first, until `number` fit the memory, or twice as many have been compiled.

    Returns the peak bytes per device of each that fits, and a line for each that does not. Raises ConfigError if none
    fits.
    """
    fit: dict[Shape, int] = {}
    notes = []
    for shape in ranked[: 2 * number]:
        peak = shapes.peak_bytes(shapes.with_shape(config, shape))
        if budget.memory is None or peak <= budget.memory:
            fit[shape] = peak
        else:
            notes.append(f"Skipped (does not fit): {shapes.describe(shape)}, {peak:,} B.")
        if len(fit) == number:
            break
    if not fit:
        tried = format_count(len(notes), "architecture")
        raise ConfigError(f"--budget=memory:{budget.memory:g}: {tried} compiled, none fits. {' '.join(notes)}")
    return fit, notes


def _parse_over(values: Sequence[str]) -> dict[str, list[int]]:
    pairs = [parse_assignment(value, "--over") for value in values]
    return {key.removeprefix("model."): [int(number) for number in numbers.split(",")] for key, numbers in pairs}


@cli.command(
    cli.CONFIG,
    cli.Flag("budget", "params:N or flops:N; a second one may be memory:BYTES.", required=True, many=True),
    cli.Flag("slack", "Fraction of the budget that may be unused.", float, default=0.05, minimum=0, maximum=1),
    cli.Flag("over", "model.KEY=NUMBER,...: sizes to enumerate for this key.", default=(), many=True),
    cli.Flag("runs", "Folders of finished sweeps or runs to fit the response surface to.", list, default=()),
    cli.Flag("extrapolate", "Also rank architectures outside the sizes of the runs, separately.", bool, default=False),
    cli.Flag("proxies", "Number of proxy architectures to train first in OUT/proxies.", int, default=0, minimum=0),
    cli.Flag("set", "KEY=VALUE: config key of the proxy runs, such as total_epochs=5.", default=(), many=True),
    cli.Flag("seeds", "Seeds per proxy architecture.", int, default=2, minimum=1),
    cli.Flag("metric", "NAME[:higher|lower] that the surface predicts; by default the score of the runs."),
    cli.Flag("best", "Number of architectures to print and to write.", int, default=5, minimum=1),
    cli.Flag("out", "Folder for config files of the printed architectures."),
)
def main(flags: cli.Values) -> None:
    config, budget = flags.config, Budget.parse(flags.budget)
    model = config.model.to_dict()
    model_dimensions(model, 0)  # raises an error for models with stages before anything is counted
    if several := listed_per_layer(model):
        raise ConfigError(
            f"model.{min(several)}={several[min(several)]}: plan lists models of equal layers. Set one number for all."
        )
    if config.task == "points" and None in (config.model.inputs, config.model.outputs):
        raise ConfigError("plan varies the width, so set model.inputs to data.dim, and model.outputs to a target's.")
    out = None if flags.out is None else Path(flags.out).expanduser()
    if flags.proxies and (out is None or flags.proxies < surface.FEWEST):
        raise ConfigError(f"--proxies={flags.proxies}: pass {surface.FEWEST} or more, and a folder, --out=DIR.")
    base = Base.of(flags.files["config"], config)
    fit = fit_runs(flags.runs, flags.metric) if flags.runs and not flags.proxies else None
    axes, names = shapes.axis_values(config, _parse_over(flags.over)), [*dict.fromkeys(("params", budget.counted))]
    costs = Costs.fit(config, names)
    price = functools.partial(costs.of, budget.counted)
    limit = f"--budget={budget.counted}:{budget.amount:g}"
    inside = shapes.enumerate_within(axes, price, budget.amount, flags.slack, limit)
    if flags.proxies and out is not None:
        candidates = shapes.enumerate_within(axes, price, budget.amount, 1 - proxies.SMALLEST, limit)
        chosen = shapes.select_spread(candidates, flags.proxies)
        why = f"a proxy run for --budget={','.join(flags.budget)}, with the learning rate of the config."
        words = [f"--seeds={flags.seeds}", *(f"--set={assignment}" for assignment in flags.set)]
        trained = proxies.train(out / "proxies", base, chosen, costs, why=why, words=words)
        fit = fit_runs([*flags.runs, str(trained)], flags.metric)
    ranked = f"ranked by {fit.source}" if fit else "not ranked, spread over all sizes"
    number = math.prod(map(len, axes.values()))
    print(text.wrap(f"{len(inside):,} of {number:,} architectures of {config.model.name} spend the budget, {ranked}."))
    sizes = {
        shape: model_dimensions(model | dict(zip(AXES, shape, strict=True)), costs.of("params", shape))
        for shape in inside
    }
    named: dict[str, Shape] = {}
    notes, first = [*(fit.notes if fit else ())], None
    for title, prefix, group in _make_groups(sizes, fit.surface if fit else None, flags.extrapolate, 2 * flags.best):
        chosen, columns = group[: flags.best], {}
        if budget.memory is not None:
            peaks, skipped = select_fitting(config, budget, group, flags.best)
            chosen, columns, notes = [*peaks], {"bytes": [*peaks.values()]}, notes + skipped
        columns = {name: [costs.of(name, shape) for shape in chosen] for name in names} | columns
        best = [sizes[shape] for shape in chosen]
        first = first or best[0]
        print(title + format_table(best, columns, fit.surface if fit else None, first))
        named |= {f"{config.model.name}_{prefix}{i}_{'x'.join(map(str, s))}": s for i, s in enumerate(chosen, 1)}
    print(*map(text.wrap, notes), sep="\n", end="\n" * bool(notes))
    if not fit:
        length = next(key for key in LENGTHS if config.get(key))
        print("To rank them, train short proxy runs: the same command with --proxies=20")
        print(f"--set={length}=NUMBER --out=DIR, or pass finished runs with --runs.")
    if out is not None:
        print("Written:", *base.write(out, named, costs, f"--budget={','.join(flags.budget)}, {ranked}."))


def _make_groups(
    sizes: Mapping[Shape, Dimensions], fit: Surface | None, extrapolate: bool, spread: int
) -> list[tuple[str, str, list[Shape]]]:
    """Return the title, the prefix of names and the architectures of each table, best first; `spread` without a fit.

    Raises ConfigError if no architecture lies within the sizes of the runs, and `extrapolate` is False.
    """
    if fit is None:
        return [("", "", shapes.select_spread([*sizes], spread))]
    order = [[*sizes][i] for i in fit.expected_error([*sizes.values()]).argsort(kind="stable")]
    outside = {shape for shape in order if fit.design.outside(sizes[shape])}
    within, beyond = ([shape for shape in order if (shape in outside) is apart] for apart in (False, True))
    if not within and not extrapolate:
        raise ConfigError(
            f"--runs: none of the {len(sizes):,} architectures of this budget lies within the sizes of the runs: "
            f"{fit.design.ranges()}. Train architectures of this budget (--proxies=20 --out=DIR), set sizes with "
            "--over, or rank by extrapolation (--extrapolate)."
        )
    more = "" if extrapolate or not beyond else f" {len(beyond):,} more not ranked; --extrapolate ranks them."
    inner, outer = (format_count(len(group), "architecture") for group in (within, beyond))
    groups = [
        (f"{inner} within the sizes of the runs: {fit.design.ranges()}.{more}\n", "", within),
        (f"Extrapolated: {outer} outside these sizes.\n", "extrapolated_", beyond),
    ]
    return [group for group in groups[: 1 + extrapolate] if group[2]]


if __name__ == "__main__":
    cli.run(main)
