"""Evaluators of a run: functions of the training state, called at intervals by the training loop.

A config file can add an evaluator to EXTRA, as a function of the run:

    evaluators.EXTRA["norm"] = lambda run: Evaluator(100, lambda state: {"l2": optax.global_norm(state.params)})

Its values become records of kind "norm".
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from leanformer import data
from leanformer.costs import memory
from leanformer.errors import ConfigError
from leanformer.runtime import multihost
from leanformer.training import step as steps
from leanformer.training import streams
from leanformer.training.run import MAIN, Run
from leanformer.training.state import TrainState


PROBE = "probe"  # kind of the measurements of conditioning
RESERVED = (MAIN, PROBE, "train", "abort")
EXTRA: dict[str, Callable[[Run], "Evaluator"]] = {}


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Measurement of the training state at intervals, whose values become records.

    Attributes:
        every: interval in steps; 0 to measure only at the end of the run.
        measure: function from the `TrainState` to the values of a record by name.
        at_start: True to measure the state before the first step too.
        compile: function that returns its compiled program, compiled once; None if it has none.
    """

    every: int
    measure: Callable[[TrainState], Any]
    at_start: bool = False
    compile: Callable[[], jax.stages.Compiled] | None = None

    def due(self, step: int, last: int) -> bool:
        """Return whether to measure at `step`: every `every` steps and at `last`; at step 0 only with `at_start`."""
        return due(step, self.every, last) and (step > 0 or self.at_start)


def due(step: int, every: int, last: int) -> bool:
    """Return whether an action is due at `step`: every `every` steps (0 for never), and always at step `last`."""
    return step == last or (every > 0 and step % every == 0)


def make(run: Run, between: Callable[[Iterable[Any]], Iterator[Any]] = iter) -> dict[str, Evaluator]:
    """Return the evaluators of a run by the kind of their records.

    They are "eval", "eval NAME" for each NAME of `eval.more`, those of EXTRA, and the probe, in this order.

    Args:
        run: open run.
        between: wrapper of the batches of an evaluation, which may raise `stopping.Stopped` between two of them.

    Raises:
        ConfigError: the probe needs more examples than there are, or EXTRA has the kind of another record.
    """
    c, model, task, every = run.config, run.model, run.task, run.intervals
    splits = {name: data.take_subset(source, c.eval.examples) for name, source in run.held_out.items()}

    @functools.cache
    def compile_eval() -> jax.stages.Compiled:
        batch = model.abstract_batch(c.eval.batch_size, task.data.specs(train=False))
        return model.lower(jax.jit(model.eval_step(task.objective)), model.weights, batch).compile()

    def evaluate(source: data.Source, state: TrainState) -> dict[str, Any]:
        weights = {"": state.weights} | ({"ema_": state.ema} if c.optim.ema else {})
        with contextlib.closing(streams.evaluation(c, model, task.data, source)) as batches:
            return steps.evaluate(compile_eval(), task.objective.metrics, weights, between(batches))

    evaluators = {
        f"{MAIN} {name}".strip(): Evaluator(
            every.eval[name], lambda state, split=split: evaluate(split, state), compile=compile_eval
        )
        for name, split in splits.items()
    }
    if clash := [name for name in EXTRA if name.partition(" ")[0] in RESERVED]:
        raise ConfigError(f"evaluators.EXTRA has {clash[0]!r}, a kind of record of every run. Choose another name.")
    evaluators |= {name: make_extra(run) for name, make_extra in EXTRA.items()}
    if every.probe:
        streams.check_probe(run.held_out[""], c.probe.examples)
        batch = functools.cache(lambda: streams.probe(model, task.data, run.held_out[""], c.probe.examples))

        @functools.cache
        def compile_probe() -> jax.stages.Compiled:
            inputs = model.abstract_batch(c.probe.examples, task.data.input_specs())
            step = model.probe_step(task.objective, c.probe.measures)
            return model.lower(jax.jit(step), model.weights, inputs).compile()

        def probe(state: TrainState) -> dict[str, Any]:
            return steps.probe_record(multihost.fetch(compile_probe()(state.weights, batch())))

        evaluators[PROBE] = Evaluator(every.probe, probe, at_start=True, compile=compile_probe)
    return evaluators


def peak_memory(run: Run, evaluators: Mapping[str, Evaluator]) -> dict[str, int]:
    """Compile the programs of evaluators, and return {evaluator name: peak bytes per device}.

    The bytes include the rest of the training state, which stays on the device during an evaluation.

    Args:
        run: run, whose state may be abstract.
        evaluators: evaluators by name; those without a program are left out.
    """
    rest = memory.count_bytes(run.state) - memory.count_bytes(run.model.weights)
    compilers = {name: evaluator.compile for name, evaluator in evaluators.items()}
    return {name: rest + memory.peak_memory(compile()) for name, compile in compilers.items() if compile}
