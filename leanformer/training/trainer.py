"""Trainer: a training run in its workdir, with its data, checkpoints and records. The loop is in `loop.py`."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from leanformer import config as configs
from leanformer import data, tasks
from leanformer.errors import CheckpointError, ConfigError, WorkdirError
from leanformer.runtime import multihost, timing
from leanformer.runtime.mesh import leaf_names
from leanformer.runtime.timing import Timer
from leanformer.tasks import artifacts
from leanformer.training import loggers, run_files, schedules
from leanformer.training.checkpoint import Checkpoints, OtherState, Restored
from leanformer.training.divergence import DivergenceMonitor
from leanformer.training.loggers import MakeLoggers
from leanformer.training.metrics_log import Recorder
from leanformer.training.state import TrainState
from leanformer.training.train_setup import Setup


MAIN = "eval"  # kind of the evaluation that selects checkpoints
TRAIN_METRICS = ("loss", "lr", "grad_norm", "skipped")
STATE_KEYS = ("optim.ema", "optim.name", "optim.freeze")  # keys beside `model` that decide which arrays a state has


@dataclasses.dataclass(eq=False)
class Trainer:
    """Training run in its locked workdir; `open_trainer` makes it.

    Attributes:
        setup: set-up of the run.
        source: training split.
        held_out: evaluation splits by name in `eval.more`; "" is `data.eval_split`.
        workdir: folder of the run.
        timer: wall-clock time by phase.
        checkpoints: checkpoints of the run, and the scores that select the best one.
        recorder: writer of metrics.jsonl, the loggers and the progress output.
        divergence: monitor of steps and evaluations, which ends a run that diverged.
        corrupt: log of unreadable training examples.
        first_step: step from which the run resumes, or 0.
        examples_before: number of training examples before `first_step`, at any batch size.
        metrics: metrics of the last step, on the device.
    """

    setup: Setup
    source: data.Source
    held_out: Mapping[str, Any]
    workdir: Path
    timer: Timer
    checkpoints: Checkpoints
    recorder: Recorder
    divergence: DivergenceMonitor
    corrupt: data.CorruptLog
    first_step: int
    examples_before: int
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if the restored run is finished and has written its summary.json."""
        finished = self.first_step >= self.setup.intervals.total
        return finished and multihost.broadcast_from_primary((self.workdir / "summary.json").is_file())

    def batches(self) -> Generator[dict[str, Any], None, None]:
        """Yield the host batches (arrays by name) of the steps that are left.

        The position in the data is counted in examples, so that it survives another batch size. Then the batches so far
        must be a whole number of the new ones (`open_trainer` checks it).
        """
        start = self.examples_before // self.setup.config.batch_size
        return self.setup.batches(self.source, start, start + self.setup.intervals.total - self.first_step)

    def examples_seen(self, step: int) -> int:
        """Return the number of training examples after `step` steps."""
        return self.examples_before + (step - self.first_step) * self.setup.config.batch_size

    def count_seen(self, step: int) -> dict[str, int]:
        """Return {"examples_seen": number} after `step` steps, with "tokens_seen" if the config has `total_tokens`."""
        examples, config = self.examples_seen(step), self.setup.config
        tokens = {"tokens_seen": examples * config.model.max_length} if "total_tokens" in config else {}
        return {"examples_seen": examples, **tokens}

    def begin(self) -> None:
        """Write config.json, class names and tokenizer, and delete summary.json and records of later steps.

        Only process 0 does so.

        Called at the first step, or at the end of a run that has none left, so that a command for a complete run, or
        one that is stopped before, does not overwrite them.
        """
        run_files.begin(self.workdir, self.setup.config, self.split_sizes)
        artifacts.save(self.workdir, self.source)
        self.recorder.begin()

    @functools.cached_property
    def split_sizes(self) -> dict[str, int | None]:
        """Number of examples by split of the data; None for one without end."""
        return split_sizes(self.setup.config, self.source, self.held_out)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step that was dispatched to the device, and check completed steps and the save in the background.

        Raises:
            TrainingError: the run diverged.
            CheckpointError: a checkpoint could not be saved.
        """
        self.metrics = metrics
        self.divergence.on_step(step, metrics)
        self.checkpoints.poll()
        self.recorder.advance(step)

    def log_train(self, step: int, timing: Mapping[str, float]) -> None:
        """Write a train record with the metrics of the steps since the last multiple of log_every."""
        shown = {name: jax.device_get(self.metrics[name]) for name in TRAIN_METRICS}
        wall = {"wall_s": round(sum(self.timer.seconds().values()), 1)}
        self.recorder.write(step, "train", shown | self.count_seen(step) | dict(timing) | wall)
        self.corrupt.seen |= multihost.gather_union("unreadable", self.corrupt.seen)

    def recorded(self, step: int, kind: str) -> bool:
        """Return whether process 0 has a record of this kind at this step, the same result in all processes."""
        return multihost.broadcast_from_primary(self.recorder.has(step, kind))

    def log(self, step: int, kind: str, values: Any) -> None:
        """Write the record of an evaluator; the score of the main evaluation selects the best checkpoint.

        Raises TrainingError if an evaluation shows divergence.
        """
        self.recorder.write(step, kind, values)
        if kind.startswith(MAIN):
            self.divergence.on_evaluation(step, values)
        if kind == MAIN:
            self.checkpoints.scores[step] = values[self.checkpoints.score.name]

    def is_best(self, step: int) -> bool:
        """Return whether `step` was evaluated and has the best validation score of the run so far."""
        scores = self.checkpoints.scores
        return step in scores and self.checkpoints.score.best(scores) == step

    def wait_and_check_healthy(self, step: int) -> bool:
        """Wait for all dispatched steps, and return whether the state is healthy enough to replace older checkpoints.

        It is if its last step was not skipped, or if an evaluation has since shown a finite loss.
        """
        self.divergence.check_pending_steps()
        return not self.divergence.skipped or step in self.checkpoints.scores

    def save(self, step: int, state: TrainState) -> None:
        """Start saving the state in the background as the checkpoint of `step`.

        Raises:
            CheckpointError: an earlier save failed.
            WorkdirError: the folder of the run has been deleted or moved.
        """
        if multihost.is_primary() and not (self.workdir / "config.json").is_file():
            raise WorkdirError(
                f"{self.workdir}/config.json has disappeared: the folder was deleted or moved during training, so step "
                f"{step} cannot be saved. Pass the folder's present path as --workdir, or start again in a new one."
            )
        self.checkpoints.save(step, state, seconds=self.timer.seconds(), examples=self.examples_seen(step))


def split_sizes(config: Any, source: data.Source, held_out: Mapping[str, Any]) -> dict[str, int | None]:
    """Return {name of a split in the data, such as "train": number of its examples}; None for one without end."""
    return {name: data.size(split) for name, split in tasks.by_split(config, source, held_out).items()}


@contextlib.contextmanager
def open_trainer(
    setup: Setup,
    source: data.Source,
    held_out: Mapping[str, Any],
    workdir: Path,
    timer: Timer,
    make_loggers: MakeLoggers | None = None,
) -> Iterator[tuple[Trainer, TrainState]]:
    """Context manager that locks the workdir, and yields the trainer with the newest readable or the initial state.

    Apart from the lock nothing is written before the first record or step.

    Args:
        setup: set-up of the run.
        source: training split.
        held_out: evaluation splits by name in `eval.more`; "" is `data.eval_split`.
        workdir: folder of the run.
        timer: timer of the run, which continues from the seconds of the checkpoint.
        make_loggers: function (workdir, first step, config) that returns further loggers.

    Raises:
        ConfigError: another run uses the folder, or it holds a run of another task or architecture.
        CheckpointError, WeightsError: no checkpoint, or none of the initial weights, can be used.
    """
    config, objective = setup.config, setup.task.objective
    score = objective.score
    score = dataclasses.replace(score, name=f"{'ema_' if config.optim.ema else ''}{score.name}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_files.lock_workdir(workdir))
        run_files.warn_changes(workdir, config, split_sizes(config, source, held_out))
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config.checkpoint.keep, score=score))
        timer.touch("restore")
        with timing.announce("Reading or initialising the weights"):
            restored = _restore(setup, checkpoints, workdir, source)
        first_step = int(restored.state.step)
        if restored.examples % config.batch_size:
            raise ConfigError(
                f"batch_size={config.batch_size}: the run has seen {restored.examples} examples, which is not a whole "
                "number of such batches. Choose a divisor of it, so that no example is repeated or left out."
            )
        timer.resume(restored.seconds)
        checkpoints.scores = {step: value for step, value in checkpoints.scores.items() if step <= first_step}
        start = functools.partial(loggers.start, config, workdir, first_step, make_loggers)
        recorder = Recorder(workdir, start=first_step, total=setup.intervals.total, make_logger=start)
        stack.enter_context(recorder)
        names = leaf_names(setup.state.params)
        trainer = Trainer(
            setup=setup,
            source=source,
            held_out=held_out,
            workdir=workdir,
            timer=timer,
            checkpoints=checkpoints,
            recorder=recorder,
            divergence=DivergenceMonitor(config.optim, objective.ceiling, names, checkpoints, recorder.write),
            corrupt=data.CorruptLog(setup.train_batches(source), config.data.max_corrupt),
            first_step=first_step,
            examples_before=restored.examples,
        )
        yield trainer, restored.state


def _restore(setup: Setup, checkpoints: Checkpoints, workdir: Path, source: data.Source) -> Restored:
    """Return the newest readable state in the workdir, or the initial state."""
    try:
        restored = checkpoints.restore(setup.state)
    except OtherState as error:
        changes = run_files.config_changes(workdir, setup.config) if (workdir / "config.json").is_file() else {}
        keys = [key for key in changes if key.startswith("model.") or key in STATE_KEYS]
        shown = "; ".join(f"{key}: {changes[key][0]} -> {changes[key][1]} changes the saved state" for key in keys)
        remedy = "Use the config of this run (config.json in its folder), or choose another --workdir."
        raise CheckpointError(f"{shown or error}. {remedy}") from error
    if restored is None:
        setup.model.check_other_tokenizer(getattr(source, "tokenizer", None))
        restored = Restored(setup.initial_state(), {}, 0)
    return restored


def describe_schedule_change(trainer: Trainer) -> str | None:
    """Return a line with the rates before and after a resume that changes the schedule or the epoch; else None."""
    config, step, path = trainer.setup.config, trainer.first_step, trainer.workdir / "config.json"
    if not step or not path.is_file():
        return None
    before = artifacts.load_config(trainer.workdir)
    examples = artifacts.count_examples(trainer.workdir, before.data.train_split) or trainer.setup.examples
    total = configs.intervals(before, examples).total
    old = schedules.make(before.optim, batch_size=before.batch_size, examples=examples, total=total)
    rates = [float(schedule(step)[0]) for schedule in (old, trainer.setup.schedule)]
    if rates[0] == rates[1] and (before.batch_size, total) == (config.batch_size, trainer.setup.intervals.total):
        return None
    seen = [trainer.examples_seen(at) for at in (step, trainer.setup.intervals.total)]
    size = trainer.setup.examples
    epochs = f" The run is in epoch {seen[0] / size:.2f} and ends at epoch {seen[1] / size:.2f}." if size else ""
    return (
        f"The schedule has changed: learning rate {rates[0]:.3g} -> {rates[1]:.3g} at step {step}, batch size "
        f"{before.batch_size} -> {config.batch_size}, length {total} -> {trainer.setup.intervals.total} steps.{epochs}"
    )
