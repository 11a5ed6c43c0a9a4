"""Vectorised training: `jax.vmap` of the training step over runs that differ only in seed and learning rates.

Each run has the same examples and random draws as if it were trained separately. Its steps differ only by float32
rounding, which training amplifies.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from leanformer.config.key_docs import iterate_keys
from leanformer.errors import ConfigError
from leanformer.training.run import Run
from leanformer.training.state import TrainState


MISSING = object()  # equal to no value of a key
VARYING_KEYS = ("seed", "optim.lr", "optim.warmup_lr", "optim.final_lr")  # keys in which the runs may differ


def group_key(c: ConfigDict) -> str:
    """Return a text that is equal for configs that one program can train, which differ only in `varying_keys`."""
    varying = varying_keys(c)
    return json.dumps({key: value for key, value in iterate_keys(c) if key not in varying}, default=str)


def varying_keys(c: ConfigDict) -> tuple[str, ...]:
    """Return the keys in which runs may differ from a config. With a learning rate of the head, whose ratio to optim.lr
    is a constant of the program, that is not optim.lr."""
    return VARYING_KEYS if c.optim.head_lr is None else tuple(key for key in VARYING_KEYS if key != "optim.lr")


def check(configs: Sequence[ConfigDict]) -> None:
    """Raise ConfigError if the runs of these configs cannot be trained as one program on one device.

    The configs may differ only in `varying_keys`, and none may have an `obstacle`.
    """
    first = configs[0]
    varying = varying_keys(first)
    for c in configs[1:]:
        ours, theirs = dict(iterate_keys(first)), dict(iterate_keys(c))
        keys = ours.keys() | theirs.keys()
        differing = {key for key in keys if ours.get(key, MISSING) != theirs.get(key, MISSING)} - set(varying)
        if differing:
            raise ConfigError(
                f"Runs differ in {min(differing)}. With --vmap they may differ only in {', '.join(varying)}"
                f"{'' if varying == VARYING_KEYS else ', since optim.head_lr is set'}."
            )
    if reason := obstacle(first):
        raise ConfigError(f"--vmap: the runs cannot be one program, because {reason}. Train them without --vmap.")


def obstacle(c: ConfigDict) -> str:
    """Return why runs of a config cannot be one program on one device, such as early stopping; "" if they can."""
    if c.eval.patience > 0:
        return f"eval.patience={c.eval.patience} may stop each at another step"
    return "the mesh has several devices" if max(c.mesh.values()) > 1 else ""


def _call_all(name: str) -> Callable[..., list[None]]:
    """Return the method of an ensemble that calls the method `name` of all runs."""
    return lambda self, *args, **kwargs: [getattr(run, name)(*args, **kwargs) for run in self.runs]


class EnsembleRun(Run):
    """Several runs as one, which opens and closes them; settings that do not differ are those of the first.

    States, batches and metrics have a leading axis of runs; the values of evaluators are lists. There is no early
    stopping, since `check` rejects eval.patience.

    Args:
        runs: runs that passed `check`.
    """

    peak_examples = None
    begin, settle, log_train, wait = map(_call_all, ("begin", "settle", "log_train", "wait"))

    def __init__(self, runs: Sequence[Run]):
        super().__init__(**{x.name: getattr(runs[0], x.name) for x in dataclasses.fields(Run)})
        self.runs, self.vmapped = runs, len(runs)

    def __enter__(self) -> "EnsembleRun":
        with contextlib.ExitStack() as stack:
            for run in self.runs:
                stack.enter_context(run)
            self._stack = stack.pop_all()
        return self

    def restore(self) -> TrainState:
        """Return the states of all runs, stacked, and set `start` to their step.

        Raises:
            ConfigError: the steps of the runs differ.
            CheckpointError, WeightsError: an error of `Run.restore`.
        """
        states = stack_trees([run.restore() for run in self.runs])
        starts = {run.workdir.name: run.start for run in self.runs}
        self.start, self._seen = self.runs[0].start, self.runs[0]._seen
        if len(set(starts.values())) > 1:
            shown = ", ".join(f"{name} {step}" for name, step in starts.items())
            raise ConfigError(
                f"--vmap: the runs must resume from the same step. Found: {shown}. Run the sweep again, which trains "
                "them separately, or leave out --vmap."
            )
        return states

    @property
    def complete(self) -> bool:
        """True if all runs are finished and have written their summary.json."""
        return all(run.complete for run in self.runs)

    def members(self, state: TrainState) -> list[tuple[Run, TrainState]]:
        """Return each run with its state, from the stacked states."""
        return [(run, index_tree(state, i)) for i, run in enumerate(self.runs)]

    def compile_train_step(self) -> jax.stages.Compiled:
        """Return the compiled training step of all runs, (states, batches, keys) -> (states, metrics)."""
        states = jax.eval_shape(stack_trees, [run.state for run in self.runs])
        batches = {name: jax.ShapeDtypeStruct((self.vmapped, *x.shape), x.dtype) for name, x in self.batch.items()}
        return jax.jit(make_step(self.runs), donate_argnums=0).lower(states, batches, self.run_key()).compile()

    def make_step_fn(self, compiled: jax.stages.Compiled) -> Callable[[TrainState, Any], Any]:
        """Return the function (states, host batches) -> (states, metrics) that runs a compiled training step."""
        names, keys = self.batch, self.run_key()
        return lambda states, hosts: compiled(states, {name: hosts[name] for name in names}, keys)

    def run_key(self) -> jax.Array:
        """Return the stacked random keys of the runs."""
        return stack_trees([run.run_key() for run in self.runs])

    def batches(self) -> Generator[dict[str, Any], None, None]:
        """Yield the host batches that are left: arrays with a leading axis of runs, and "corrupt" as a list by run."""
        names = list(self.batch)
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(contextlib.closing(run.batches())) for run in self.runs]
            for hosts in zip(*streams, strict=True):
                arrays = {name: np.stack([host[name] for host in hosts]) for name in names}
                yield arrays | {"corrupt": [host["corrupt"] for host in hosts]}

    @functools.cached_property
    def corrupt(self) -> Any:
        """Function that logs unreadable training examples: call it with the list `corrupt` of a batch from `batches`.

        The list has one array (B) per run. As with `Run.corrupt`, the call raises DataError if too many examples of a
        run are unreadable.
        """

        def log(examples: Sequence[Any]) -> None:
            for run, of_run in zip(self.runs, examples, strict=True):
                run.corrupt(of_run)

        return log

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a dispatched step in every run, as `Run.on_step`; metrics have a leading axis of runs."""
        for i, run in enumerate(self.runs):
            run.on_step(step, RunMetrics(metrics, i))

    def measure(self, evaluator: Any, state: TrainState) -> list[Any]:
        """Return a list with the values of an evaluator for each run; the evaluator must not depend on the seed.

        Args:
            evaluator: an `Evaluator` of the first run.
            state: states of all runs, stacked.
        """
        return [evaluator.measure(index_tree(state, i)) for i in range(self.vmapped)]

    def recorded(self, step: int, kind: str) -> bool:
        """Return whether every run has a record of this kind at this step."""
        return all(run.recorded(step, kind) for run in self.runs)

    def log(self, step: int, kind: str, values: Any) -> None:
        """Write the record of an evaluator in every run that does not have it; `values` are a list by run."""
        for run, of_run in zip(self.runs, values, strict=True):
            if not run.recorded(step, kind):
                run.log(step, kind, of_run)

    def is_best(self, step: int) -> bool:
        """Return whether `step` has the best validation score so far of at least one run."""
        return any(run.is_best(step) for run in self.runs)

    def out_of_patience(self, step: int) -> bool:
        """Return False: runs in one program have no early stopping."""
        return False

    def may_save(self, step: int) -> bool:
        """Return whether the states of all runs may be saved; all or none are, so that they resume as one program."""
        return all(run.may_save(step) for run in self.runs)

    def save(self, step: int, state: TrainState) -> None:
        """Start saving the state of every run in the background, as `Run.save`."""
        for i, run in enumerate(self.runs):
            run.save(step, index_tree(state, i))


