"""Heads at fixed total width x length of training, in small ViTs: part E4 of PLAN2.md.

    python -m study.heads.vision_length train --images=FOLDER --out=DIR [--steps=390,2344,7031,14060]
    python -m study.heads.vision_length                                        # what the rows say

FOLDER holds the four files of Fashion-MNIST, which Debian's package dataset-fashion-mnist installs to
/usr/share/datasets/fashion-mnist. DIR gets the runs; the same command resumes, and every finished run is a row of
study/data/vision_length.csv. Runs learn from the first 55,000 training images. The error on the other 5,000 chooses
the learning rate, the error on the 10,000 test images is the result.
"""

import argparse
import datetime
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from leanformer import config
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from leanformer.data.images.sources import Idx
from study import common
from study.heads import language, mechanism
from study.heads.mechanism import TUNING_SEED
from study.tables import Estimate


ROWS = mechanism.ROWS.with_name("vision_length.csv")
FIELDS = ("arm", "num_heads", "head_dim", "steps", "lr", "seed", "error", "tuning_loss", "params", "date", "device")
HEADS, WIDTH, STEPS = (2, 4, 8, 16), 96, (390, 2344, 7031, 14060)
RATES, HELD_OUT = (1e-3, 2e-3, 4e-3), 5000
MARGIN = 3.0  # percent of the error of 2 heads: three doublings by 1 %


def split_images(source: Path, target: Path) -> None:
    """Write the training images as "fit", the last HELD_OUT of them as "tune", and the test images as they are."""
    target.mkdir(parents=True, exist_ok=True)
    train = Idx(source, "train")
    examples = [train[i] for i in range(len(train))]
    for key, stem in (("image", "images-idx3-ubyte"), ("label", "labels-idx1-ubyte")):
        values = np.array([example[key] for example in examples], np.uint8)
        for name, part in (("fit", values[:-HELD_OUT]), ("tune", values[-HELD_OUT:])):
            header = bytes((0, 0, 8, part.ndim)) + np.array(part.shape, ">u4").tobytes()
            (target / f"{name}-{stem}").write_bytes(header + part.tobytes())
        shutil.copy(source / f"t10k-{stem}.gz", target)


def get_config(heads: int, steps: int, lr: float, seed: int, images: Path) -> config.ConfigDict:
    """Return the config of a run: it is scored on the held-out images if it tunes, else on the test images."""
    c = config.load("quickstart").unlock()
    c.update(total_steps=steps, total_epochs=0.0, seed=seed, loggers=(), log_every=max(steps // 40, 1))
    c.data.update(name=f"idx:{images}", train_split="fit", eval_split="tune" if seed == TUNING_SEED else "t10k")
    c.model.update(width=WIDTH, num_heads=heads, head_dim=WIDTH // heads)
    c.optim.update(lr=lr, warmup_steps=min(100, steps // 4), warmup_epochs=0.0)
    c.eval.every = 0
    c.probe.every = 0
    return c.lock()


def run(heads: int, steps: int, lr: float, seed: int, images: Path, out: Path) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row."""
    name = f"heads={heads},steps={steps}"
    summary = common.train(get_config(heads, steps, lr, seed, images), out / f"{name},lr={lr:g},seed={seed}")
    error = f"{1 - summary['final']['top1']:.5f}"
    return {
        **{"arm": name, "num_heads": heads, "head_dim": WIDTH // heads, "steps": steps, "lr": lr, "seed": seed},
        **{"error": "nan" if seed == TUNING_SEED else error, "tuning_loss": error if seed == TUNING_SEED else "nan"},
        **{"params": summary["params"], "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")},
        "device": jax.devices()[0].device_kind,
    }


def errors_of(rows: Sequence[dict[str, Any]], steps: int) -> dict[int, dict[int, float]]:
    """Return the errors in percent of a length, by number of heads and seed."""
    errors: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["steps"] == steps and row["seed"] != TUNING_SEED:
            errors.setdefault(row["num_heads"], {})[row["seed"]] = 100 * row["error"]
    return errors


def change(rows: Sequence[dict[str, Any]], steps: int) -> Difference | None:
    """Return the change from 2 to 16 heads in percent of the error of 2, paired by seed; None if runs are missing."""
    errors = errors_of(rows, steps)
    few, many = errors.get(HEADS[0], {}), errors.get(HEADS[-1], {})
    if not few.keys() == many.keys() == set(mechanism.SEEDS):
        return None
    scale = 100 / np.mean([*few.values()])
    return statistics.paired(*(scale * np.array([e[s] for s in mechanism.SEEDS]) for e in (many, few)))


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield, by length, the mean errors and the change from 2 to 16 heads, and then the verdicts."""
    changes = {steps: found for steps in STEPS if (found := change(rows, steps))}
    for steps in STEPS:
        errors = sorted(errors_of(rows, steps).items())
        means = ", ".join(f"{n} heads {np.mean([*e.values()]):.2f} % ({len(e)})" for n, e in errors)
        yield f"{steps} steps, error: {means or 'not run'}"
        if steps in changes:
            yield f"  {HEADS[0]} to {HEADS[-1]} heads: {Estimate.of(changes[steps]):+.1f %} of the error"
    if {STEPS[0], STEPS[-1]} <= set(changes):
        first, last = changes[STEPS[0]].interval(), changes[STEPS[-1]]
        inside = last.interval(0.9).low > -MARGIN and last.interval(0.9).high < MARGIN
        holds = "holds" if last.interval().high < 0 else "refuted" if inside else "undecided"
        yield f"The gain outlasts: {holds}"
        yield f"It is only early: {'holds' if inside and first.high < 0 else 'not shown'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("train",))
    parser.add_argument("--images", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", default=",".join(map(str, STEPS)))
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if options.what:
        if not (options.images and options.out):
            parser.error("train needs --images and --out")
        images = options.out.resolve() / "images"
        split_images(options.images, images)
        for steps in map(int, options.steps.split(",")):
            for heads in HEADS:
                arm = f"heads={heads},steps={steps}"
                while todo := mechanism.plan(arm, language.read_rows(options.rows), RATES):
                    lr, seed = todo[0]
                    row = run(heads, steps, lr, seed, images, options.out)
                    language.append_row(row, options.rows, FIELDS)
                    print(*row.values(), flush=True)
    print(*report(language.read_rows(options.rows)), sep="\n")


if __name__ == "__main__":
    main()
