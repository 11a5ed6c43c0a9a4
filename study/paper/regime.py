"""Number against dimension of attention heads at equal parameters, on a diagnostic task per theory.

    python -m study.paper.regime --tokens=197 --width=768 --heads=12 --head_dim=64 [--value_dim=64] --out=DIR

2026-11-22, at the defaults: on the rank task 3x256 has 5.2 % less error than 12x64 (4.8 to 5.6); on the count task 3
and 6 heads are worse, on the control task 24 and 48. Conditioning and spectral capacity rank 48x16 first, entropy
3x256.

Theories disagree on what matters: the rank of heads (Amsel, Yehudai and Bruna, ICLR 2025), their number (Yu et al.,
ICLR 2026), or their total width (Bhojanapalli et al. 2020; BERT at 16 x 128 and 8 x 256). A shape and
alternatives with the same number of parameters, split into more or fewer heads, are trained at 48 channels on a
diagnostic task for each theory.
The table also shows the condition number of attention with the Gaussian prediction, its entropy and Neural Spectral
Capacity, all at full size before training. The runs are stored in DIR, so the same command resumes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from leanformer import cli, config, text
from leanformer.analysis import statistics
from leanformer.analysis.design import Dimensions
from leanformer.analysis.statistics import LEVEL, Difference, Interval
from leanformer.conditioning import theory
from leanformer.config.rules import require
from leanformer.errors import TrainingError
from study import common
from study.shapes import predictors


WIDTH = 48  # channels of the models that are trained
HEAD_RATIOS = (0.25, 0.5, 2, 4)  # numbers of heads of the alternatives, relative to the shape
NEAR = 2**0.5  # the number of heads may be off by this factor
MEASURES = ("attention_output", "relative_attention_entropy", "largest_logit")
ORDERS = {  # predictors before training, and whether more is better
    "attention_output": ("conditioning", False),
    "relative_attention_entropy": ("entropy", True),
    "capacity": ("spectral capacity", True),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention shape: heads, each with `head_dim` channels of queries and keys, and `value_dim` of values."""

    heads: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)

    @property
    def widths(self) -> tuple[int, int]:
        """Return num_heads x head dimension of queries and keys, and of values."""
        return self.heads * self.head_dim, self.heads * self.value_dim

    def scaled(self, ratio: float) -> "Shape":
        """Return the shape with the same number of heads, their dimensions times `ratio` but at least 1."""
        return Shape(self.heads, *(max(1, round(size * ratio)) for size in (self.head_dim, self.value_dim)))


