"""Speed of the input pipeline on this machine: `python -m tools.speed.input [--json]`, in about three minutes.

Transforms: images per second on one core, against plain Pillow decoding and resizing of the same JPEG files. The
files are natural-like (1/f noise, quality 90). Every round runs every candidate, so that other load
on the machine affects all equally; medians over rounds are shown. The goal of the training transform is 1.5 times
Pillow at every size. Also measured: the fraction of its time that a real training run waits for data.
"""

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from leanformer.data.images.transforms import Augmentation, eval_transform, train_transform
from leanformer.training import run_files
from tools.speed import timing


ROOT = Path(__file__).parents[2]
SIZES = ((500, 375, 15), (1024, 768, 9), (2048, 1536, 5))  # width, height, rounds; the first is typical of ImageNet
FILES = 48
CROP = 224


def write_images(folder: Path, width: int, height: int) -> list[Path]:
    """Write colour images of amplitude 1 / frequency: shifts of one periodic field, with permuted channels."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf
    noise = np.fft.rfft2(rng.standard_normal((4, height, width))) / frequency
    field = np.fft.irfft2(noise, s=(height, width))
    field /= field.std(axis=(1, 2), keepdims=True)
    field = field[:1] + 0.4 * field[1:]  # colours are correlated
    picture = np.clip(120 + 50 * field, 0, 255).astype(np.uint8).transpose(1, 2, 0)
    paths = []
    for index in range(FILES):
        shift = rng.integers(height), rng.integers(width)
        shifted = np.roll(picture, shift, axis=(0, 1))[..., rng.permutation(3)]
        paths.append(folder / f"{width}x{height}_{index}.jpg")
        Image.fromarray(np.ascontiguousarray(shifted)).save(paths[-1], quality=90)
    return paths


def make_candidates() -> dict[str, Callable[[Path], object]]:
    train = functools.partial(train_transform, rng=np.random.default_rng(0), size=CROP, channels=3)
    return {
        "Pillow": lambda path: Image.open(path).convert("RGB").resize((CROP, CROP), Image.Resampling.BICUBIC),
        "train": lambda path: train(path.read_bytes(), augmentation=Augmentation(rand_magnitude=9.0)),
        "train, no RandAugment": lambda path: train(path.read_bytes()),
        "eval": lambda path: eval_transform(path.read_bytes(), size=CROP, channels=3, crop_fraction=0.9),
    }


@contextlib.contextmanager
def pin_to_one_core() -> Iterator[None]:
    """Pin this process to one core, if the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def measure_transforms() -> list[dict]:
    """Return for each image size images/s of every candidate, and its speed relative to Pillow."""
    rows = []
    for width, height, rounds in SIZES:
        functions = make_candidates()
        seconds = {name: [] for name in functions}
        with tempfile.TemporaryDirectory() as folder:
            paths = write_images(Path(folder), width, height)
            for _ in range(rounds):
                for name, function in functions.items():
                    subset = (
                        paths if name in ("Pillow", "train") else paths[::4]
                    )  # the other candidates are only for explanation
                    start = time.perf_counter()
                    for path in subset:
                        function(path)
                    seconds[name].append((time.perf_counter() - start) / len(subset))
        row = {"JPEG size": f"{width}x{height}"}
        for name, values in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(seconds["Pillow"], values, strict=True))
            row[f"{name} images/s"] = f"{1 / statistics.median(values):.0f} x{ratio:.2f}"
        rows.append(row)
    return rows


def measure_data_wait() -> dict:
    """Return the fraction of time that a real run, the quickstart with its reader in a thread, waits for data."""
    with tempfile.TemporaryDirectory() as workdir:
        words = ["--config=configs/quickstart.py", "--config.total_epochs=4.0", "--config.eval.every=0"]
        command = [sys.executable, "-m", "leanformer.train", *words, f"--workdir={workdir}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        records = run_files.read_records(Path(workdir), "train")
    waits = [record["data_wait"] for record in records]
    rates = [record["examples_per_s"] for record in records]
    shares = {"quickstart waits for data": statistics.median(waits), "at most": max(waits)}
    return shares | {"examples/s": round(statistics.median(rates))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with pin_to_one_core():
        transforms = measure_transforms()
    for rows in (transforms, [measure_data_wait()]):
        timing.show(rows, as_json=args.json)
        print()


if __name__ == "__main__":
    main()
