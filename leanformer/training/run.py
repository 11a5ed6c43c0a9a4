"""Training run: what its config decides, its data, and its workdir."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from leanformer import data
from leanformer.config import Intervals
from leanformer.costs import hardware
from leanformer.errors import WorkdirError
from leanformer.runtime import multihost, phases
from leanformer.runtime.trees import leaf_names
from leanformer.tasks import Task, artifacts
from leanformer.training import loggers, metrics_log, run_files, streams
from leanformer.training import state as states
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.divergence import DivergenceMonitor
from leanformer.training.freezing import Freezing
from leanformer.training.model_setup import ModelSetup
from leanformer.training.schedules import Schedule
from leanformer.training.state import TrainState
from leanformer.training.timer import Timer


MAIN = "eval"  # kind of the evaluation that selects checkpoints
TRAIN_METRICS = ("loss", "lr", "grad_norm", "skipped")

Step = Callable[..., tuple[TrainState, Mapping[str, Any]]]  # training step (state, batch, key) -> (state, metrics)


@dataclasses.dataclass(eq=False)
class Run:
    """Training run, which owns what its config decides and, within a `with` block, its locked workdir.

    Nothing is allocated before `restore`, and apart from the lock and the folder of checkpoints nothing is written
    before the first record or step. A run without data and workdir can only be lowered, compiled and counted.

    Attributes:
        config: config of the run.
        model: setup of the model on the mesh.
        task: data and objective.
        examples: number of training examples per epoch; None if the data are unlimited.
        intervals: length of the run and intervals of its events, in steps.
        schedule: learning rate and beta1 by step.
        optimizer: optimizer without learning rate.
        freezing: which parameters are trained.
        state: shapes, dtypes and shardings of the training state.
        batch: shapes, dtypes and shardings of a global training batch, by name.
        make_state: function from weights to the initial state, for `jit`.
        make_step: function from a schedule to the training step (state, batch, key) -> (state, metrics).
        train_step: training step with `schedule`.
        source: training split, a `data.Source`; None for a run without data.
        held_out: evaluation splits by name in `eval.more`; "" is `data.eval_split`.
        split_sizes: number of examples by name of the split; None if endless.
        workdir: folder of the run.
        timer: wall-clock time by phase.
        name: prefix of messages, if several runs train at once; "" for none.
        start: step of the checkpoint from which the run resumes, or 0; set by `restore`.
        make_loggers: function that makes further loggers.
    """

    config: ConfigDict
    model: ModelSetup
    task: Task
    examples: int | None
    intervals: Intervals
    schedule: Schedule
    optimizer: optax.GradientTransformationExtraArgs
    freezing: Freezing
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    make_state: Callable[[Any], TrainState]
    make_step: Callable[[Callable[..., tuple[Any, Any]]], Step]
    train_step: Step
    source: Any = None
    held_out: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    split_sizes: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    workdir: Path = Path()
    timer: Timer = dataclasses.field(default_factory=Timer)
    name: str = ""
    start: int = 0
    make_loggers: loggers.MakeLoggers | None = None

    _seen = 0  # training examples until step `start`, of which some may have had another batch size
    _metrics: Any = None  # metrics of the last step

    def __enter__(self) -> "Run":
        c, score = self.config, self.task.objective.score
        score = dataclasses.replace(score, name=f"{'ema_' if c.optim.ema else ''}{score.name}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_files.lock_workdir(self.workdir, touch=self.timer.touch))
            run_files.warn_changes(self.workdir, c, self.split_sizes)
            self.timer.compiled = run_files.compiled_seconds(self.workdir)
            self.checkpoints = Checkpoints(self.workdir / "checkpoints", c.checkpoint.keep, score=score)
            stack.enter_context(self.checkpoints)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def lower_train_step(self) -> jax.stages.Lowered:
        """Return the training step (state, batch, key) lowered for the device, with the state donated."""
        place = self.model.placement
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, self.state), place.replicated)
        options: dict[str, Any] = {"out_shardings": outputs, "compiler_options": place.compiler_options}
        key = jax.eval_shape(jax.random.key, 0)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=place.replicated)
        jitted = jax.jit(self.train_step, donate_argnums=0, **options)
        return self.model.lower(jitted, self.state, self.batch, key)

    def compile_train_step(self) -> jax.stages.Compiled:
        """Return the compiled training step (state, batch, key) -> (state, metrics). No array is allocated."""
        return self.lower_train_step().compile()

    def make_step_fn(self, compiled: jax.stages.Compiled) -> Callable[[TrainState, Any], Any]:
        """Return the function (state, host batch) -> (state, metrics) that runs a compiled training step.

        A host batch is this process's part of a training batch, which is sent to the devices.

        Args:
            compiled: result of `compile_train_step`.
        """
        key = self.run_key()
        return lambda state, host: compiled(state, self.put(host), key)

    def run_key(self) -> jax.Array:
        """Return the random key of the run, into which every step folds its number."""
        replicated = self.model.placement.replicated
        return jax.jit(lambda key: jax.random.split(key)[1], out_shardings=replicated)(jax.random.key(self.config.seed))

    @functools.cached_property
    def flops_per_example(self) -> tuple[int, int]:
        """Pair (forward FLOPs, training FLOPs) per example of the model, without those of rematerialisation."""
        return self.model.count_flops(self.task, self.freezing.stop_gradients)

    @property
    def peak_examples(self) -> float | None:
        """Training examples/s at the peak bfloat16 throughput of all devices; None for other dtypes or devices."""
        peak = hardware.peak_flops(self.model.device) if self.config.dtype == "bfloat16" else None
        return peak and peak * self.model.mesh.size / self.flops_per_example[1]

    def examples_and_tokens_seen(self, step: int) -> dict[str, int]:
        """Return {"examples_seen": number} after `step` steps, with "tokens_seen" if the config has `total_tokens`."""
        examples = self._seen + (step - self.start) * self.config.batch_size
        tokens = {"tokens_seen": examples * self.config.model.max_length} if "total_tokens" in self.config else {}
        return {"examples_seen": examples, **tokens}

    def train_batches(self, source: data.Source) -> data.Batches:
        """Return this process's part of every training batch by step, as NumPy arrays in host memory.

        Args:
            source: training split.
        """
        c = self.config
        return self.task.data.train_batches(source, batch_size=c.batch_size, seed=c.seed, **streams.process())

    def stream(self, source: data.Source, start: int) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield the host batches from step `start` to the end of the run, prepared in other threads or processes.

        They are those of `train_batches`: NumPy arrays by name, with `index`, `corrupt` and `mask` of each example.

        Args:
            source: training split.
            start: number of steps before the first batch.
        """
        d, batches = self.config.data, self.train_batches(source)
        return data.batches(batches, start=start, stop=self.intervals.total, workers=d.workers, prefetch=d.prefetch)

    def batches(self) -> Generator[dict[str, Any], None, None]:
        """Yield the host batches (arrays by name) of the steps that are left, from `start` on."""
        return self.stream(self.source, self.start)

    def put(self, host: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the global training batch on the devices from this process's part of it, arrays by name."""
        return streams.put(self.model, host, self.batch)

    @functools.cached_property
    def corrupt(self) -> Any:
        """Log of unreadable training examples: call it with the `corrupt` entries of each batch.

        The call raises DataError if more than the fraction `config.data.max_corrupt` of the examples is unreadable.
        """
        return data.CorruptLog(self.train_batches(self.source), self.config.data.max_corrupt)

    def initial_state(self) -> TrainState:
        """Return the state at step 0 on the devices, with weights of `config.init_from` or random ones.

        Raises:
            WeightsError: see `ModelSetup.initial_weights`.
            DataError: the tokenizer is not that of the run whose weights `config.init_from` names.
        """
        if self.source is not None:
            self.model.check_other_tokenizer(getattr(self.source, "tokenizer", None))
        return states.materialise(self.make_state, self.model.initial_weights(), self.state)

    def restore(self) -> TrainState:
        """Return the newest readable state in the workdir, or the initial state; set `start` to its step.

        The timer continues from the seconds of the checkpoint, and recorded scores are reported to the checkpoints.

        Raises:
            CheckpointError, WeightsError: an error of `Checkpoints.restore` or `ModelSetup.initial_weights`.
        """
        with phases.announce("Reading or initialising the weights"):
            state, seconds, examples = self.checkpoints.restore(self.state) or (self.initial_state(), {}, 0)
        self.start = int(state.step)
        self._seen = self.start * self.config.batch_size if examples is None else examples
        self.timer.resume(seconds)
        scores = multihost.broadcast_from_primary(metrics_log.read_scores(self.workdir, self.checkpoints.score.name))
        for step, value in scores.items():
            if int(step) <= self.start:
                self.checkpoints.report(int(step), value)
        return state

    @property
    def complete(self) -> bool:
        """True if the restored run is finished and has written its summary.json."""
        return self.start >= self.intervals.total and multihost.broadcast_from_primary(
            (self.workdir / "summary.json").is_file()
        )

    @functools.cached_property
    def recorder(self) -> metrics_log.Recorder:
        """Writer of metrics.jsonl, the loggers and the progress output; opened at first use, cut to step `start`."""
        logger = loggers.start(self.config, self.workdir, self.start, self.make_loggers)
        recorder = metrics_log.Recorder(self.workdir, start=self.start, total=self.intervals.total, logger=logger)
        return self._stack.enter_context(recorder)

    @functools.cached_property
    def divergence(self) -> DivergenceMonitor:
        """Monitor that checks every step and evaluation, and ends a run that diverged."""
        optim, ceiling, names = self.config.optim, self.task.objective.ceiling, leaf_names(self.state.params)
        return DivergenceMonitor(optim, ceiling, names, self.checkpoints, self.recorder.write, self.name)

    def begin(self) -> None:
        """Write config.json, class names and tokenizer to the workdir, and delete summary.json.

        Only process 0 does so. Called at the first step, or at the end of a run that has none left to take, so that a
        command for a complete run, or one that is stopped before that, does not overwrite them.
        """
        run_files.begin(self.workdir, self.config, self.timer.compiled, self.split_sizes)
        artifacts.save(self.workdir, self.source)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step that was dispatched to the device, and check completed steps and the save in the background.

        Args:
            step: number of the step.
            metrics: metrics of the training step, on the device.

        Raises:
            TrainingError: the run diverged.
            CheckpointError: a checkpoint could not be saved.
        """
        self._metrics = metrics
        self.divergence.on_step(step, metrics)
        self.checkpoints.poll()
        self.recorder.advance(step)

    def settle(self, *, steps: int | None = None) -> None:
        """Wait for all dispatched steps, and check them.

        Args:
            steps: number of steps of the run, if all are taken. It then also counts as diverged if all were skipped.

        Raises:
            TrainingError: the run diverged.
        """
        self.divergence.settle(steps)

    def log_train(self, step: int, timing: Mapping[str, float]) -> None:
        """Write a train record with the metrics of the steps since the last multiple of log_every.

        Args:
            step: last of these steps.
            timing: further values of the record, such as examples_per_s.
        """
        shown = {name: jax.device_get(self._metrics[name]) for name in TRAIN_METRICS}
        wall = {"wall_s": round(self.timer.total(), 1)}
        self.recorder.write(step, "train", shown | self.examples_and_tokens_seen(step) | dict(timing) | wall)
        self.corrupt.seen |= multihost.gather_union("unreadable", self.corrupt.seen)

    def measure(self, evaluator: Any, state: TrainState) -> Any:
        """Return the values that an `Evaluator` measures for a state, {name: value} of a record for `log`."""
        return evaluator.measure(state)

    def recorded(self, step: int, kind: str) -> bool:
        """Return whether process 0 has a record of this kind at this step, the same result in all processes."""
        return multihost.broadcast_from_primary(self.recorder.has(step, kind))

    def log(self, step: int, kind: str, values: Any) -> None:
        """Write the record of an evaluator; the score of the main evaluation is reported to the checkpoints.

        Args:
            step: step of the state.
            kind: kind of the record, such as "eval" or "probe".
            values: result of `measure`.

        Raises:
            TrainingError: an evaluation shows divergence.
        """
        self.recorder.write(step, kind, values)
        if kind.startswith(MAIN):
            self.divergence.on_evaluation(step, values)
        if kind == MAIN:
            self.checkpoints.report(step, values[self.checkpoints.score.name])

    def is_best(self, step: int) -> bool:
        """Return whether `step` was evaluated and has the best validation score of the run so far."""
        scores = self.checkpoints.scores
        return step in scores and self.checkpoints.score.best(scores) == step

    def may_save(self, step: int) -> bool:
        """Wait for all dispatched steps, and return whether the state is healthy enough to replace older checkpoints.

        It is if its last step was not skipped as non-finite, or if an evaluation has since shown a finite loss.
        """
        self.divergence.settle()
        return not self.divergence.skipped or step in self.checkpoints.scores

    def save(self, step: int, state: TrainState) -> None:
        """Start saving the state in the background as the checkpoint of `step`, with the seconds by phase.

        Raises:
            CheckpointError: an earlier save failed.
            WorkdirError: the folder of the run has been deleted or moved.
        """
        if multihost.is_primary() and not (self.workdir / "config.json").is_file():
            raise WorkdirError(
                f"{self.workdir}/config.json has disappeared: the folder was deleted or moved during training, so step "
                f"{step} cannot be saved. Pass the folder's present path as --workdir, or start again in a new one."
            )
        examples = self.examples_and_tokens_seen(step)["examples_seen"]
        self.checkpoints.save(step, state, seconds=self.timer.seconds(), examples=examples)

    def wait(self) -> None:
        """Wait for the save in the background. Raises CheckpointError if it failed."""
        self.checkpoints.wait()
