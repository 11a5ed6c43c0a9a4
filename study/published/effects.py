"""Effects of a doubling of heads, depth or MLP on the score of published models.

`study/published/atlas.py` prints them. A positive effect is worse. Intervals are 95 %, with the unit of each table.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from study.published import published, regression
from study.published.published import PERCENT, Table
from study.published.published_scaling import OpenLM


HEADS, BY_DEPTH = "heads at fixed total width", "heads at fixed total width, by depth"
STEP, DEPTH, MLP = "one step of the head dimension", "depth for width", "MLP for width"
RESULTS = (16, 32, 48, 64, 96, 128)  # upper ends of ranges of the head dimension after adding heads, for pairs
NARROW = 48  # upper end of the ranges in which every pair of open_lm got worse
FEWEST, FEWEST_PAIRS = 30, 5  # models in a range, pairs of a step


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of a doubling.

    Attributes:
        table: source and data set.
        kind: kind of model.
        question: HEADS, BY_DEPTH, STEP, DEPTH or MLP.
        at: what is held equal, or the depth.
        form: functional form.
        main: True for the form whose p values are corrected, and that is plotted.
        unit: NATS or PERCENT.
        value, low, high: change of the score, with its interval.
        p: two-sided p value, uncorrected; NaN without a test.
        p_corrected: p value corrected over all effects of main forms; NaN for other forms.
        models: number of models, or of pairs.
        units: number of independent units.
        worse: number of pairs that got worse; None without pairs.
        widths: smallest and largest width of the models.
        dims: smallest and largest head dimension after a doubling of heads, for STEP the head dimensions before and
            after; None for other questions.
        mean_dim: geometric mean of the head dimension after a doubling; NaN for other questions.
    """

    table: str
    kind: str
    question: str
    at: str
    form: str
    main: bool
    unit: str
    value: float
    low: float
    high: float
    p: float
    models: int
    units: int
    widths: tuple[int, int]
    worse: int | None = None
    dims: tuple[int, int] | None = None
    mean_dim: float = math.nan
    p_corrected: float = math.nan


def correct(effects: Sequence[Effect]) -> list[Effect]:
    """Return effects with p values corrected over all main forms (Holm)."""
    main = [effect for effect in effects if effect.main]
    corrected = iter(statistics.holm([effect.p for effect in main]))
    return [dataclasses.replace(e, p_corrected=next(corrected)) if e.main else e for e in effects]


def to_percent(logarithm: float) -> float:
    """Return a difference of logarithms in percent."""
    return 100 * math.expm1(logarithm)


def _effect(table: Table, question: str, form: str, main: bool, estimate: Difference, **rest: object) -> Effect:
    interval = estimate.interval()
    values = estimate.value, interval.low, interval.high
    value, low, high = map(to_percent, values) if table.unit == PERCENT else values
    sizes = {"models": len(table.score), "at": "", "widths": extent(2**table.width)} | rest
    return Effect(
        table=table.name,
        kind=table.kind,
        question=question,
        form=form,
        main=main,
        unit=table.unit,
        value=value,
        low=low,
        high=high,
        p=estimate.p_differs(),
        units=estimate.count,
        **sizes,
    )


def extent(values: Iterable[float]) -> tuple[int, int]:
    """Return the smallest and the largest value, rounded."""
    values = [*values]
    return round(min(values)), round(max(values))


def estimate_heads(table: Table) -> Iterator[Effect]:
    """Yield the effect of a doubling of heads at fixed width, over all models and in each range of head dimensions.

    "squares", the main form: models of the range; squares of width, depth and parameters.
    "curved": all models; squares of the head dimension too, whose slope is taken at the mean of the range.
    "linear": models of the range, without squares.
    """
    if table.heads is None:
        return
    columns = {"heads": table.heads, "width": table.width, "depth": table.depth}
    columns |= {"size": table.sizes[published.BLOCKS], **table.other}
    if "image" in table.kind:
        columns["mlp"] = table.mlp
    everything = np.ones(len(table.score), bool)
    ranges = [r for r in table.ranges() if r[2].sum() >= FEWEST]
    if len(ranges) > 1:
        dims = 2**table.head_dim
        ends = published.after_doubling(dims.min(), dims.max())
        ranges.insert(0, (ends, float(table.head_dim.mean() - 0.5), everything))
    for ends, result, inside in ranges:
        if np.ptp(table.head_dim[inside]) == 0:
            continue  # heads follow from the width
        at = "all models" if inside is everything else ""
        mean = table.head_dim[inside].mean()
        curve = {"head dimension²": (table.head_dim - mean) ** 2}
        forms = {
            "squares": (inside, _with_squares(_select(columns, inside), "width", "depth", "size")),
            "curved": (everything, _with_squares(columns, "width", "depth", "size") | curve),
            "linear": (inside, _select(columns, inside)),
        }
        place = {"at": at, "dims": ends, "mean_dim": 2**result}
        for form, (models, terms) in forms.items():
            estimate = regression.fit(table.score[models], terms, table.clusters[models])["heads"]
            sizes = {"models": int(models.sum()), "widths": extent(2 ** table.width[models])}
            yield _effect(table, HEADS, form, form == "squares", estimate, **place, **sizes)


