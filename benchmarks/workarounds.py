"""What each piece of tuning for CPUs earns: seconds of a training step with it and without it.

    python benchmarks/workarounds.py [--config=vit_b_7x16] [--batch=8] [--rounds=9] [--json]

Steps of the same config and weights alternate, in one process; malloc's settings hold for a process and are compared
between two. "gain" is that of the fastest steps, seconds without / seconds with, minus 1: other programs slow steps
down, and never speed them up. "median" is that of the rounds.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import timing
from timing import TimedStep, Worker, compare_workers

from leanformer.layers import attention, norms
from leanformer.runtime import malloc


PLAIN: dict[str, tuple[Any, str, Any]] = {  # module, attribute, and what stands there without the tuning
    "weight gradient without a transpose": (attention, "_product", jnp.matmul),
    "gradient of attention": (attention, "_attend", attention._attend_plainly),
    "factors of that gradient transposed in memory": (attention, "_turned", lambda x: x.swapaxes(2, 3)),
    "gradient of LayerNorm": (norms, "_standardise", norms._standardise_plainly),
}


@contextlib.contextmanager
def without(name: str | None) -> Iterator[None]:
    """Replace one piece of tuning by what JAX does by itself; None replaces nothing."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            module, attribute, plain = PLAIN[name]
            stack.enter_context(mock.patch.object(module, attribute, plain))
        yield


def compare_layers(config: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each piece of `PLAIN`."""
    steps = {}
    for name in (None, *PLAIN):
        jax.clear_caches()  # they do not know what was replaced
        with without(name):
            steps[name] = TimedStep(config, batch)
            steps[name].train()
    seconds: dict[str | None, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            steps[name].train()
            seconds[name].append(time.perf_counter() - start)
    return [_row(name, seconds[None], seconds[name]) for name in PLAIN]


def compare_malloc(config: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return the row of malloc's settings."""
    words = [sys.executable, __file__, f"--config={config}", f"--batch={batch}", "--worker"]
    workers = [Worker(*words, f"malloc={tuned}") for tuned in (1, 0)]
    for worker in workers:
        worker.step()
    found = compare_workers(*workers, rounds)
    for worker in workers:
        worker.close()
    gains = {name: round(100 * (found[key] - 1), 1) for name, key in (("gain %", "at best"), ("median %", "faster"))}
    return {"tuning": "settings of malloc", "seconds with": found["ours s"], "without": found["peer s"], **gains}


def _row(name: str, tuned: list[float], plain: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(tuned, plain, strict=True)]
    return {
        "tuning": name,
        "seconds with": round(min(tuned), 3),
        "without": round(min(plain), 3),
        "gain %": round(100 * (min(plain) / min(tuned) - 1), 1),
        "median %": round(100 * (statistics.median(ratios) - 1), 1),
    }


def work(config: str, batch: int, tuned: bool) -> None:
    """Be one process of `compare_malloc`: print the seconds of a step for each input line."""
    if tuned:
        malloc.keep_freed()
    step = TimedStep(config, batch)
    print(f'"malloc {tuned}"', flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step.train()
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="vit_b_7x16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    f = parser.parse_args()
    if f.worker:
        work(f.config, f.batch, f.worker.endswith("1"))
        return
    malloc.keep_freed()  # as every command does
    rows = [*compare_layers(f.config, f.batch, f.rounds), compare_malloc(f.config, f.batch, f.rounds)]
    timing.show(rows, as_json=f.json)


if __name__ == "__main__":
    main()
