"""Speed of the Pathfinder sampler on this machine: `python benchmarks/pathfinder.py [--json]`, in about a minute.

Images per second of one core's time, of the library's sampler and of the plain one that its tests compare it with, by
turns in one process. Beside them what both are like: the share of candidate pairs that is accepted, of pixels that are
zero, and the short snakes in an image. Then the time for the 200,000 images of the published set on this machine's
cores, if they are free and share the work evenly.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from leanformer.data.sequences import pathfinder
from leanformer.data.sequences.pathfinder import dataset


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pathfinder_direct as direct


PLAIN = {6: 40, 9: 30, 14: 12}  # plain images a round
ROUNDS = 4
PUBLISHED = 200_000


def run_plain(contour: int, rng: np.random.Generator) -> tuple[np.ndarray, int, int, int]:
    """Images, candidate pairs, accepted ones, short snakes."""
    images, _, records = zip(*(direct.sample(contour, rng) for _ in range(PLAIN[contour])), strict=True)
    return np.stack(images), sum(r[2] for r in records), len(images), sum(len(r[1]) for r in records)


def run_fast(contour: int, block: int) -> tuple[np.ndarray, int, int, int]:
    found = pathfinder.sample(contour, 0, block)
    return found.images, found.tried, found.accepted, int((found.distractors.paddle[..., 0] >= 0).sum())


def measure(contour: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    run_fast(contour, ROUNDS)  # makes the tables
    seconds, found = {"plain": 0.0, "fast": 0.0}, {"plain": [], "fast": []}
    for block in range(ROUNDS):
        for name, draw in (("plain", lambda: run_plain(contour, rng)), ("fast", lambda b=block: run_fast(contour, b))):
            start = time.process_time()
            found[name].append(draw())
            seconds[name] += time.process_time() - start
    rows = {}
    for name, parts in found.items():
        images, tried, accepted, short = zip(*parts, strict=True)
        count = sum(map(len, images))
        rows[name] = {
            "images_per_second": count / seconds[name],
            "accepted": sum(accepted) / sum(tried),
            "zero": float(np.mean(np.concatenate(images) == 0)),
            "short_snakes": sum(short) / count,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    found = {contour: measure(contour) for contour in dataset.CONTOURS}
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{'contour':>7}{'sampler':>9}{'images/s':>10}{'times':>7}{'accepted':>10}{'zero':>8}{'short snakes':>14}")
    for contour, rows in found.items():
        for name, row in rows.items():
            times = row["images_per_second"] / rows["plain"]["images_per_second"]
            print(
                f"{contour:>7}{name:>9}{row['images_per_second']:>10.1f}{times:>7.0f}{100 * row['accepted']:>9.2f}%"
                f"{100 * row['zero']:>7.1f}%{row['short_snakes']:>14.2f}"
            )
    cores = os.cpu_count() or 1
    for name, row in found[14].items():
        hours = PUBLISHED / row["images_per_second"] / cores / 3600
        print(f"{PUBLISHED:,} images at contour 14, {name}: {hours:.2f} hours ({60 * hours:.1f} min) on {cores} cores")


if __name__ == "__main__":
    main()
