"""Speed of the Pathfinder sampler on this machine: `python benchmarks/pathfinder.py [--json]`, in about a minute.

Images per CPU second of one core, for the library's sampler and for the plain sampler that its tests compare it with,
alternating in one process. Also shown are the fraction of candidate pairs that is accepted, the fraction of pixels that
is zero, and the short snakes per image. Last comes the time for the 200,000 images of the published dataset on this
machine's cores, if they are idle and the work is divided evenly.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import timing

from leanformer.data.sequences import pathfinder
from leanformer.data.sequences.pathfinder import dataset


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pathfinder_reference as direct


PLAIN = {6: 40, 9: 30, 14: 12}  # images of the plain sampler per round, by contour length
ROUNDS = 4
PUBLISHED = 200_000


def run_plain(contour: int, rng: np.random.Generator) -> tuple[np.ndarray, int, int, int]:
    """Return images, candidate pairs, accepted pairs and short snakes of the plain sampler."""
    images, _, records = zip(*(direct.sample(contour, rng) for _ in range(PLAIN[contour])), strict=True)
    return np.stack(images), sum(r[2] for r in records), len(images), sum(len(r[1]) for r in records)


def run_fast(contour: int, block: int) -> tuple[np.ndarray, int, int, int]:
    result = pathfinder.sample(contour, 0, block)
    return result.images, result.tried, result.accepted, int((result.distractors.paddle[..., 0] >= 0).sum())


def measure(contour: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    run_fast(contour, ROUNDS)  # warm-up: builds the tables
    seconds, result = {"plain": 0.0, "fast": 0.0}, {"plain": [], "fast": []}
    for block in range(ROUNDS):
        for name, draw in (("plain", lambda: run_plain(contour, rng)), ("fast", lambda b=block: run_fast(contour, b))):
            start = time.process_time()
            result[name].append(draw())
            seconds[name] += time.process_time() - start
    rows, rates = [], {}
    for name, parts in result.items():
        images, tried, accepted, short = zip(*parts, strict=True)
        count = sum(map(len, images))
        rates[name] = count / seconds[name]
        row = {"contour": contour, "sampler": name, "images/s": round(rates[name], 1)}
        row |= {"times": round(rates[name] / rates["plain"]), "accepted": round(sum(accepted) / sum(tried), 4)}
        zero = float(np.mean(np.concatenate(images) == 0))
        rows.append(row | {"zero": round(zero, 3), "short snakes": round(sum(short) / count, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    rows = [row for contour in dataset.CONTOURS for row in measure(contour)]
    timing.show(rows, as_json=f.json)
    cores, rate = os.cpu_count() or 1, rows[-1]["images/s"]
    if not f.json:
        minutes = PUBLISHED / rate / cores / 60
        print(f"{PUBLISHED:,} images at contour {dataset.CONTOURS[-1]}: {minutes:.1f} min on {cores} cores")


if __name__ == "__main__":
    main()
