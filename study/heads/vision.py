"""The paper's trade in small ViTs, half the layers and more heads: part 2 of PLAN.md.

    python -m study.heads.vision [--out=DIR --images=FOLDER] [--width=48] [--epochs=5]

With --out, trains the arms of one width, as `study.heads.language` does: learning rates with seed 100, then the
seeds at the best one. FOLDER holds the four files of Fashion-MNIST, which Debian's package dataset-fashion-mnist
installs to /usr/share/datasets/fashion-mnist. The same command resumes; every finished run is a row of
study/data/study_vision.csv. Without --out, prints what the rows say.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanformer import cli, config
from leanformer.analysis import statistics
from leanformer.errors import ConfigError
from leanformer.training import run_files
from study import common
from study.heads import language
from study.heads.language import TUNING_SEED, Arm
from study.tables import Estimate


ROWS = language.ROWS.with_name("study_vision.csv")
FIELDS = ("block", "num_heads", "width", "depth", "head_dim", "mlp_dim", "params", "epochs", "steps", "lr", "seed")
FIELDS += ("error", "loss", "train_loss", "log10_condition", "bounds", "date", "device")
RATES = (1e-3, 2e-3, 4e-3)
SEEDS = {48: (0, 1, 2, 3, 4), 96: (0, 1, 2, 3, 4), 192: (0, 1, 2)}  # by width
HEAD_DIM, DEPTH = 16, 8  # of the original
MARGIN = 3.0  # percent of the original's error, stated in PLAN.md


class Shape(NamedTuple):
    """Arm relative to the original: factors of its depth, heads, head dimension and MLP."""

    depth: float = 1.0
    heads: float = 1.0
    head_dim: float = 1.0
    mlp: float = 1.0


ARMS = {
    "original": Shape(),
    "lean, MLP kept": Shape(1 / 2, 4 / 3),
    "lean, MLP halved": Shape(1 / 2, 4 / 3, 1, 1 / 2),
    "lean, fixed width": Shape(1 / 2, 2, 1 / 2, 1 / 2),
    "layers halved": Shape(1 / 2),
    "layers and MLP halved": Shape(1 / 2, mlp=1 / 2),
}
CONTROLS = {  # arm without the added heads, by lean arm
    "lean, MLP kept": "layers halved",
    "lean, MLP halved": "layers and MLP halved",
    "lean, fixed width": "layers and MLP halved",
}


def make_arm(name: str, width: int, epochs: float) -> Arm:
    """Return the arm of a name. Its block names the epochs too; its heads name the width."""
    return Arm(f"{name}, {epochs:g} epochs", round(width / HEAD_DIM * ARMS[name].heads))


def get_config(name: str, width: int, epochs: float, lr: float, seed: int, images: str) -> config.ConfigDict:
    """Return the config of a run, with data of `images`, a value of data.name."""
    shape = ARMS[name]
    c = config.load("quickstart").unlock()
    c.update(total_epochs=epochs, seed=seed, loggers=(), log_every=100)
    c.data.name = images
    c.model.update(width=width, depth=round(DEPTH * shape.depth), mlp_dim=round(4 * width * shape.mlp))
    c.model.update(num_heads=make_arm(name, width, epochs).heads, head_dim=round(HEAD_DIM * shape.head_dim))
    c.optim.update(lr=lr, warmup_epochs=min(1.0, epochs / 4))
    c.probe.update(every=common.NEVER, examples=64)
    c.eval.every = 0
    return c.lock()


def run(
    arm: Arm, lr: float, seed: int, out: Path, *, name: str, width: int, epochs: float, images: str
) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row.

    κ is the median over layers and images; `bounds` is the share of images and layers in which it is only a bound.
    """
    c = get_config(name, width, epochs, lr, seed, images)
    workdir = out / f"{name}-width={width}-epochs={epochs:g}-lr={lr:g}-seed={seed}".replace(", ", "-").replace(" ", "-")
    trained, m = language.train(c, workdir), c.model
    last = run_files.read_records(workdir, "eval")[-1]
    output = run_files.read_records(workdir, "probe")[-1]["attention_output"]
    bounds = sum(output["singular"]) / (c.probe.examples * len(output["singular"]))
    log10 = math.log10(float(np.median(output["median"])))
    return {
        **{"block": arm.block, "num_heads": arm.heads, "width": width, "depth": m.depth, "head_dim": m.head_dim},
        **{"mlp_dim": m.mlp_dim, "epochs": f"{epochs:g}", **trained, "steps": last["step"]},
        **{"error": f"{1 - last['top1']:.5f}", "log10_condition": f"{log10:.4f}"},
        "bounds": f"{bounds:.4f}",
    }


