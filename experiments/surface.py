"""A response surface of our own: depth, heads, head width and MLP on the quickstart's data, at two budgets.

    python -m experiments.surface --out=DIR [--epochs=4] [--shapes=20] [--seeds=3] [--budgets=120e3,270e3]
        [--config=quickstart] [--set=KEY=VALUE ...] [--known=FILE] [--seconds=ROUNDS]

Of all shapes within 5 % under a budget of parameters, the model's width as in the config, it takes --shapes that lie as
far apart as they can, writes a config of each to DIR/shapes, and trains them with `leanformer.sweep --together`, all
with the config's learning rate. The same command goes on where it was stopped, and shapes of --known, the surface.csv
of an earlier command, are not trained again. DIR/surface.csv has a line a run, all of both; `experiments/planner.py`
scores predictors on experiments/evidence/quickstart.csv, which is one. Printed: what a doubling of depth, heads or head
width does to the error at equal parameters and at equal FLOPs, the MLP paying, and what twice the heads in half the
layers does, lean against deep; with 95 % intervals by bootstrap over shapes.

--seconds=20 measures a training step of each shape of the table too, on this machine, which should do nothing else: one
by one in one process, in rounds, all shapes in each. What the machine was slower in a round is taken out. The figures
are in DIR/seconds.csv, and in surface.csv as step_s; equal seconds are then a row of the tables, beside how far two
halves of the rounds agree. Of 40 shapes that are trained:

    python -m experiments.surface --out=DIR --epochs=5 --known=experiments/evidence/quickstart.csv --seconds=20

For CIFAR-10, of TFDS or in folders: the command in configs/cifar10.py. Other images: --config=FILE of a ViT on them.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from leanformer import cli, config
from leanformer.analysis import proxies, runs
from leanformer.analysis.dimensions import AXES
from leanformer.analysis.shapes import Shape
from leanformer.errors import ConfigError
from leanformer.training import shapes
from leanformer.training.experiment import Experiment


SLACK = 0.05
OVER = {
    "num_heads": [1, 2, 4, 8, 16, 32],
    "head_dim": [4, 8, 16, 32, 64],
}  # inner widths from 4 up to twice the width's
DRAWS = 2000
FREE = ("depth", "num_heads", "head_dim")
LEAN = "heads for layers"
STEP, HALVES = "step_s", ("even_s", "odd_s")
NEVER = 10**6  # steps: evaluated, probed and saved at the end alone, and probed at the start
ENDS = ("start", "end")
PROBED = ("attention_output", "attention_entropy", "largest_logit")  # at the start and at the end, means over layers
Row = dict[str, float | str]


def candidates(c: config.ConfigDict, costs: shapes.Costs, budget: float) -> list[Shape]:
    """Shapes that spend a budget, with attention from a sixth of the model's width to twice it."""
    width = c.model.width
    axes = shapes.ranges(c, OVER | {"width": [width], "depth": [1, 2, 3, 4, 6, 8], "mlp_dim": list(range(16, 1025, 8))})
    found = shapes.enumerate_within(axes, lambda shape: costs.of("params", shape), budget, SLACK)
    return [s for s in found if width / 6 <= s[2] * s[3] <= 2 * width]


def train(c: config.ConfigDict, options: argparse.Namespace, known: Sequence[Row]) -> None:
    """Writes the configs of shapes that are not known, and runs the sweep over them."""
    costs, chosen, done = shapes.settle(c, ["params"]), [], {_shape(row) for row in known}
    for budget in options.budgets:
        spread = shapes.spread(candidates(c, costs, budget), options.shapes)
        chosen += [shape for shape in spread if shape not in done]
    if not chosen:
        return
    costs.confirm(c, chosen)
    why = f"spread over all shapes of {' or '.join(f'{budget:,.0f}' for budget in options.budgets)} parameters."
    rhythm = [f"--set={name}.every={NEVER}" for name in ("eval", "checkpoint", "probe")]
    rhythm += [f"--set=probe.measures={PROBED!r}", f"--set=total_epochs={options.epochs}"]
    rhythm.append(f"--set=optim.warmup_epochs={options.epochs / 10}")
    own = {text.partition("=")[0] for text in options.set}  # said in the config files, which these would override
    rhythm = [word for word in rhythm if word.removeprefix("--set=").partition("=")[0] not in own]
    words = [f"--seeds={options.seeds}", "--together", *rhythm]
    proxies.train(options.out, proxies.Base.of(options.config, c), chosen, costs, why=why, words=words)


