"""Runs of one shape as one program: their steps over a leading axis of runs, one a seed or a learning rate.

Each has the examples and the draws that it would have alone. A step differs by float32 rounding alone, which training
makes grow as it does any rounding (`benchmarks/rank.py`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from ml_collections import ConfigDict

from leanformer.config.key_docs import flat
from leanformer.errors import ConfigError
from leanformer.tasks import Batch
from leanformer.training.experiment import Experiment
from leanformer.training.state import TrainState


FREE = ("seed", "optim.lr", "optim.warmup_lr", "optim.final_lr")  # keys in which runs of one program may differ


def shape(c: ConfigDict) -> str:
    """The same for the configs that can be trained as one program."""
    return json.dumps({key: value for key, value in flat(c) if key not in FREE}, default=str)


def check(configs: Sequence[ConfigDict]) -> None:
    """Raises ConfigError where configs cannot be trained as one program on one device."""
    first = configs[0]
    for c in configs[1:]:
        differing = {key for (key, a), (_, b) in zip(flat(first), flat(c), strict=True) if a != b} - set(FREE)
        if differing:
            raise ConfigError(f"Runs differ in {min(differing)}: together they can differ in {', '.join(FREE)} alone.")
    reasons = {
        f"eval.patience={first.eval.patience} may end each at another step": first.eval.patience > 0,
        "the mesh has several devices": max(first.mesh.values()) > 1,
    }
    for reason, found in reasons.items():
        if found:
            raise ConfigError(f"Runs cannot be trained together where {reason}. Train them one by one.")


class Together:
    """The program of runs on one device: their steps over a leading axis of runs, as `loop.Program`."""

    def __init__(self, runs: Sequence[Experiment], states: Sequence[TrainState]):
        self._names = runs[0].abstract_batch()
        batches = {name: jax.ShapeDtypeStruct((len(runs), *x.shape), x.dtype) for name, x in self._names.items()}
        self._states = stacked(states)
        self._keys = stacked(run.run_key() for run in runs)
        jitted = jax.jit(make_step(runs), donate_argnums=0)
        self.compiled = jitted.lower(self._states, batches, self._keys).compile()

    def step(self, hosts: Sequence[Mapping[str, np.ndarray]]) -> Sequence[Mapping[str, Any]]:
        self._states, metrics = self.compiled(self._states, batch(hosts, self._names), self._keys)
        return [Own(metrics, run) for run in range(len(self._keys))]

    def state(self, run: int) -> TrainState:
        return of(run, self._states)


class Own(Mapping[str, np.generic]):
    """A run's own of what came out for all of them, which leaves the device, once for all, when it is looked at."""

    def __init__(self, whole: Mapping[str, Array], run: int):
        self._whole, self._run = whole, run

    def __getitem__(self, name: str) -> np.generic:
        return np.asarray(self._whole[name])[self._run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def make_step(
    runs: Sequence[Experiment],
) -> Callable[[TrainState, Batch, Key[Array, "runs"]], tuple[TrainState, dict[str, Array]]]:
    """The training step of all: states, batches, keys and metrics as of one run, with a leading axis of runs."""

    def one(state: TrainState, batch: Batch, key: Any, rate: Any, b1: Any) -> tuple[TrainState, dict[str, Array]]:
        return runs[0].step_of(lambda _: (rate, b1))(state, batch, key)

    def step(states: TrainState, batches: Batch, keys: Any) -> tuple[TrainState, dict[str, Array]]:
        rates, moments = zip(*(run.schedule(states.step[0]) for run in runs), strict=True)
        over = (0, 0, 0, 0, None)
        return jax.vmap(one, in_axes=over)(states, batches, keys, jnp.stack(rates), moments[0])

    return step


def batch(hosts: Sequence[Mapping[str, np.ndarray]], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Of the batches of runs, in host memory, one with a leading axis of them."""
    return {name: np.stack([host[name] for host in hosts]) for name in names}


def of(run: int, trees: Any) -> Any:
    """The tree of one run out of that of all."""
    return jax.tree.map(lambda leaf: leaf[run], trees)


def stacked(trees: Iterable[Any]) -> Any:
    """One tree of many of equal shape, with a leading axis of them."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