def read_errors(rows: Sequence[Mapping[str, Any]], width: int, epochs: float, key: str = "error") -> dict[str, Any]:
    """Return the errors by arm with at least three seeds, one per seed that all of these have.

    Empty unless the original and all lean arms are among them.
    """
    values: dict[str, dict[int, float]] = {}
    for name in ARMS:
        found = language.rows_of(list(rows), make_arm(name, width, epochs))
        values[name] = {row["seed"]: row[key] for row in found if row["seed"] != TUNING_SEED}
    values = {name: by_seed for name, by_seed in values.items() if len(by_seed) >= 3}
    if not {"original", *CONTROLS} <= set(values):
        return {}
    seeds = sorted(set.intersection(*map(set, values.values())))
    return {name: np.array([by_seed[seed] for seed in seeds]) for name, by_seed in values.items()}


def compare(errors: Mapping[str, np.ndarray]) -> dict[str, tuple[statistics.Difference, str]]:
    """Return for each arm the change of the error in percent of the original's mean, paired by seed, and whether "as
    good with fewer parameters" holds, is refuted, or is undecided.

    It holds if the 90 % interval ends below the margin, and is refuted if the 95 % interval begins above it.
    """
    percent = {name: 100 * values / errors["original"].mean() for name, values in errors.items()}
    result = {}
    for name in [name for name in errors if name != "original"]:
        change = statistics.paired(percent[name], percent["original"])
        good, bad = change.interval(0.9).high < MARGIN, change.interval().low > MARGIN
        result[name] = (change, "holds" if good else "refuted" if bad else "undecided")
    return result


def compare_heads(errors: Mapping[str, np.ndarray]) -> dict[str, statistics.Difference]:
    """Return for each lean arm whose control is there the error minus the control's, in percent of the original's
    mean, paired by seed: what the added heads change."""
    scale = 100 / errors["original"].mean()
    return {
        name: statistics.paired(scale * errors[name], scale * errors[control])
        for name, control in CONTROLS.items()
        if control in errors
    }


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    for width, epochs in sorted({(row["width"], row["epochs"]) for row in rows}):
        if not (errors := read_errors(rows, width, epochs)):
            yield f"Width {width}, {epochs:g} epochs: not every arm has three seeds yet"
            continue
        kappa = read_errors(rows, width, epochs, "log10_condition")
        yield f"Width {width}, {epochs:g} epochs, {len(errors['original'])} seeds"
        for name, values in errors.items():
            params = language.rows_of(list(rows), make_arm(name, width, epochs))[0]["params"]
            error = f"error {Estimate.mean(100 * values):.2f ±} %"
            yield f"  {name:<24}{params:>10,} parameters  {error}  log10 κ {kappa[name].mean():.2f}"
        for name, (change, verdict) in compare(errors).items():
            yield f"  {name}: {Estimate.of(change):+.1f %} of the error; as good: {verdict}"
        for name, change in compare_heads(errors).items():
            yield f"  {name}, minus {CONTROLS[name]}: {Estimate.of(change):+.1f %} of the original's error"


@cli.command(
    cli.Flag("out", "Folder for the runs; without it the rows are reported."),
    cli.Flag("images", "Folder of Fashion-MNIST's four files; needed with --out."),
    cli.Flag("width", "Width of the arms: 48, 96 or 192.", int, default=48),
    cli.Flag("epochs", "Epochs of training.", float, default=5.0),
)
def main(f: cli.Values) -> None:
    if f.out:
        if f.width not in SEEDS:
            raise ConfigError(f"--width={f.width}: not planned. Choose from {', '.join(map(str, SEEDS))}.")
        if not f.images:
            raise ConfigError("--out needs --images=FOLDER, with the four files of Fashion-MNIST.")
        about = {"width": f.width, "epochs": f.epochs, "images": f"idx:{Path(f.images).expanduser().resolve()}"}
        for name in ARMS:
            study = language.Study(functools.partial(run, name=name, **about), ROWS, FIELDS, RATES, "error")
            arm = make_arm(name, f.width, f.epochs)
            language.finish_arm(arm, SEEDS[f.width], Path(f.out).expanduser(), study)
    print(*report(language.read_rows(ROWS)), sep="\n")


if __name__ == "__main__":
    cli.run(main)
