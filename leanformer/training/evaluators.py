"""Evaluators of a run: functions of the training state, called at intervals by the training loop.

A config file adds its own with a function of the trainer, which only `train` calls:

    def make_evaluators(trainer):
        return {"norm": Evaluator(100, lambda state: {"l2": optax.global_norm(state.params)})}

Its values become records of kind "norm".
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import data
from leanformer.costs import devices
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.runtime import multihost
from leanformer.tasks import DataModule
from leanformer.training import step as steps
from leanformer.training.model_setup import ModelSetup
from leanformer.training.step import TrainState
from leanformer.training.trainer import MAIN, Trainer


PROBE = "probe"  # kind of the measurements of conditioning
RESERVED = (MAIN, PROBE, "train", "abort")
MakeEvaluators = Callable[[Trainer], Mapping[str, "Evaluator"]]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Measurement of the training state at intervals, whose values become records."""

    every: int  # steps; 0 to measure only at the end of the run
    measure: Callable[[TrainState], Any]  # returns the values of a record by name
    at_start: bool = False  # measure the state before the first step too
    compile: Callable[[], jax.stages.Compiled] | None = None  # returns its program, compiled once, if it has one

    def due(self, step: int, last: int) -> bool:
        """Return whether to measure at `step`: every `every` steps and at `last`; at step 0 only with `at_start`."""
        return due(step, self.every, last) and (step > 0 or self.at_start)


def due(step: int, every: int, last: int) -> bool:
    """Return whether an action is due at `step`: every `every` steps (0 for never), and always at step `last`."""
    return step == last or (every > 0 and step % every == 0)


def make(
    trainer: Trainer, between: Callable[[Iterable[Any]], Iterator[Any]] = iter, more: MakeEvaluators | None = None
) -> dict[str, Evaluator]:
    """Return the evaluators of a run by the kind of their records: "eval", "eval NAME"s, `more`, the probe.

    `between` wraps the batches of an evaluation, and may raise `stopping.Stopped` between two of them.
    """
    setup, held_out = trainer.setup, trainer.held_out
    config, model, task, every = setup.config, setup.model, setup.task, setup.intervals
    splits = {name: data.take_subset(source, config.eval.examples) for name, source in held_out.items()}

    @functools.cache
    def compile_eval() -> jax.stages.Compiled:
        batch = model.abstract_batch(config.eval.batch_size, task.data.specs(train=False))
        return model.lower(jax.jit(model.eval_step(task.objective)), model.weights, batch).compile()

    def evaluate(source: data.Source, state: TrainState) -> dict[str, Any]:
        weights = {"": state.weights} | ({"ema_": state.ema} if config.optim.ema else {})
        with contextlib.closing(evaluation_batches(config, model, task.data, source)) as batches:
            return steps.evaluate(compile_eval(), task.objective.metrics, weights, between(batches))

    evaluators = {
        f"{MAIN} {name}".strip(): Evaluator(
            every.eval[name], lambda state, split=split: evaluate(split, state), compile=compile_eval
        )
        for name, split in splits.items()
    }
    others = more(trainer) if more else {}
    if clash := [name for name in others if name.partition(" ")[0] in RESERVED]:
        raise ConfigError(f"make_evaluators returns {clash[0]!r}, a kind of record of every run. Choose another name.")
    evaluators |= others
    if every.probe:
        batch = functools.cache(lambda: probe_batch(model, task.data, held_out[""], config.probe.examples))

        @functools.cache
        def compile_probe() -> jax.stages.Compiled:
            inputs = model.abstract_batch(config.probe.examples, task.data.input_specs())
            step = model.probe_step(task.objective, config.probe.measures)
            return model.lower(jax.jit(step), model.weights, inputs).compile()

        def probe(state: TrainState) -> dict[str, Any]:
            return steps.probe_record(multihost.fetch(compile_probe()(state.weights, batch())))

        evaluators[PROBE] = Evaluator(every.probe, probe, at_start=True, compile=compile_probe)
    return evaluators


def peak_memory(state: TrainState, weights: Any, evaluators: Mapping[str, Evaluator]) -> dict[str, int]:
    """Return {evaluator: peak bytes per device} of the compiled programs, including the training state beside them."""
    rest = devices.count_bytes(state) - devices.count_bytes(weights)
    compilers = {name: evaluator.compile for name, evaluator in evaluators.items()}
    return {name: rest + devices.peak_memory(compile()) for name, compile in compilers.items() if compile}


def evaluation_batches(
    config: ConfigDict, model: ModelSetup, module: DataModule, source: data.Source
) -> Generator[dict[str, jax.Array], None, None]:
    """Yield the global batches of an evaluation on the devices, with every example of a split once, in order."""
    names, process = module.specs(train=False), {"process": multihost.index(), "processes": multihost.count()}
    split = module.eval_batches(source, batch_size=config.eval.batch_size, **process)
    corrupt = data.CorruptLog(split, config.data.max_corrupt)
    for host in data.batches(split, workers=config.data.workers, prefetch=config.data.prefetch):
        corrupt(host["corrupt"])
        yield model.put(host, names)


def probe_batch(model: ModelSetup, module: DataModule, source: data.Source, examples: int) -> dict[str, jax.Array]:
    """Return the fixed batch of the probe on the devices: the first examples of a split, as for evaluation."""
    size = data.size(source)
    if size is not None and size < examples:
        raise ConfigError(
            f"probe.examples={examples}: the evaluation split has only {size} examples. Set "
            f"--config.probe.examples={size} or lower."
        )
    meshes.check_batches(model.mesh, {"probe.examples": examples})
    process = {"process": multihost.index(), "processes": multihost.count()}
    return model.put(module.eval_batches(source, batch_size=examples, **process)[0], module.input_specs())
