"""Small models one by one and as one program: steps a second, and how far apart they end.

python benchmarks/rank.py [--config=rank_nn_small:rank=8] [--members=8] [--steps=100] [--apart=1000]

The members of a config differ in their seeds. A step includes making its batches. Alone, all members have one program,
which is compiled once; `apart` is how many steps the first member is trained both ways to compare its weights: rounding
differs, and training makes differences grow.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from leanformer import config
from leanformer.runtime.mesh import make_mesh
from leanformer.training import train_setup, vmap


def rate(step: Callable[[int], Any], steps: int) -> float:
    """Steps a second, after three that are not counted."""
    for number in range(3):
        jax.block_until_ready(step(number))
    start = time.perf_counter()
    for number in range(3, 3 + steps):
        found = step(number)
    jax.block_until_ready(found)
    return steps / (time.perf_counter() - start)


class Alone:
    """The step of one run, again and again."""

    def __init__(self, run: train_setup.TrainSetup):
        self.run, self.step = run, jax.jit(run.train_step, donate_argnums=0)
        self.batches = run.train_batches(run.task.open("train"))
        self.begin()

    def begin(self) -> None:
        self.state, self.key = self.run.initial_state(), self.run.run_key()

    def __call__(self, number: int) -> Any:
        self.state, metrics = self.step(self.state, self.run.put(self.batches[number]), self.key)
        return metrics["last_loss"]


class All:
    """The step of many runs as one program."""

    def __init__(self, runs: list[train_setup.TrainSetup]):
        self.runs = runs
        self.step = jax.jit(vmap.make_step(runs), donate_argnums=0)
        self.batches = [run.train_batches(run.task.open("train")) for run in runs]
        self.begin()

    def begin(self) -> None:
        self.state = vmap.stack(run.initial_state() for run in self.runs)
        self.key = vmap.stack(run.run_key() for run in self.runs)

    def __call__(self, number: int) -> Any:
        names = self.runs[0].abstract_batch()
        batch = {name: np.stack([batches[number][name] for batches in self.batches]) for name in names}
        self.state, metrics = self.step(self.state, batch, self.key)
        return metrics["last_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="rank_nn_small:rank=8")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--apart", type=int, default=1000)
    f = parser.parse_args()
    mesh, runs = make_mesh(devices=jax.devices()[:1]), []
    for seed in range(f.members):
        c = config.load(f.config)
        c.seed = seed
        runs.append(train_setup.build(c, examples=None, mesh=mesh))
    alone, everybody = Alone(runs[0]), All(runs)
    one, many = rate(alone, f.steps), len(runs) * rate(everybody, f.steps)
    print(f"{f.config}, {len(runs)} members on one {jax.devices()[0].device_kind}:")
    print(f"{one:.1f} steps/s one by one, {many:.1f} together, {many / one:.2f} times as many")
    for step in (alone, everybody):
        step.begin()
    for number in range(f.apart):
        loss, losses = alone(number), everybody(number)
    other = vmap.index(everybody.state.params, 0)
    differences = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), alone.state.params, other)
    apart = max(jax.tree.leaves(differences))
    print(f"After {f.apart} steps: losses {loss:.6f} and {losses[0]:.6f}, weights at most {apart:.2g} apart")


if __name__ == "__main__":
    main()
