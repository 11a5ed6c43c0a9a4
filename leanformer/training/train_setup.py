"""Setup of training: model, task, schedule, optimizer and abstract state. Nothing is allocated."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from leanformer import data, models, tasks
from leanformer.config import interval, total_steps
from leanformer.config.rules import SECTIONS_WITH_INTERVALS, sharded_batches
from leanformer.costs import count, hardware
from leanformer.runtime import mesh as meshes
from leanformer.tasks import Spec, Task, artifacts
from leanformer.training import lr_scales, model_setup, optimizers, restoring, schedules, streams
from leanformer.training import state as states
from leanformer.training import step as steps
from leanformer.training.model_setup import ModelSetup
from leanformer.training.schedules import Schedule
from leanformer.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """Setup of training, which determines the training step, without allocated arrays."""

    config: ConfigDict
    model: ModelSetup  # setup of the model on the mesh
    task: Task  # data and objective
    examples: int | None  # training examples per epoch; None if the data are unlimited
    schedule: Schedule  # learning rate and beta1 by step, with the numbers of steps
    optimizer: optax.GradientTransformationExtraArgs  # optimizer without learning rate
    lr_scales: lr_scales.LrScales  # learning-rate scale of each parameter; 0 freezes it
    state: TrainState  # shapes, dtypes and shardings of the training state
    splits: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # fingerprints by name of split

    @property
    def mesh(self) -> Mesh:
        """Device mesh of the training."""
        return self.model.mesh

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run."""
        return self.schedule.total

    def interval(self, section: str) -> int:
        """Return the steps between evaluations ("eval"), measurements ("probe") or checkpoints ("checkpoint")."""
        return interval(self.config, section, self.examples)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that are not frozen."""
        return self.lr_scales.trained(self.state.params)

    def make_step(self, schedule: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
        """Return the training step (state, batch, key) -> (state, metrics) for a schedule (`step.make_train_step`)."""
        c, objective = self.config, self.task.objective
        trained = {"hold": self.lr_scales.stop_frozen_gradients, "accumulate": c.accumulate}
        gradient = steps.make_gradient(self.model.graphdef, objective, **trained)
        settings = {"clip_norm": c.optim.clip_norm, "ema": c.optim.ema, "log_every": c.log_every}
        step = steps.make_train_step(gradient, self.optimizer, schedule, ceiling=objective.ceiling, **settings)
        return self.model.with_mesh(step)

    @functools.cached_property
    def train_step(self) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
        """Training step with this setup's schedule."""
        return self.make_step(self.schedule)

    def lower_train_step(self) -> jax.stages.Lowered:
        """Return the lowered training step, with the state donated."""
        mesh = self.mesh
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, self.state), meshes.replicated_sharding(mesh))
        options: dict[str, Any] = {
            "out_shardings": outputs,
            "compiler_options": meshes.compiler_options(mesh, self.model.device),
        }
        jitted = jax.jit(self.train_step, donate_argnums=0, **options)
        key = jax.eval_shape(jax.random.key, 0)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=meshes.replicated_sharding(mesh))
        return self.model.lower(jitted, self.state, self.abstract_batch(), key)

    def compile_train_step(self) -> jax.stages.Compiled:
        """Return the compiled training step (state, batch, key) -> (state, metrics); nothing is allocated."""
        return self.lower_train_step().compile()

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of a global training batch."""
        return self.model.abstract_batch(self.config.batch_size, self._train_specs())

    def _train_specs(self) -> dict[str, Spec]:
        return self.task.data.input_specs() | self.task.data.target_specs(train=True)

    def train_batches(self, source: data.Source) -> data.Batches:
        """Return this process's part of every training batch, in host memory."""
        c = self.config
        return self.task.data.train_batches(source, batch_size=c.batch_size, seed=c.seed, **streams.process())

    def stream(self, source: data.Source, start: int) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield the host batches from step `start` to the end, prepared in other threads or processes."""
        d, batches = self.config.data, self.train_batches(source)
        return data.stream(batches, start=start, stop=self.total, workers=d.workers, prefetch=d.prefetch)

    def put(self, host: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the global training batch from this process's part of it."""
        return streams.put(self.model, host, self.abstract_batch())

    def run_key(self) -> jax.Array:
        """Return the random key of the run, into which every step folds its number."""
        second = jax.jit(lambda key: jax.random.split(key)[1], out_shardings=meshes.replicated_sharding(self.mesh))
        return second(jax.random.key(self.config.seed))

    def make_state(self, weights: Any) -> TrainState:
        """Return the initial state from weights; call this under `jit` or `eval_shape`."""
        return states.init(weights, self.optimizer, ema=self.config.optim.ema > 0)

    def check_initial_weights(self, workdir: Path) -> None:
        """Read the weights that a new run in `workdir` would start from. Raises the errors of `initial_state`."""
        if self.config.init_from.path is not None and not restoring.steps_in(workdir / "checkpoints"):
            self.model.initial_weights()

    def initial_state(self) -> TrainState:
        """Return the initial state. Raises the errors of `ModelSetup.initial_weights`."""
        return states.materialise(self.make_state, self.model.initial_weights(), self.state)

    @functools.cached_property
    def flops_per_example(self) -> tuple[int, int]:
        """Forward and training FLOPs per example of the model, without those of rematerialisation."""
        plain = self.config.copy_and_resolve_references()
        plain.unlock()
        plain.model.update(backend="naive", remat="none")
        model, objective = model_setup.build(plain), self.task.objective
        weights = states.without_shardings(model.weights)

        def batch(specs: Mapping[str, Spec]) -> Any:
            return states.without_shardings(model.abstract_batch(1, specs))

        forward = steps.make_eval_step(model.graphdef, objective)
        training = steps.make_gradient(model.graphdef, objective, hold=self.lr_scales.stop_frozen_gradients)
        return (
            count.flops(forward, weights, batch(streams.eval_specs(self.task.data))),
            count.flops(training, weights, batch(self._train_specs()), jax.random.key(0)),
        )

    @property
    def peak_examples(self) -> float | None:
        """Training examples/s at the peak bfloat16 throughput of all devices; None for other dtypes or devices."""
        peak = hardware.peak_flops(self.model.device) if self.config.dtype == "bfloat16" else None
        return peak and peak * self.mesh.size / self.flops_per_example[1]

    def examples_and_tokens_seen(self, step: int) -> dict[str, int]:
        """Return {"examples_seen": number} after `step` steps, and "tokens_seen" for tasks with `total_tokens`."""
        examples = step * self.config.batch_size
        tokens = {"tokens_seen": examples * self.config.model.max_length} if "total_tokens" in self.config else {}
        return {"examples_seen": examples, **tokens}