def make_alternatives(shape: Shape, ratio: float = 1.0) -> list[Shape]:
    """Return the shape and alternatives with the same total widths, also after scaling by `ratio`: about a quarter,
    half, twice and four times as many heads. Fewest heads first."""
    both = math.gcd(*shape.widths)
    divisors = [n for n in range(1, both + 1) if both % n == 0]
    numbers = {shape.heads}
    for times in HEAD_RATIOS:
        target = shape.heads * times
        near = min(divisors, key=lambda n: abs(math.log(n / target)))
        if max(near / target, target / near) <= NEAR:
            numbers.add(near)
    shapes = [Shape(n, *(width // n for width in shape.widths)) for n in sorted(numbers)]
    return [other for other in shapes if other.scaled(ratio).widths == shape.scaled(ratio).widths]


@dataclasses.dataclass(frozen=True)
class DiagnosticTask:
    """A diagnostic task for one theory.

    Attributes:
        description: the task in words.
        theory: property of the heads that must matter on it.
        metric: evaluation metric; lower is better, 1 is the best constant answer.
        configure: function that sets up the task and the model in a config, for the reference shape.
    """

    description: str
    theory: str
    metric: str
    configure: Callable[[ConfigDict, Shape], None]


def _rank(c: ConfigDict, shape: Shape) -> None:
    c.data.update(name="nearest", points=8, dim=WIDTH)
    c.model.update(mlp_dim=4 * WIDTH)
    c.optim.lr = 3e-3  # at 0.01, the learning rate of longer runs, some runs keep predicting zero


def _count(c: ConfigDict, shape: Shape) -> None:
    c.data.update(name="retrieval", points=16, dim=8, num_items=max(2, min(8, shape.heads)))
    c.model.update(inputs=8, outputs=1, mlp_dim=2 * WIDTH, pool="token")
    c.model.update(norm="layernorm", post_norm=False, activation="gelu")
    c.optim.lr = 2e-3


def _control(c: ConfigDict, shape: Shape) -> None:
    c.data.update(name="regression", points=10, dim=3)
    c.model.update(inputs=3, outputs=1, mlp_dim=4 * WIDTH, depth=2, causal=True, max_length=20)
    c.model.update(norm="layernorm", post_norm=False, activation="gelu")
    c.optim.lr = 2e-3


TASKS = {
    "rank": DiagnosticTask("each point's farthest point of a set on the sphere", "rank of heads", "error", _rank),
    "count": DiagnosticTask("the sum of the largest products with D vectors", "number of heads", "unexplained", _count),
    "control": DiagnosticTask("linear regression in context", "total width of heads", "error", _control),
}


def make_config(task: str, shape: Shape, reference: Shape, steps: int) -> ConfigDict:
    """Return the config of a shape on a task; `reference` sets the number of items that "count" retrieves."""
    c = config.points().unlock()
    c.update(batch_size=128, total_steps=steps, loggers=())
    c.model.update(width=WIDTH, num_heads=shape.heads, head_dim=shape.head_dim, value_dim=shape.value_dim)
    c.data.examples = 1024
    c.optim.warmup_steps = steps // 20
    c.eval.update(every=0, batch_size=1024)
    c.probe.every = c.checkpoint.every = 0
    TASKS[task].configure(c, reference)
    config.check(c)
    return c


@dataclasses.dataclass(frozen=True)
class TaskErrors:
    """Final errors on a task: one row per shape, one column per seed."""

    task: str
    shapes: Sequence[Shape]
    errors: np.ndarray

    def interval(self, row: int) -> Interval:
        """Return the interval of the mean of log10 errors."""
        return statistics.mean_interval(np.log10(self.errors[row]))

    def compare_with(self, row: int) -> list[tuple[int, Difference, float]]:
        """Return for every other shape its row, the difference of log10 errors paired by seed, and Holm's p."""
        logs = np.log10(self.errors)
        others = [i for i in range(len(self.shapes)) if i != row]
        differences = [statistics.paired(logs[i], logs[row]) for i in others]
        return list(zip(others, differences, statistics.holm([d.p_differs() for d in differences]), strict=True))


def trained(task: str, shapes: Sequence[Shape], reference: Shape, out: Path, **sizes: int) -> TaskErrors:
    """Train shapes on a task in folders of `out`, and return their errors.

    Args:
        sizes: `width` of the shapes at full size, `steps`, `seeds`.

    Raises:
        TrainingError: an error is not finite and positive, so it has no logarithm.
    """
    errors = np.empty((len(shapes), sizes["seeds"]))
    for (row, shape), seed in ((item, s) for item in enumerate(shapes) for s in range(sizes["seeds"])):
        c = make_config(task, shape.scaled(WIDTH / sizes["width"]), reference, sizes["steps"])
        c.seed = seed
        error = common.train(c, out / f"{task}_{shape}_{seed}".replace("/", "_"))["final"][TASKS[task].metric]
        if not (math.isfinite(error) and error > 0):
            raise TrainingError(f"{task}: {shape}, seed {seed}, ended with an error of {error}. Try other --steps.")
        errors[row, seed] = error
    return TaskErrors(task, shapes, errors)


def at_start(shape: Shape, tokens: int, width: int, seeds: int) -> dict[str, Any]:
    """Return medians over examples and seeds of attention at full size before training: MEASURES, the Gaussian
    prediction, spectral capacity, and `bound`, whether most matrices are singular in float32."""
    c = config.points().unlock()
    c.data.update(points=tokens, dim=width)
    c.model.update(width=width, num_heads=shape.heads, head_dim=shape.head_dim, value_dim=shape.value_dim)
    c.model.update(norm="layernorm", post_norm=False, mlp_dim=None)
    c.probe.update(examples=4, every=1)
    layers = common.measure_at_start(c, MEASURES, seeds)
    result = {name: float(np.median([digests[name][0]["median"] for digests in layers])) for name in MEASURES}
    outputs = [digests[MEASURES[0]][0] for digests in layers]
    result["bound"] = 2 * sum(x["singular"] for x in outputs) >= sum(x["count"] for x in outputs)
    result["gaussian"] = theory.gaussian(tokens, shape.heads * shape.value_dim).median
    return result | {"capacity": capacity(shape, width)}


def capacity(shape: Shape, width: int) -> float | None:
    """Return Neural Spectral Capacity of a layer's attention; None if values have another dimension than queries."""
    if shape.value_dim != shape.head_dim:
        return None
    return predictors.spectral_capacity(Dimensions(width, (shape.heads,), (shape.head_dim,), (1,), params=1))


def cells(
    shapes: Sequence[Shape], results: Sequence[TaskErrors], start: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table, one row per shape: errors with intervals, then the measures before training."""
    head = ["shape", *(f"{r.task} (error)" for r in results), "condition number", "Gaussian", "entropy", "NSC"]
    rows = []
    for row, (shape, measures) in enumerate(zip(shapes, start, strict=True)):
        errors = []
        for result in results:
            ends = result.interval(row)
            middle = 10 ** np.log10(result.errors[row]).mean()
            errors.append(f"{middle:.3g} ({10**ends.low:.3g} to {10**ends.high:.3g})")
        measured = [
            f"{'at least ' * measures['bound']}{measures['attention_output']:.3g}",
            f"{measures['gaussian']:.3g}",
            f"{measures['relative_attention_entropy']:.3f}",
            "-" if measures["capacity"] is None else f"{measures['capacity']:,.0f}",
        ]
        rows.append([str(shape), *errors, *measured])
    return head, rows


def sentences(shapes: Sequence[Shape], reference: int, results: Sequence[TaskErrors], start: Sequence[Mapping]) -> str:
    """Report for each task the shapes better and worse than number `reference`, and the ranking by each predictor."""
    lines = []
    for result in results:
        groups: dict[str, list[str]] = {"less error": [], "more error": [], "inconclusive": []}
        for i, difference, p in result.compare_with(reference):
            low, high = (100 * (10**x - 1) for x in (difference.interval().low, difference.interval().high))
            group = "inconclusive" if p >= 1 - LEVEL else "less error" if difference.value < 0 else "more error"
            groups[group].append(f"{shapes[i]} ({low:+.3g} to {high:+.3g} %)")
        values = "; ".join(f"{name}: {', '.join(names)}" for name, names in groups.items() if names)
        lines.append(f"{result.task}, {TASKS[result.task].theory}, against {shapes[reference]}: {values}")
    for key, (name, more) in ORDERS.items():
        if start[0][key] is not None:
            order = sorted(range(len(shapes)), key=lambda i: start[i][key], reverse=more)
            lines.append(f"best first by {name} before training: {', '.join(str(shapes[i]) for i in order)}")
    return "\n".join(lines)


def draw(shapes: Sequence[Shape], reference: int, results: Sequence[TaskErrors], start: Sequence[Mapping]) -> Figure:
    """Plot errors by number of heads, a panel per task, and the predictors relative to number `reference`."""
    figure = Figure(figsize=(4.2 * (len(results) + 1), 3.8), dpi=150, layout="constrained")
    panels, heads = figure.subplots(1, len(results) + 1), [shape.heads for shape in shapes]
    for axes, result in zip(panels, results, strict=False):
        logs = np.log10(result.errors)
        axes.plot(heads, result.errors, ".", color="#1f6f8b", alpha=0.4)
        ends = [result.interval(row) for row in range(len(shapes))]
        half = np.array([[10**m - 10**i.low, 10**i.high - 10**m] for i, m in zip(ends, logs.mean(axis=1), strict=True)])
        axes.errorbar(heads, 10 ** logs.mean(axis=1), yerr=half.T, color="#1f6f8b", marker="o", capsize=3)
        axes.set_title(f"{result.task}: {TASKS[result.task].description}", fontsize=8)
        axes.set_ylabel(f"error, 1 = constant answer; {LEVEL:.0%} intervals", fontsize=8)
    for key, (name, _) in ORDERS.items():
        if start[0][key] is not None:
            panels[-1].plot(
                heads, [measures[key] / start[reference][key] for measures in start], marker="o", label=name
            )
    panels[-1].set_title(f"before training, relative to {shapes[reference]}", fontsize=8)
    panels[-1].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(heads, [str(shape) for shape in shapes], fontsize=7)
    return figure


@cli.command(
    *(cli.Flag(name, f"{name} of the attention layer.", int, required=True) for name in ("tokens", "width", "heads")),
    cli.Flag("head_dim", "Channels of queries and keys of a head: its rank.", int, required=True),
    cli.Flag("value_dim", "Channels of values of a head; head_dim if not given.", int),
    cli.Flag("steps", "Training steps on each task.", int, default=1000),
    cli.Flag("seeds", "Seeds of each shape and task.", int, default=3),
    cli.Flag("out", "Folder for the runs and regime.png.", required=True),
)
def main(f: cli.Values) -> None:
    require(f.seeds >= 2, f"--seeds={f.seeds}: at least 2 are needed.")
    shape, out = Shape(f.heads, f.head_dim, f.value_dim or f.head_dim), Path(f.out).expanduser()
    shapes = make_alternatives(shape, WIDTH / f.width)
    require(
        len(shapes) > 1, f"{shape} has no alternative of equal parameters at --width={f.width} and at {WIDTH} channels."
    )
    start = [at_start(other, f.tokens, f.width, f.seeds) for other in shapes]
    sizes = {"width": f.width, "steps": f.steps, "seeds": f.seeds}
    results = [trained(task, shapes, shape, out, **sizes) for task in TASKS]
    print(text.table(*cells(shapes, results, start)), end="\n\n")
    print(sentences(shapes, shapes.index(shape), results, start))
    draw(shapes, shapes.index(shape), results, start).savefig(out / "regime.png")


if __name__ == "__main__":
    cli.run(main)
