"""A run under way: what it reads, what its folder keeps of it, and what is written of it; `loop` takes its steps."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import data, tasks
from leanformer.runtime import peers
from leanformer.runtime.interrupt import Stopped, StopRequest
from leanformer.tasks import kept, labels
from leanformer.training import experiment, goodput, loggers, optim, report, streams
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.health import Health
from leanformer.training.state import TrainState


class Session:
    """One run: opened, then given its folder (`take`), then begun (`begin`). Until it is begun nothing is recorded.

    Args:
        c: a checked config.
        workdir: the run's folder.
        mesh: where it trains.
        attempts: its ledger, as old as the command.
        name: told with what ends it, where it is one of several.

    Raises:
        ConfigError, DataError: whatever the data, the task or the mesh refuse.
    """

    def __init__(
        self, c: ConfigDict, workdir: Path, mesh: jax.sharding.Mesh, attempts: goodput.Attempts, *, name: str = ""
    ):
        self.config, self.workdir, self.attempts, self.name = c, workdir, attempts, name
        task = tasks.of(c)
        self.source, held_out = tasks.open_data(task, c, labels.read(workdir))
        kept.check(workdir, self.source)
        if not (workdir / "config.json").is_file():
            tasks.check_names(c, self.source)
        self.run = experiment.build(c, examples=data.size(self.source), mesh=mesh, task=task)
        self.eval_step = jax.jit(self.run.eval_step)
        self.probe_step = self.run.probe_step and jax.jit(self.run.probe_step)
        self.probed = streams.probe(self.run, held_out[""]) if self.run.probe_step else None
        self.held_out = {split: data.spread(source, c.eval.examples) for split, source in held_out.items()}
        self.intervals = {"": c.eval.every} | {split: more.every for split, more in c.eval.more.items()}
        self.score = dataclasses.replace(task.score, name=f"{'ema_' if c.optim.ema else ''}{task.score.name}")

    def take(self, stack: contextlib.ExitStack, feed: Callable[[str], None]) -> TrainState:
        """Holds the folder until `stack` ends; the newest state there, or that before step 0."""
        stack.enter_context(report.claim(self.workdir, feed=feed))
        report.tell_changes(self.workdir, self.config)
        labels.tell_old(self.workdir, tasks.names(self.source))
        folder, keep = self.workdir / "checkpoints", self.config.checkpoint.keep
        self.saved = stack.enter_context(Checkpoints(folder, keep, score=self.score))
        state, self.books = self.saved.restore(self.run.like) or (self.run.initial_state(), {})
        self.start = int(state.step)
        for step, value in peers.same(report.read_scores(self.workdir, self.score.name)).items():
            if int(step) <= self.start:
                self.saved.evaluated(int(step), value)
        return state

    def begin(self, stack: contextlib.ExitStack, clock: goodput.Clock) -> None:
        """Opens the records and the batches from the step that `take` found."""
        c, run, self.clock, self.recorded = self.config, self.run, clock, self.start
        logged = loggers.start(c, self.workdir, self.start)
        about = {"start": self.start, "total": run.total, "logger": logged}
        self.record = stack.enter_context(report.Recorder(self.workdir, **about))
        self.corrupt = data.CorruptLog(streams.train_batches(run, self.source), c.data.max_corrupt)
        names = optim.leaf_names(run.like.params)
        self.health = Health(c, run.task.ceiling, names, self.saved, self.record, self.name)
        self.batches = stack.enter_context(contextlib.closing(streams.train(run, self.source, self.start)))

    def last(self, step: int) -> int:
        """The last step of the run as far as `step` can tell: `step` itself if patience has run out there."""
        known = {at: value for at, value in self.saved.scores.items() if at <= step}
        patience = self.config.eval.patience
        if patience and self.score.since_best(known) >= patience:
            return step
        return self.run.total

    def complete(self, step: int) -> bool:
        """Whether so many steps are all that the run was to have."""
        return step >= self.run.total

    def keep_config(self) -> None:
        """Writes what the run is of. Not before it steps: one that trains nothing must leave the config of the one
        that did."""
        report.begin(self.workdir, self.config)
        kept.write(self.workdir, self.source)

    def sent(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes what a step that was sent to the device will say."""
        self.metrics = metrics
        self.health.sent(step, metrics)
        self.saved.poll()
        self.record.advance(step)

    def settle(self, step: int, *, ends: bool) -> None:
        """Waits for all steps so far."""
        self.health.settle(step - self.recorded if ends else None)  # no end without a loss to show

    def look_back(self, step: int, timing: Mapping[str, float]) -> None:
        """Writes the record of the steps since the last one."""
        shown = {name: jax.device_get(self.metrics[name]) for name in ("loss", "lr", "grad_norm", "skipped")}
        self.record.write(
            step, "train", shown | self.run.seen(step) | timing | {"wall_s": round(self.clock.seconds(), 1)}
        )
        self.recorded = step
        self.corrupt.seen |= peers.union("unreadable", self.corrupt.seen)

    def evaluate_due(self, step: int, state: Callable[[], TrainState], last: int, stop: StopRequest) -> bool:
        """Whatever is due and not in the records yet; False where a stop request came between."""
        due = [name for name, every in self.intervals.items() if _due(step, every, last)]
        owed = peers.same([name for name in due if not self.record.has(step, _kind(name))]) if due else []
        return all(self._evaluate(step, state(), name, stop) for name in owed)

    def _evaluate(self, step: int, state: TrainState, name: str, stop: StopRequest) -> bool:
        weights = {"": state.weights} | ({"ema_": state.ema} if self.config.optim.ema else {})
        batches = streams.evaluation(self.run, self.held_out[name])
        self.health.settle()  # the time of steps is theirs
        with self.clock("evaluation"), contextlib.closing(batches):
            try:
                within = stop.during(batches, feed=self.clock.feed)
                values = steps.evaluate(self.eval_step, self.run.task.metrics, weights, within)
            except Stopped:
                return False
        self.record.write(step, _kind(name), values)
        self.health.evaluated(step, values)
        if not name:
            self.saved.evaluated(step, values[self.score.name])
        return True

    def probe_due(self, step: int, last: int) -> bool:
        """Whether the conditioning is to be measured."""
        return self.probe_step is not None and _due(step, self.config.probe.every, last)

    def probe(self, step: int, state: TrainState) -> None:
        """Writes the record of the conditioning."""
        self.health.settle()
        with self.clock("probe"):
            found = peers.fetch(self.probe_step(state.weights, self.probed))
            self.record.write(step, "probe", steps.probe_record(found))

    def save_due(self, step: int, last: int) -> bool:
        """Whether the state is to be kept: by the clock, at the end, or since it is the best so far."""
        best = step in self.saved.scores and self.score.best(self.saved.scores) == step
        return best or _due(step, self.config.checkpoint.every, last)

    def sound(self, step: int) -> bool:
        """Whether the state may stand in the place of one that was saved before."""
        self.health.settle()
        return not self.health.skipped or step in self.saved.scores

    def save(self, step: int, state: TrainState) -> None:
        """Starts to save."""
        with self.clock("checkpoint"):
            self.saved.save(step, state, books=self.clock.books())


def _kind(name: str) -> str:
    """Of the records of an evaluation by its name."""
    return f"eval {name}" if name else "eval"


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