def build(
    c: ConfigDict, *, examples: int | None, mesh: Mesh | None = None, device: Any = None, task: Task | None = None
) -> TrainSetup:
    """Build the training setup of a validated config.

    Args:
        examples: number of training examples, which is the length of an epoch; None if the data are unlimited.
        mesh: device mesh; None for the first device, for which batch sizes are not checked.
        device: device to compile for, if not that of the mesh.
        task: task of the config, if it already exists.

    Raises:
        ConfigError: the attention backend, mesh, schedule, task or an interval is not possible.
    """
    if mesh is not None:
        for name, size in sharded_batches(c).items():
            meshes.check_batch(mesh, name, size)
    for section in SECTIONS_WITH_INTERVALS:
        interval(c, section, examples)  # raises ConfigError if it is in epochs and the data have none
    schedule = schedules.make(c.optim, batch_size=c.batch_size, examples=examples, total=total_steps(c, examples))
    model = model_setup.build(c, mesh=mesh, device=device)
    task = task or tasks.build(c)
    task.objective.check_model(model.graphdef, model.weights)
    scales, optimizer = _make_optimizer(c, model)
    make_state = functools.partial(states.init, optimizer=optimizer, ema=c.optim.ema > 0)
    return TrainSetup(
        config=c,
        model=model,
        task=task,
        examples=examples,
        schedule=schedule,
        optimizer=optimizer,
        lr_scales=scales,
        state=states.with_shardings(jax.eval_shape(make_state, model.weights), model.mesh, model.axes),
    )


def prepare(c: ConfigDict, workdir: Path, mesh: Mesh) -> tuple[TrainSetup, data.Source, Mapping[str, data.Source]]:
    """Return the setup of a run, its training split and its evaluation splits.

    Warn of files in several splits, and of data that have changed since the run in `workdir` was started.

    Raises ConfigError or DataError if the data, the task or the mesh do not fit the config, or `workdir` is an export.
    """
    artifacts.check_not_exported(workdir)
    tasks.fill_num_classes(c)
    task = tasks.build(c)
    source, held_out = tasks.open_data(task.data, c, artifacts.load_classes(workdir))
    artifacts.check_tokenizer(workdir, source)
    if not (workdir / "config.json").is_file():
        tasks.check_names(c, source)
    tasks.warn_repeats(c, source, held_out)
    setup = build(c, examples=data.size(source), mesh=mesh, task=task)
    splits = tasks.fingerprint(c, source, held_out)
    artifacts.warn_changed_data(workdir, splits)
    return dataclasses.replace(setup, splits=splits), source, held_out


def _make_optimizer(
    c: ConfigDict, model: ModelSetup
) -> tuple[lr_scales.LrScales, optax.GradientTransformationExtraArgs]:
    """Return the learning-rate scales, and the optimizer that applies them."""
    o, family, params = c.optim, models.find_class(c.model.name), model.weights[0]
    scales = lr_scales.make(
        params,
        freeze=o.freeze,
        layer_decay=o.layer_decay,
        head=1.0 if o.head_lr is None else o.head_lr / o.lr,
        heads=family.classifiers,
        bottom_up=family.bottom_up,
    )
    mask = optimizers.decay_mask(params, family.no_decay)
    settings = {name: o[name] for name in ("b1", "b2", "eps", "weight_decay")}
    return scales, scales.scale_updates(optimizers.OPTIMIZERS[o.name](mask=mask, **settings))
