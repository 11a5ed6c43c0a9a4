"""Trainer: a training run in its workdir, with its data, checkpoints and records. The loop is in `loop.py`."""

import collections
import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from ml_collections import ConfigDict

from leanformer import data, tasks
from leanformer.errors import ConfigError, TrainingError
from leanformer.runtime import multihost
from leanformer.runtime.mesh import leaf_names
from leanformer.runtime.timing import Timer, announce
from leanformer.tasks import Task
from leanformer.training import loggers, run_files
from leanformer.training.checkpoint import Checkpoints, Restored
from leanformer.training.loggers import MakeLoggers
from leanformer.training.run_files import Recorder
from leanformer.training.step import IN_FLIGHT, TrainState
from leanformer.training.train_setup import Setup


MAIN = "eval"  # kind of the evaluation that selects checkpoints
TRAIN_METRICS = ("loss", "lr", "grad_norm", "skipped")


@dataclasses.dataclass(eq=False)
class DivergenceMonitor:
    """Check of every step and evaluation of a run, which raises TrainingError on divergence.

    The step reports that it was skipped (`step.make_train_step`) only when the device has executed it.
    """

    optim: ConfigDict
    divergence_loss: float  # divergence threshold of the loss
    names: Sequence[str]  # of the parameters, in the order of the tree
    checkpoints: Checkpoints
    write_record: Callable[[int, str, dict[str, Any]], None]
    skipped: int = 0  # consecutive skipped steps up to the last checked step
    pending: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)  # (step, metrics)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of a dispatched step, and check the step IN_FLIGHT steps before it, which is executed."""
        self.pending.append((step, metrics))
        while len(self.pending) > IN_FLIGHT:
            self._check_step(*self.pending.popleft(), self.optim.max_skipped)

    def check_pending_steps(self, limit: int | None = None) -> None:
        """Wait for all dispatched steps and check them.

        `limit` is the number of consecutive skipped steps that ends the run, if less than optim.max_skipped: at the end
        of a run its length, so that one whose steps were all skipped has diverged.
        """
        while self.pending:
            self._check_step(*self.pending.popleft(), min(limit or self.optim.max_skipped, self.optim.max_skipped))

    def on_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Check the losses of an evaluation, the values whose names end in "loss", after all dispatched steps."""
        self.check_pending_steps()
        for name, loss in values.items():
            if name.endswith("loss") and not loss <= self.divergence_loss:
                problem = f"The evaluation at step {step} has {name}={loss:.3g}, above the divergence threshold"
                self._end(step, step - self.skipped + 1, f"{problem} {self.divergence_loss:.3g}.", {name: loss})

    def _check_step(self, step: int, metrics: Mapping[str, Any], limit: int) -> None:
        self.skipped = int(metrics["skipped_in_row"])
        if not self.skipped:
            return
        loss, bad = float(metrics["last_loss"]), int(metrics["bad_leaf"])
        leaf = self.names[bad] if bad >= 0 else None
        not_finite = leaf or not math.isfinite(loss)
        threshold = f"above the divergence threshold (loss over {self.divergence_loss:.3g})"
        problem = "not finite" if not_finite else threshold
        where = f"first bad gradient: {leaf}" if leaf else f"loss: {loss:.3g}"
        if self.skipped == 1:
            print(f"WARNING: step {step} is {problem} and was skipped; {where}", file=sys.stderr, flush=True)
        if self.skipped >= limit:
            first = step - self.skipped + 1
            message = f"{self.skipped} consecutive steps were {problem}, from step {first}; {where}."
            self._end(step, first, message, {"leaf": leaf, "skipped_in_row": self.skipped})

    def _end(self, step: int, first: int, message: str, facts: Mapping[str, Any]) -> NoReturn:
        """Raise TrainingError; the weights before step `first` are the earliest that may have diverged."""
        self.checkpoints.wait()
        steps = self.checkpoints.steps
        good, doubtful = [at for at in steps if at < first - 1], [str(at) for at in steps if at >= first - 1]
        self.write_record(step, "abort", {"first_bad_step": first, **facts})
        resume = f"The same command resumes from step {max(steps)}." if steps else "The same command starts again."
        if doubtful:
            before = f"step {max(good)}" if good else "the start"
            resume += f" Its weights may have diverged: delete {', '.join(doubtful)} in {self.checkpoints.folder} to "
            resume += f"resume from {before}."
        raise TrainingError(
            f"{message} {resume} Lower optim.lr (it was {self.optim.lr:g}), set optim.clip_norm, lengthen the warm-up "
            '(optim.warmup_steps), or train with dtype="float32".'
        )


@dataclasses.dataclass(eq=False)
class Trainer:
    """Training run in its locked workdir; `open_trainer` makes it."""

    setup: Setup
    source: data.Source  # training split
    held_out: Mapping[str, Any]  # evaluation splits by name in `eval.more`; "" is `data.eval_split`
    workdir: Path
    timer: Timer
    checkpoints: Checkpoints
    recorder: Recorder
    divergence: DivergenceMonitor
    unreadable: data.CorruptLog
    first_step: int  # step from which the run resumes, or 0
    examples_before: int  # training examples before `first_step`, at any batch size
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the last step, on the device

    @property
    def complete(self) -> bool:
        """True if the restored run is finished and has written its summary.json."""
        finished = self.first_step >= self.setup.intervals.total
        return finished and multihost.broadcast_from_primary((self.workdir / "summary.json").is_file())

    def batches(self) -> Generator[dict[str, Any], None, None]:
        """Yield the host batches of the remaining steps. Their position is counted in examples, not in batches."""
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

        Called at the first step, or at the end of a run that has none left, so that a command for a complete run, or
        one that is stopped before, does not overwrite them.
        """
        sizes = split_sizes(self.setup.config, self.source, self.held_out)
        run_files.begin(self.workdir, self.setup.config, sizes, self.first_step)
        run_files.save_classes_and_tokenizer(self.workdir, self.source)
        self.recorder.begin()

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step that was dispatched to the device, and check completed steps and the save in the background."""
        self.metrics = metrics
        self.divergence.on_step(step, metrics)
        self.checkpoints.poll()
        self.recorder.advance(step)

    def log_train(self, step: int, timing: Mapping[str, float]) -> None:
        """Write a train record with the metrics of the steps since the last multiple of log_every."""
        shown = {name: jax.device_get(self.metrics[name]) for name in TRAIN_METRICS}
        wall = {"wall_s": round(sum(self.timer.seconds().values()), 1)}
        self.recorder.write(step, "train", shown | self.count_seen(step) | dict(timing) | wall)
        self.unreadable.seen |= multihost.gather_union("unreadable", self.unreadable.seen)

    def recorded(self, step: int, kind: str) -> bool:
        """Return whether process 0 has a record of this kind at this step, the same result in all processes."""
        return multihost.broadcast_from_primary(self.recorder.has(step, kind))

    def log(self, step: int, kind: str, values: Any) -> None:
        """Write the record of an evaluator; the score of the main evaluation selects the best checkpoint."""
        self.recorder.write(step, kind, values)
        if kind.partition(" ")[0] == MAIN:
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
        """Start saving the state in the background as the checkpoint of `step`."""
        self.checkpoints.save(step, state, seconds=self.timer.seconds(), examples=self.examples_seen(step))


def split_sizes(config: Any, source: data.Source, held_out: Mapping[str, Any]) -> dict[str, int | None]:
    """Return {name of a split in the data, such as "train": number of its examples}; None for one without end."""
    return {name: data.size(split) for name, split in tasks.by_split(config, source, held_out).items()}


def open_run_data(config: ConfigDict, workdir: Path) -> tuple[Task, data.Source, dict[str, data.Source]]:
    """Return the task, the training split, and the evaluation splits by name, of a new or resumed run in `workdir`."""
    if run_files.exported_weights(workdir) is not None:
        raise ConfigError(
            f"--workdir={workdir} holds exported weights. Choose another folder. To start from these weights, set "
            f"--config.init_from.path={workdir}."
        )
    task = tasks.build_task(config)
    train, held_out = tasks.open_data(task.data, config, run_files.load_classes(workdir))
    run_files.check_tokenizer(workdir, getattr(train, "tokenizer", None))
    if not (workdir / "config.json").is_file():
        tasks.check_names(config, train)
    return task, train, held_out


@contextlib.contextmanager
def open_trainer(
    setup: Setup,
    source: data.Source,
    held_out: Mapping[str, Any],
    workdir: Path,
    timer: Timer,
    make_loggers: MakeLoggers | None = None,
) -> Iterator[tuple[Trainer, TrainState]]:
    """Lock the workdir, and yield the trainer with its newest readable or initial state. Writes nothing yet."""
    config, objective = setup.config, setup.task.objective
    score = objective.score
    score = dataclasses.replace(score, name=f"{'ema_' if config.optim.ema else ''}{score.name}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_files.lock_workdir(workdir))
        run_files.warn_changes(workdir, config, split_sizes(config, source, held_out))
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config.checkpoint.keep, score=score))
        timer.touch("restore")
        with announce("Reading or initialising the weights"):
            restored = checkpoints.restore(setup.state)
            if restored is None:
                setup.model.check_source(getattr(source, "tokenizer", None), tasks.class_names(source))
                restored = Restored(setup.initial_state(), {}, 0)
        first_step = int(restored.state.step)
        if restored.examples % config.batch_size:
            raise ConfigError(
                f"batch_size={config.batch_size}: the run has seen {restored.examples} examples, which is not a whole "
                "number of such batches. Choose a divisor of it, so that no example is repeated or left out."
            )
        by_steps = config.total_steps and not config.data.get("curriculum", {}).get("every")
        if restored.examples != first_step * config.batch_size and not by_steps:
            raise ConfigError(
                f"batch_size={config.batch_size}: after {first_step} steps of other batches, a length in epochs or "
                "tokens, or a curriculum, is wrong. Keep the batch size (accumulate=2 needs less memory), or set "
                "total_steps and no curriculum."
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
            divergence=DivergenceMonitor(config.optim, objective.divergence_loss, names, checkpoints, recorder.write),
            unreadable=data.CorruptLog(setup.train_batches(source), config.data.max_corrupt),
            first_step=first_step,
            examples_before=restored.examples,
        )
        yield trainer, restored.state