class RunMetrics(Mapping[str, np.generic]):
    """Metrics of one run by name, fetched from the device when they are read, once for all runs.

    Args:
        metrics: metrics with a leading axis of runs, on the device.
        run: index of the run.
    """

    def __init__(self, metrics: Mapping[str, jax.Array], run: int):
        self._metrics, self._run = metrics, run

    def __getitem__(self, name: str) -> np.generic:
        return np.asarray(self._metrics[name])[self._run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


def make_step(runs: Sequence[Run]) -> Callable[..., tuple[TrainState, Mapping[str, Any]]]:
    """Return the training step (states, batches, keys) -> (states, metrics) of all runs, to be jitted.

    All four have a leading axis of runs. The runs have one model and optimizer, and may differ in learning rates.
    """

    def one(state: TrainState, batch: Any, key: Any, rate: Any, b1: Any) -> tuple[TrainState, Mapping[str, Any]]:
        return runs[0].make_step(lambda _: (rate, b1))(state, batch, key)

    def step(states: TrainState, batches: Any, keys: Any) -> tuple[TrainState, Mapping[str, Any]]:
        rates, moments = zip(*(run.schedule(states.step[0]) for run in runs), strict=True)
        over = (0, 0, 0, 0, None)
        return jax.vmap(one, in_axes=over)(states, batches, keys, jnp.stack(rates), moments[0])

    return step


def index_tree(trees: Any, run: int) -> Any:
    """Return the tree of run number `run` from a tree with a leading axis of runs."""
    return jax.tree.map(lambda leaf: leaf[run], trees)


def stack_trees(trees: Iterable[Any]) -> Any:
    """Return trees of equal structure and shapes as one tree, whose leaves have a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
