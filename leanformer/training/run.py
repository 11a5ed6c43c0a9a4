"""Workdir of a training run: lock, config.json, metrics.jsonl, checkpoints."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from leanformer import data, tasks
from leanformer.errors import WorkdirError
from leanformer.runtime import multihost, phases
from leanformer.runtime.trees import leaf_names
from leanformer.tasks import artifacts
from leanformer.training import loggers, metrics_log, run_files
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.divergence import DivergenceMonitor
from leanformer.training.evaluators import MAIN
from leanformer.training.state import TrainState
from leanformer.training.timer import Timer
from leanformer.training.train_setup import TrainSetup


TRAIN_METRICS = ("loss", "lr", "grad_norm", "skipped")


class Run:
    """Training run and its workdir, which is locked within a `with` block.

    Apart from the lock and the folder of checkpoints, nothing is written before the first record or step.

    The attribute `start` is the step of the checkpoint from which the run resumes, or 0; `restore` sets it. If several
    runs train at once, `name` is a prefix of messages.
    """

    def __init__(self, workdir: Path, setup: TrainSetup, source: data.Source, timer: Timer, *, name: str = ""):
        self.workdir, self.setup, self.source, self.timer, self.name = workdir, setup, source, timer, name
        self.start = 0
        self._stack = contextlib.ExitStack()
        self._logged = 0  # step of the last train record
        self._metrics: Mapping[str, Any] = {}  # metrics of the last step

    def __enter__(self) -> "Run":
        c = self.setup.config
        score = self.setup.task.objective.score
        score = dataclasses.replace(score, name=f"{'ema_' if c.optim.ema else ''}{score.name}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_files.lock_workdir(self.workdir, touch=self.timer.touch))
            run_files.warn_changes(self.workdir, c)
            self.timer.compiled = run_files.compiled_seconds(self.workdir)
            artifacts.warn_missing_classes(self.workdir, tasks.class_names(self.source))
            self.checkpoints = Checkpoints(self.workdir / "checkpoints", c.checkpoint.keep, score=score)
            stack.enter_context(self.checkpoints)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def restore(self) -> TrainState:
        """Return the newest state in the workdir, or the initial state.

        Raises:
            CheckpointError, WeightsError: an error of `Checkpoints.restore` or `ModelSetup.initial_weights`.
        """
        setup = self.setup
        with phases.announce("Reading or initialising the weights"):
            state, seconds = self.checkpoints.restore(setup.state) or (setup.initial_state(), {})
        self.start = self._logged = int(state.step)
        self.timer.resume(seconds)
        scores = multihost.broadcast_from_primary(metrics_log.read_scores(self.workdir, self.checkpoints.score.name))
        for step, value in scores.items():
            if int(step) <= self.start:
                self.checkpoints.report(int(step), value)
        return state

    @property
    def complete(self) -> bool:
        """True if the workdir contains a finished run."""
        ended = self.start >= self.setup.total or self.out_of_patience(self.start)
        return ended and multihost.broadcast_from_primary((self.workdir / "summary.json").is_file())

    @functools.cached_property
    def recorder(self) -> metrics_log.Recorder:
        """Writer of metrics.jsonl, cut to `start`, and of the loggers."""
        c = self.setup.config
        logger = loggers.start(c, self.workdir, self.start)
        recorder = metrics_log.Recorder(self.workdir, start=self.start, total=self.setup.total, logger=logger)
        return self._stack.enter_context(recorder)

    @functools.cached_property
    def divergence(self) -> DivergenceMonitor:
        """Check of every step and evaluation."""
        setup = self.setup
        names = leaf_names(setup.state.params)
        about = setup.config.optim, setup.task.objective.ceiling, names, self.checkpoints, self.recorder.write
        return DivergenceMonitor(*about, self.name)

    @functools.cached_property
    def corrupt(self) -> data.CorruptLog:
        """Log of unreadable training examples, which raises DataError if they exceed `config.data.max_corrupt`."""
        c = self.setup.config
        return data.CorruptLog(self.setup.train_batches(self.source), c.data.max_corrupt)

    def begin(self) -> None:
        """Write config.json, class names and tokenizer.

        Called at the first step, so that a command that trains nothing does not overwrite them.
        """
        run_files.begin(self.workdir, self.setup.config, self.timer.compiled)
        artifacts.save(self.workdir, self.source, self.setup.splits)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step that was dispatched to the device, and check completed steps and the save in the background.

        Raises TrainingError if the run diverged, and CheckpointError if a checkpoint could not be saved.
        """
        self._metrics = metrics
        self.divergence.on_step(step, metrics)
        self.checkpoints.poll()
        self.recorder.advance(step)

    def settle(self, *, ends_at: int | None = None) -> None:
        """Wait for all dispatched steps, and check them. Raises the errors of `on_step`.

        If the last step `ends_at` is reached, a step since the last train record must not have been skipped.
        """
        self.divergence.settle(None if ends_at is None else ends_at - self._logged)

    def log_train(self, step: int, timing: Mapping[str, float]) -> None:
        """Write the record of the steps since the last one."""
        shown = {name: jax.device_get(self._metrics[name]) for name in TRAIN_METRICS}
        wall = {"wall_s": round(self.timer.total(), 1)}
        self.recorder.write(step, "train", shown | self.setup.examples_and_tokens_seen(step) | dict(timing) | wall)
        self._logged = step
        self.corrupt.seen |= multihost.gather_union("unreadable", self.corrupt.seen)

    def recorded(self, step: int, kind: str) -> bool:
        """Return whether there is a record of this kind at this step, with the same result in all processes."""
        return multihost.broadcast_from_primary(self.recorder.has(step, kind))

    def log(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write the record of an evaluator. Raises TrainingError if an evaluation shows divergence."""
        self.recorder.write(step, kind, values)
        if kind.startswith(MAIN):
            self.divergence.on_evaluation(step, values)
        if kind == MAIN:
            self.checkpoints.report(step, values[self.checkpoints.score.name])

    def is_best(self, step: int) -> bool:
        """Return whether the evaluation of `step` is the best so far."""
        scores = self.checkpoints.scores
        return step in scores and self.checkpoints.score.best(scores) == step

    def out_of_patience(self, step: int) -> bool:
        """Return whether the last `eval.patience` evaluations up to `step` were no better than one before them."""
        patience = self.setup.config.eval.patience
        scores = {at: value for at, value in self.checkpoints.scores.items() if at <= step}
        return patience > 0 and self.checkpoints.score.since_best(scores) >= patience

    def may_save(self, step: int) -> bool:
        """Return whether the state is healthy enough to replace older checkpoints.

        It is if its last step was not skipped as non-finite, or if an evaluation has since shown a finite loss.
        """
        self.divergence.settle()
        return not self.divergence.skipped or step in self.checkpoints.scores

    def save(self, step: int, state: TrainState) -> None:
        """Start saving the state in the background.

        Raises:
            CheckpointError: an earlier save failed.
            WorkdirError: the folder of the run has been deleted or moved.
        """
        if multihost.is_primary() and not (self.workdir / "config.json").is_file():
            raise WorkdirError(
                f"{self.workdir}/config.json has disappeared: the folder was deleted or moved during training, so step "
                f"{step} cannot be saved. Pass the folder's present path as --workdir, or start again in a new one."
            )
        self.checkpoints.save(step, state, seconds=self.timer.seconds())

    def wait(self) -> None:
        """Wait for the save in the background. Raises CheckpointError if it failed."""
        self.checkpoints.wait()
