"""Vectorised training: `jax.vmap` of the training step over runs that differ only in seed and learning rates.

Each run has the same examples and random draws as if it were trained separately. Its steps differ only by float32
rounding, which training amplifies.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from leanformer.config.key_docs import iterate_keys
from leanformer.errors import ConfigError
from leanformer.training.evaluators import Evaluator
from leanformer.training.run import Run
from leanformer.training.state import TrainState
from leanformer.training.train_setup import TrainSetup


VARYING_KEYS = ("seed", "optim.lr", "optim.warmup_lr", "optim.final_lr")  # keys in which the runs may differ


def group_key(c: ConfigDict) -> str:
    """Return a text that is equal for configs that can be trained as one program."""
    return json.dumps({key: value for key, value in iterate_keys(c) if key not in VARYING_KEYS}, default=str)


def check(configs: Sequence[ConfigDict]) -> None:
    """Raise ConfigError if configs cannot be trained as one program on one device."""
    first = configs[0]
    for c in configs[1:]:
        differing = {
            key for (key, a), (_, b) in zip(iterate_keys(first), iterate_keys(c), strict=True) if a != b
        } - set(VARYING_KEYS)
        if differing:
            raise ConfigError(
                f"Runs differ in {min(differing)}. With --vmap they may differ only in {', '.join(VARYING_KEYS)}."
            )
    reasons = {
        f"eval.patience={first.eval.patience} may stop each at another step": first.eval.patience > 0,
        "the mesh has several devices": max(first.mesh.values()) > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"--vmap: the runs cannot be one program, because {reason}. Train them without --vmap.")


class EnsembleRun:
    """Open and restored runs, all at the same step, with the methods of a single `Run` that the training loop calls.

    States, batches and metrics have a leading axis of runs; the values of evaluators are lists.
    """

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        self.setup, self.timer, self.start = runs[0].setup, runs[0].timer, runs[0].start

    def begin(self) -> None:
        for run in self.runs:
            run.begin()

    def corrupt(self, examples: Sequence[Any]) -> None:
        for run, of_run in zip(self.runs, examples, strict=True):
            run.corrupt(of_run)

    def on_step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        for i, run in enumerate(self.runs):
            run.on_step(step, RunMetrics(metrics, i))

    def settle(self, *, ends_at: int | None = None) -> None:
        for run in self.runs:
            run.settle(ends_at=ends_at)

    def log_train(self, step: int, timing: Mapping[str, float]) -> None:
        for run in self.runs:
            run.log_train(step, timing)

    def recorded(self, step: int, kind: str) -> bool:
        return all(run.recorded(step, kind) for run in self.runs)

    def log(self, step: int, kind: str, values: Sequence[dict[str, Any]]) -> None:
        for run, of_run in zip(self.runs, values, strict=True):
            if not run.recorded(step, kind):
                run.log(step, kind, of_run)

    def is_best(self, step: int) -> bool:
        return any(run.is_best(step) for run in self.runs)

    def out_of_patience(self, step: int) -> bool:
        return False  # `check` rejects eval.patience

    def may_save(self, step: int) -> bool:
        """Return whether all states may be saved; all or none are, so that the runs can resume as one program."""
        return all(run.may_save(step) for run in self.runs)

    def save(self, step: int, states: TrainState) -> None:
        for i, run in enumerate(self.runs):
            run.save(step, index_tree(states, i))

    def wait(self) -> None:
        for run in self.runs:
            run.wait()


class RunMetrics(Mapping[str, np.generic]):
    """Metrics of one run, which are fetched from the device when first read, once for all runs."""

    def __init__(self, metrics: Mapping[str, jax.Array], run: int):
        self._metrics, self._run = metrics, run

    def __getitem__(self, name: str) -> np.generic:
        return np.asarray(self._metrics[name])[self._run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


def compile_step(setups: Sequence[TrainSetup], states: TrainState) -> tuple[jax.stages.Compiled, jax.Array]:
    """Return the compiled step (states, batches, keys) -> (states, metrics) of all runs, and their keys."""
    names = setups[0].abstract_batch()
    batches = {name: jax.ShapeDtypeStruct((len(setups), *x.shape), x.dtype) for name, x in names.items()}
    keys = stack_trees([setup.run_key() for setup in setups])
    return jax.jit(make_step(setups), donate_argnums=0).lower(states, batches, keys).compile(), keys


def make_step(setups: Sequence[TrainSetup]) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Return the training step of all runs, with a leading axis of runs for states, batches, keys and metrics."""

    def one(state: TrainState, batch: Any, key: Any, rate: Any, b1: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        return setups[0].make_step(lambda _: (rate, b1))(state, batch, key)

    def step(states: TrainState, batches: Any, keys: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        rates, moments = zip(*(setup.schedule(states.step[0]) for setup in setups), strict=True)
        over = (0, 0, 0, 0, None)
        return jax.vmap(one, in_axes=over)(states, batches, keys, jnp.stack(rates), moments[0])

    return step


def stack_batches(
    streams: Sequence[Iterator[Mapping[str, np.ndarray]]], names: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield the arrays `names` of the batches of all runs with a leading axis of runs, and the list of `corrupt`."""
    names = list(names)
    for hosts in zip(*streams, strict=True):
        yield {name: np.stack([host[name] for host in hosts]) for name in names} | {
            "corrupt": [host["corrupt"] for host in hosts]
        }


def ensemble_evaluators(evaluators: Mapping[str, Evaluator], runs: int) -> dict[str, Evaluator]:
    """Return evaluators of the states of all runs, from those of one run, which must not depend on its seed."""

    def measure(evaluator: Evaluator, states: TrainState) -> list[Any]:
        return [evaluator(index_tree(states, i)) for i in range(runs)]

    return {
        kind: Evaluator(single.every, lambda states, single=single: measure(single, states), single.at_start)
        for kind, single in evaluators.items()
    }


def index_tree(trees: Any, run: int) -> Any:
    """Return the tree of one run from the stacked tree of all runs."""
    return jax.tree.map(lambda leaf: leaf[run], trees)


def stack_trees(trees: Iterable[Any]) -> Any:
    """Return trees of equal shapes stacked to one tree, with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
