"""Does a real model have the peak of κ that random matrices have at as many columns as tokens? Part 4 of PLAN.md.

    python -m study.heads.peak [--out=DIR] [--heads=2,3,4,8,16] [--seeds=5] [--steps=0]

With --out, measures κ of the concatenated head outputs in four blocks of ViT-B 7x16 at 224 pixels, 197 tokens and heads
of 64 channels, before training, or with --steps after that many steps at a rate of 3e-4 with batch 8. Images are cut
from the photographs in scikit-image's package, whose code is not used (`pip install --no-deps scikit-image==0.26.0`).
The same command resumes; rows are in study/data/study_peak.csv. Without --out, prints what they say.
"""

import functools
import importlib.util
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

from leanformer import cli, conditioning, config, tasks
from leanformer.analysis import statistics
from leanformer.conditioning import gaussian
from leanformer.errors import ConfigError, DataError
from leanformer.runtime.mesh import make_mesh
from leanformer.training import evaluators, inference, model_setup
from study import common
from study.heads import language
from study.tables import Estimate


ROWS = language.ROWS.with_name("study_peak.csv")
FIELDS = ("num_heads", "steps", "seed", "log10_condition", "bounds")
TOKENS, HEAD_DIM, DEPTH, SIDE = 197, 64, 4, 224
PICTURES = ("astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "hubble_deep_field")
PICTURES += ("moon", "motorcycle_left", "retina", "rocket")
CROPS = {"train": 32, "val": 2}  # of each photograph
IMAGES = CROPS["val"] * len(PICTURES)  # on which κ is measured


def cut_images(folder: Path) -> None:
    """Write square crops of 224 to 280 pixels of each photograph, with its name as class, below `folder`.

    Raises:
        DataError: scikit-image is not installed.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise DataError("scikit-image is not installed: pip install --no-deps scikit-image==0.26.0")
    rng = np.random.default_rng(0)
    for name in PICTURES:
        (path,) = (Path(spec.origin).parent / "data").glob(f"{name}.*")
        with Image.open(path) as file:
            image = file.convert("RGB")
        for split, number in CROPS.items():
            target = folder / split / name
            target.mkdir(parents=True, exist_ok=True)
            for i in range(number):
                side = int(rng.integers(SIDE, 281))
                left, top = (int(rng.integers(size - side + 1)) for size in image.size)
                image.crop((left, top, left + side, top + side)).save(target / f"{i}.png")


def get_config(heads: int, steps: int, seed: int, images: Path) -> config.ConfigDict:
    """Return the config of a model and of its short training."""
    c = config.load("vit_b_7x16").unlock()
    c.update(batch_size=8, total_epochs=0.0, total_steps=max(steps, 1), seed=seed, dtype="float32", loggers=())
    c.data.update(name=f"folder:{images}", eval_split="val", workers=0)
    c.model.update(depth=DEPTH, num_heads=heads, head_dim=HEAD_DIM, num_classes=len(PICTURES))
    c.augment.update(mixup=0.0, cutmix=0.0, rand_magnitude=0.0)
    c.optim.update(lr=3e-4, warmup_epochs=0.0, warmup_steps=10)
    c.probe.update(every=0, examples=IMAGES)
    c.eval.update(every=0, batch_size=IMAGES)
    return c.lock()


@functools.partial(jax.jit, static_argnums=0)
def read_outputs(graphdef: Any, weights: Any, *inputs: jax.Array) -> dict[str, jax.Array]:
    """Return the head outputs, L B T N H, by stack."""
    _, taps = nnx.merge(graphdef, *weights)(*inputs, tap=lambda arrays: arrays["out"])
    return taps


def measure(c: config.ConfigDict, workdir: Path | None) -> dict[str, str]:
    """Return the columns of a row: medians over images by layer, before training or of a finished run in `workdir`.

    The model runs in float64: in float32, κ of most images is a bound.
    """
    opened = inference.open_run(workdir) if workdir else None
    task = opened.task if opened else tasks.build_task(c)
    model = opened.model if opened else model_setup.set_up_model(c, mesh=make_mesh(devices=jax.devices()[:1]))
    weights = inference.restore_weights(workdir, model).weights if opened else model.random_weights(c.seed)
    batch = evaluators.probe_batch(model, task.data, task.data.open(c.data.eval_split), IMAGES)
    with jax.enable_x64(True), c.unlocked():
        c.dtype = "float64"
        graphdef, *_ = model_setup.abstract_model(c)
        weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), weights)
        (outputs,) = read_outputs(graphdef, weights, *task.objective.inputs(batch)).values()
        layers = conditioning.digest(conditioning.condition(np.asarray(outputs).reshape(*outputs.shape[:3], -1)))
    bounds = sum(layer["singular"] for layer in layers) / sum(layer["count"] for layer in layers)
    return {
        "log10_condition": " ".join(f"{math.log10(layer['median']):.4f}" for layer in layers),
        "bounds": f"{bounds:.4f}",
    }


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the rows, with log10 κ as the mean over layers."""
    return [row | {"log10_condition": float(np.mean(row["log10_condition"]))} for row in language.read_rows(path)]


def compare(rows: Iterable[Mapping[str, Any]], steps: int) -> dict[tuple[int, int], statistics.Difference]:
    """Return the paired differences of log10 κ at 3 heads to 2 and to 4; empty without three common seeds."""
    values: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["steps"] == steps:
            values.setdefault(row["num_heads"], {})[row["seed"]] = row["log10_condition"]
    seeds = sorted(set.intersection(*(set(values.get(heads, {})) for heads in (2, 3, 4))))
    if len(seeds) < 3:
        return {}
    table = {heads: np.array([values[heads][seed] for seed in seeds]) for heads in (2, 3, 4)}
    return {(3, other): statistics.paired(table[3], table[other]) for other in (2, 4)}


def decide(differences: Mapping[tuple[int, int], statistics.Difference]) -> str:
    """Return the verdict on the peak: it holds if both 95 % intervals are above 0, and is refuted if one is below."""
    intervals = [difference.interval() for difference in differences.values()]
    if not intervals:
        return "not run"
    if any(interval.high < 0 for interval in intervals):
        return "refuted"
    return "holds" if all(interval.low > 0 for interval in intervals) else "undecided"


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    for steps in sorted({row["steps"] for row in rows}):
        yield f"After {steps} steps" if steps else "Before training"
        for heads in sorted({row["num_heads"] for row in rows if row["steps"] == steps}):
            chosen = [row for row in rows if row["steps"] == steps and row["num_heads"] == heads]
            logs, bounds = (np.array([row[name] for row in chosen]) for name in ("log10_condition", "bounds"))
            spread = f" (sd {logs.std(ddof=1):.2f})" if len(logs) > 1 else ""
            random = f"Gaussian {math.log10(gaussian(TOKENS, heads * HEAD_DIM).median):.2f}"
            count = f"{len(logs)} seeds, {bounds.mean():.0%} bounds"
            yield f"  {heads:>3} heads: log10 κ {logs.mean():.2f}{spread}, {count}; {random}"
        differences = compare(rows, steps)
        for (a, b), difference in differences.items():
            yield f"  {a} minus {b} heads: {Estimate.of(difference):+.2f}"
        yield f"  The peak is at 3 heads: {decide(differences)}"


@cli.command(
    cli.Flag("out", "Folder for the images and the runs; without it the rows are reported."),
    cli.Flag("heads", "Numbers of heads.", list, default=["2", "3", "4", "8", "16"]),
    cli.Flag("seeds", "Seeds of each.", int, default=5),
    cli.Flag("steps", "Steps of training before κ is measured.", int, default=0),
)
def main(f: cli.Values) -> None:
    if invalid := [n for n in f.heads if not (n.isdecimal() and int(n))]:
        raise ConfigError(f"--heads={','.join(f.heads)}: {invalid[0]!r} is no number of heads.")
    if f.out:
        out = Path(f.out).expanduser()
        if not (out / "images").is_dir():  # renamed when complete
            shutil.rmtree(out / "partial", ignore_errors=True)
            cut_images(out / "partial")
            (out / "partial").rename(out / "images")
        done = {(row["num_heads"], row["steps"], row["seed"]) for row in read_rows()}
        for seed in range(f.seeds):
            for heads in map(int, f.heads):
                if (heads, f.steps, seed) in done:
                    continue
                c, workdir = get_config(heads, f.steps, seed, out / "images"), None
                if f.steps:
                    workdir = out / f"heads={heads}-steps={f.steps}-seed={seed}"
                    common.train(c, workdir)
                row = {"num_heads": heads, "steps": f.steps, "seed": seed} | measure(c, workdir)
                language.append_row(row, ROWS, FIELDS)
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print(*report(read_rows()), sep="\n")


if __name__ == "__main__":
    cli.run(main)
