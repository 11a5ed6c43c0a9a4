"""Set-up of a training run: everything that its config decides, in order. Nothing is allocated."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from leanformer import config, data, models, tasks
from leanformer.config.rules import sharded_batches
from leanformer.runtime import mesh as meshes
from leanformer.tasks import Objective, Task
from leanformer.training import freezing, model_setup, optimizers, schedules
from leanformer.training import state as states
from leanformer.training import step as steps
from leanformer.training.freezing import Freezing
from leanformer.training.model_setup import ModelSetup
from leanformer.training.run import Run, Step
from leanformer.training.timer import Timer


def prepare(
    c: ConfigDict, workdir: Path, timer: Timer, *, mesh: Mesh | None = None, name: str = "", make_loggers: Any = None
) -> Run:
    """Open the data of a run, and set up the run. Nothing is written.

    Args:
        c: validated config.
        workdir: folder of the run, which need not exist.
        timer: timer of the run.
        mesh: device mesh; that of the config if None.
        name: prefix of messages, if several runs train at once.

    Raises:
        ConfigError, DataError: the data, the task or the mesh do not fit the config, or `workdir` is an export.
    """
    mesh = mesh or meshes.make_mesh(**c.mesh)
    task, source, held_out = tasks.open_run(c, workdir)
    run = build(c, examples=data.size(source), mesh=mesh, task=task)
    sizes = {split: data.size(opened) for split, opened in tasks.by_split(c, source, held_out).items()}
    opened = {"source": source, "held_out": held_out, "split_sizes": sizes}
    return dataclasses.replace(run, **opened, workdir=workdir, timer=timer, name=name, make_loggers=make_loggers)


def build(
    c: ConfigDict, *, examples: int | None, mesh: Mesh | None = None, device: Any = None, task: Task | None = None
) -> Run:
    """Set up a run without data and workdir, from a validated config.

    Args:
        c: validated config.
        examples: number of training examples, which is the length of an epoch; None if the data are unlimited.
        mesh: device mesh; None for the first device.
        device: device to compile for, if not that of the mesh.
        task: task of the config, if it already exists.

    Raises:
        ConfigError: the attention backend, mesh, schedule, task or an interval is not possible.
    """
    intervals = config.intervals(c, examples)
    schedule = schedules.make(c.optim, batch_size=c.batch_size, examples=examples, total=intervals.total)
    task = task or tasks.build(c)
    model = model_setup.build(c, mesh=mesh, device=device, batches=sharded_batches(c))
    task.objective.check_model(model.graphdef, model.weights)
    frozen, optimizer = _make_optimizer(c, model)
    make_state = functools.partial(states.init, optimizer=optimizer, ema=c.optim.ema > 0)
    make_step = functools.partial(_make_step, c, model, task.objective, optimizer, frozen)
    return Run(
        config=c,
        model=model,
        task=task,
        examples=examples,
        intervals=intervals,
        schedule=schedule,
        optimizer=optimizer,
        freezing=frozen,
        state=states.with_shardings(jax.eval_shape(make_state, model.weights), model.mesh, model.axes),
        make_state=make_state,
        make_step=make_step,
        train_step=make_step(schedule),
        batch=model.abstract_batch(c.batch_size, task.data.specs(train=True)),
    )


def _make_step(
    c: ConfigDict,
    model: ModelSetup,
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    frozen: Freezing,
    schedule: Callable[..., tuple[Any, Any]],
) -> Step:
    """Return the training step (state, batch, key) -> (state, metrics) for a schedule."""
    trained = {"freeze": frozen.stop_gradients, "accumulate": c.accumulate}
    gradient = steps.make_gradient(model.graphdef, objective, **trained)
    settings = {"clip_norm": c.optim.clip_norm, "ema": c.optim.ema, "log_every": c.log_every}
    return model.with_mesh(steps.make_train_step(gradient, optimizer, schedule, ceiling=objective.ceiling, **settings))


def _make_optimizer(c: ConfigDict, model: ModelSetup) -> tuple[Freezing, optax.GradientTransformationExtraArgs]:
    """Return which parameters are trained, and the optimizer that leaves the others unchanged."""
    o, family, params = c.optim, models.find_class(c.model.name), model.weights[0]
    frozen = freezing.make(params, o.freeze)
    mask = optimizers.decay_mask(params, family.no_decay)
    settings = {name: o[name] for name in ("b1", "b2", "eps", "weight_decay")}
    return frozen, frozen.freeze(optimizers.OPTIMIZERS[o.name](mask=mask, **settings))