def _select(columns: Mapping[str, np.ndarray], inside: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows inside of the columns that vary there."""
    return {name: x[inside] for name, x in columns.items() if np.ptp(x[inside]) > 0}


def _with_squares(columns: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    """Return the columns, and centred squares of those named that have three values even without any one model."""
    result = dict(columns)
    for name in filter(columns.__contains__, names):
        counts = Counter(columns[name].round(6)).values()
        if len(counts) - (min(counts) == 1) > 2:
            result[f"{name}²"] = (columns[name] - columns[name].mean()) ** 2
    return result


def estimate_trade(table: Table, question: str) -> Iterator[Effect]:
    """Yield the effect of a doubling of depth (DEPTH) or MLP / width (MLP) at equal cost, where the width pays.

    "squares", the main form: squares of cost, depth, head dimension and MLP / width. "linear": of cost only.
    Depth, head dimension and MLP / width are held, except the one that doubles.
    """
    name = {DEPTH: "depth", MLP: "mlp"}[question]
    columns = {"depth": table.depth, "mlp": table.mlp, "dim": table.head_dim if table.heads is not None else None}
    columns = {key: x for key, x in columns.items() if x is not None and np.ptp(x) > 0} | dict(table.other)
    if not table.comparable or name not in columns:
        return
    for at, size in table.sizes.items():
        terms = columns | {"size": size}
        forms = {"squares": _with_squares(terms, "size", "depth", "mlp", "dim"), "linear": _with_squares(terms, "size")}
        for form, every in forms.items():
            estimate = regression.fit(table.score, every, table.clusters)[name]
            yield _effect(table, question, form, form == "squares", estimate, at=at)


def estimate_checkpoints(table: Table) -> Iterator[Effect]:
    """Yield the effect of depth over all checkpoints, with a level for each number of tokens."""
    for effect in estimate_trade(table, DEPTH):
        yield dataclasses.replace(effect, form=f"{effect.form}, all checkpoints", main=False)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models that differ in heads only.

    Attributes:
        width, depth: sizes of both.
        before, after: head dimensions.
        change: change of the loss per doubling of heads.
    """

    width: int
    depth: int
    before: float
    after: float
    change: float


def list_pairs(grid: OpenLM, warmup: int | None = None) -> list[Pair]:
    """Return neighbouring head counts of every (width, depth): the lowest loss over warm-ups, or at one warm-up."""
    result = []
    for (width, depth), lowest in grid.cells.items():
        losses = {n: grid.runs.get((width, depth, n, warmup), math.nan) if warmup else lowest[n] for n in lowest}
        counts = sorted(n for n, loss in losses.items() if loss == loss)
        for few, many in itertools.pairwise(counts):
            change = (losses[many] - losses[few]) / math.log2(many / few)
            result.append(Pair(width, depth, width / few, width / many, change))
    return result


def estimate_openlm(grid: OpenLM, table: Table) -> Iterator[Effect]:
    """Yield the effect of heads in open_lm, where everything but heads is equal within a (width, depth).

    "pairs", the main form: mean over neighbouring head counts. "pairs at equal warm-up": without a choice of the
    warm-up. "quadratic": a quadratic in log head dimension and a level for each (width, depth), at the mean of a range.
    """
    pairs = list_pairs(grid)
    warm = [pair for warmup in sorted({key[3] for key in grid.runs}) for pair in list_pairs(grid, warmup)]
    low = 0
    for high in RESULTS:
        inside = [pair for pair in pairs if low < pair.after <= high]
        dims = (low + 1 if low else math.ceil(min(pair.after for pair in inside))), high
        yield _average(table, HEADS, "pairs", inside, main=True, dims=dims)
        equal = [pair for pair in warm if low < pair.after <= high]
        yield _average(table, HEADS, "pairs at equal warm-up", equal, dims=dims)
        yield _fit_quadratic(grid, table, inside, dims)
        low = high
    for step in sorted({(pair.before, pair.after) for pair in pairs}):
        inside = [pair for pair in pairs if (pair.before, pair.after) == step]
        if len(inside) >= FEWEST_PAIRS:
            yield _average(table, STEP, "pairs", inside, dims=tuple(map(round, step)))
    for depth in sorted({pair.depth for pair in pairs}):
        inside = [pair for pair in pairs if pair.depth == depth and pair.after <= NARROW]
        dims = extent(pair.after for pair in inside)
        yield _average(table, BY_DEPTH, "pairs", inside, at=f"depth {depth}", dims=dims)


def _average(
    table: Table, question: str, form: str, pairs: Sequence[Pair], main: bool = False, **rest: object
) -> Effect:
    """Return the mean change over pairs; the unit is the (width, depth)."""
    changes = np.array([pair.change for pair in pairs])
    estimate = regression.mean(changes, np.array([f"{pair.width}x{pair.depth}" for pair in pairs]))
    sizes = {"models": len(pairs), "worse": int((changes > 0).sum()), "widths": extent(p.width for p in pairs)}
    return _effect(table, question, form, main, estimate, mean_dim=_mean_dim(pairs), **sizes, **rest)


def _mean_dim(pairs: Sequence[Pair]) -> float:
    return float(2 ** np.log2([pair.after for pair in pairs]).mean())


def _fit_quadratic(grid: OpenLM, table: Table, pairs: Sequence[Pair], dims: tuple[int, int]) -> Effect:
    """Return the slope of a quadratic within (width, depth), centred half a doubling above the mean of the pairs."""
    middle, rows = math.log2(_mean_dim(pairs)) + 0.5, []
    for cell, losses in grid.cells.items():
        x, y = np.log2([cell[0] / n for n in losses]) - middle, np.array([*losses.values()])
        if len(y) > 1:
            rows += [(f"{cell}", *row) for row in zip(y - y.mean(), x.mean() - x, x**2 - (x**2).mean(), strict=True)]
    labels, y, fewer, square = (np.array(column) for column in zip(*rows, strict=True))
    estimate = regression.fit(y, {"heads": fewer, "square": square}, labels)["heads"]
    sizes = {"models": len(y), "dims": dims, "mean_dim": _mean_dim(pairs)}
    return _effect(table, HEADS, "quadratic", False, estimate, **sizes)