def read(folder: Path, budgets: list[float]) -> list[Row]:
    """A row a run of the sweep."""
    rows: list[Row] = []
    for run in runs.read([str(folder / "runs")]).runs if (folder / "runs").is_dir() else ():
        model = {axis: run.keys[f"model.{axis}"] for axis in AXES}
        final = run.summary["final"]
        budget = next((b for b in budgets if (1 - SLACK) * b <= run.summary["params"] <= b), None)
        if budget is None:
            continue  # of another command's budgets
        about = {"budget": budget, "seed": run.seed, "epochs": run.keys["total_epochs"]}
        counted = {name: run.cost(name) for name in ("params", "forward_flops")}
        probes = [record for record in run.records if record["kind"] == "probe"]
        measured = {
            f"{name}_{end}": _over_layers(probe, name)
            for end, probe in zip(ENDS, (probes[0], probes[-1]), strict=True)
            for name in PROBED
        }
        rows.append(about | model | counted | {name: final[name] for name in ("top1", "loss")} | measured)
    return rows


def _over_layers(probe: dict, name: str) -> float:
    """Median over layers of the median over images; not finite where one of them is but a bound."""
    figures = probe[name]
    return math.inf if any(figures.get("singular", ())) else float(np.median(figures["median"]))


def write(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_known(path: Path | None, epochs: float) -> list[Row]:
    """The rows of an earlier command. Exits where they are of another number of epochs."""
    rows = _table(path) if path else []
    if other := {row["epochs"] for row in rows} - {epochs}:
        sys.exit(f"--known={path} has runs of {min(other):g} epochs, and --epochs={epochs:g}. Take the same.")
    return rows


def joined(known: list[Row], own: list[Row]) -> list[Row]:
    """Both, a run once: --known may be the table of the same folder."""
    return [*{(_shape(row), row["seed"]): row for row in known + own}.values()]


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def _shape(row: Row) -> Shape:
    return tuple(int(row[axis]) for axis in AXES)


def measure(c: config.ConfigDict, chosen: Sequence[Shape], rounds: int) -> dict[Shape, tuple[float, float]]:
    """Seconds of a training step of each shape, by the even rounds and by the odd ones.

    A round has a step of every shape, forwards and backwards in turn; in it a shape's time is taken as a share of the
    geometric mean over shapes, and of the rounds the median, since others' work makes all shapes of a round slower.
    """
    steppers = [Stepper(shapes.built(c, shape, examples=c.batch_size)) for shape in chosen]
    times = np.empty((rounds, len(chosen)))
    for turn in range(rounds):
        for i in range(len(chosen))[:: -1 if turn % 2 else 1]:
            times[turn, i] = steppers[i].seconds()
    typical = np.exp(np.log(times).mean(axis=1, keepdims=True))
    halves = [np.median(times[k::2] / typical[k::2], axis=0) * np.median(typical) for k in (0, 1)]
    return {shape: (float(even), float(odd)) for shape, even, odd in zip(chosen, *halves, strict=True)}


class Stepper:
    """A shape's training step on random data."""

    def __init__(self, run: Experiment):
        from timing import batch_of  # found where this file is run, not where it is read

        self.step, self.state = run.compile_train_step(), run.initial_state()
        self.data, self.key = batch_of(run), run.run_key()
        self.seconds()  # the first is slower

    def seconds(self) -> float:
        """Of one more step, the best of two."""
        found = []
        for _ in range(2):
            begun = time.perf_counter()
            self.state, _ = jax.block_until_ready(self.step(self.state, self.data, self.key))
            found.append(time.perf_counter() - begun)
        return min(found)


def timed(rows: list[Row], folder: Path, c: config.ConfigDict, rounds: int) -> list[Row]:
    """The rows with step_s where DIR/seconds.csv has all shapes, which are measured first if `rounds` says so, or where
    all have it already."""
    path, wanted = folder / "seconds.csv", list(dict.fromkeys(_shape(row) for row in rows))
    if rounds:
        found = measure(c, wanted, rounds)
        names = (*AXES, *HALVES)
        write(path, [dict(zip(names, shape + pair, strict=True)) for shape, pair in found.items()])
    known = {_shape(row): [float(row[half]) for half in HALVES] for row in _table(path)} if path.is_file() else {}
    without = [{name: value for name, value in row.items() if name != STEP} for row in rows]
    if not set(wanted) <= known.keys():
        return rows if all(STEP in row for row in rows) else without
    return [row | {STEP: math.prod(known[_shape(row)]) ** 0.5} for row in without]


def _table(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def effects(rows: list[Row], currency: str, error: str) -> dict[str, tuple[float, float, float]]:
    """What a doubling does to the error, in percent, the currency kept and the MLP paying; with its 95 % interval.

    ln error = a + b ln currency + sum of c log2 axis, by least squares on means over seeds; bootstrap over shapes, then
    over the seeds of each, so that what the shapes happen to be is in the interval. LEAN is twice the heads in half the
    layers: the difference of two of them.
    """
    shapes_of: dict[tuple, list[Row]] = {}
    for row in rows:
        shapes_of.setdefault(_shape(row), []).append(row)
    own = [*shapes_of.values()]
    free = [axis for axis in FREE if len({row[axis] for row in rows}) > 1]
    design = np.array([[1, math.log(each[0][currency]), *(math.log2(each[0][axis]) for axis in free)] for each in own])
    logs = [np.log([_error(row, error) for row in each]) for each in own]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(DRAWS):
        chosen = rng.integers(len(own), size=len(own))
        means = [rng.choice(logs[i], len(logs[i])).mean() for i in chosen]
        drawn.append(np.linalg.lstsq(design[chosen], np.array(means), rcond=None)[0])
    fit = np.linalg.lstsq(design, np.array([each.mean() for each in logs]), rcond=None)[0]
    logs_of = {axis: np.array([fit, *drawn])[:, 2 + i] for i, axis in enumerate(free)}
    if {"num_heads", "depth"} <= logs_of.keys():
        logs_of[LEAN] = logs_of["num_heads"] - logs_of["depth"]
    ends = {axis: (found[0], *np.quantile(found[1:], (0.025, 0.975))) for axis, found in logs_of.items()}
    return {axis: tuple(float(100 * math.expm1(value)) for value in found) for axis, found in ends.items()}


def _error(row: Row, name: str) -> float:
    return 1 - row["top1"] if name == "top1" else row["loss"]


def report(rows: list[Row]) -> None:
    """Prints the tables."""
    shapes_of = len({_shape(row) for row in rows})
    print(f"{shapes_of} shapes, {len(rows)} runs of {rows[0]['epochs']:g} epochs, one learning rate.")
    print("A doubling of ..., the MLP paying: percent of the error, with a 95 % interval\n")
    print(f"{'budget':<10}{'error':<8}{'equal':<15}" + "".join(f"{axis:<24}" for axis in (*FREE, LEAN)))
    currencies = ("params", "forward_flops", *([STEP] if STEP in rows[0] else []))
    for budget in dict.fromkeys(row["budget"] for row in rows):
        part = [row for row in rows if row["budget"] == budget]
        for name in ("top1", "loss"):
            for currency in currencies:
                found = effects(part, currency, name)
                shown = "".join("{:<24}".format("{:+.1f} [{:+.1f}, {:+.1f}]".format(*found[axis])) for axis in found)
                print(f"{budget:<10,.0f}{name:<8}{currency:<15}{shown}")
        best = sorted(_means(part).items(), key=lambda item: item[1])
        print(
            "  best and worst by error: "
            + ", ".join(f"{'x'.join(map(str, s))} {100 * e:.1f} %" for s, e in (*best[:3], *best[-2:]))
        )


def agreement(path: Path) -> str:
    """How far the two halves of the rounds agree, in words; the error of the seconds is about half of it."""
    apart = [abs(math.log(row[HALVES[0]] / row[HALVES[1]])) for row in _table(path)]
    return (
        f"Seconds a step of {len(apart)} shapes: even and odd rounds differ by {100 * np.median(apart):.1f} % in the "
        f"median, {100 * max(apart):.1f} % at most."
    )


def _means(rows: list[Row]) -> dict[Shape, float]:
    """Mean error of each shape."""
    found: dict[Shape, list[float]] = {}
    for row in rows:
        found.setdefault(_shape(row), []).append(1 - row["top1"])
    return {shape: float(np.mean(errors)) for shape, errors in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--budgets", type=lambda text: [float(x) for x in text.split(",")], default=[120e3, 270e3])
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--known", type=Path)
    parser.add_argument("--seconds", type=int, default=0, metavar="ROUNDS")
    options = parser.parse_args()
    known = read_known(options.known, options.epochs)
    if options.seconds == 1:
        sys.exit("--seconds=1: two rounds at least, or nothing says how sure they are.")
    if any(text.startswith("total_epochs=") for text in options.set):
        sys.exit("--set=total_epochs: the epochs of all runs are said by --epochs.")
    words = [f"--config={options.config}", *(f"--config.{text}" for text in options.set)]
    try:
        c = cli.parse([cli.CONFIG], words).config
    except ConfigError as error:
        sys.exit(f"Error: {error}")
    train(c, options, known)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = timed(joined(known, read(options.out, options.budgets)), options.out, c, options.seconds)
    write(options.out / "surface.csv", rows)
    report(rows)
    if STEP in rows[0] and (options.out / "seconds.csv").is_file():
        print(agreement(options.out / "seconds.csv"))


if __name__ == "__main__":
    main()
