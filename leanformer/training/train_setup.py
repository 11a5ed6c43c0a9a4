"""Set-up of a training run: everything that its config decides, and no data, files or arrays."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from leanformer import conditioning, data, models, tasks
from leanformer import config as configs
from leanformer.config import Intervals
from leanformer.config.rules import measures_conditioning, sharded_batches
from leanformer.costs import devices
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.runtime import multihost
from leanformer.runtime.mesh import flatten_names
from leanformer.tasks import Task
from leanformer.training import model_setup, optimizers
from leanformer.training import step as steps
from leanformer.training.model_setup import ModelSetup
from leanformer.training.optimizers import Schedule, is_stacked, make_schedule, split_layer
from leanformer.training.step import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """Set-up of a training run. It can be lowered, compiled and counted without data; nothing is allocated."""

    config: ConfigDict
    model: ModelSetup
    task: Task
    examples: int | None  # training examples per epoch; None if the data are unlimited
    intervals: Intervals
    schedule: Schedule
    freezing: "Freezing"
    make_state: Callable[[Any], TrainState]  # function from weights to the initial state, for `jit`
    state: TrainState  # shapes, dtypes and shardings
    batch: Mapping[str, jax.ShapeDtypeStruct]  # global training batch
    train_step: Callable[..., tuple[TrainState, Mapping[str, Any]]]  # of (state, batch, key), for `jit`

    def lower_train_step(self) -> jax.stages.Lowered:
        """Return the training step (state, batch, key) lowered for the device, with the state donated."""
        mesh = self.model.mesh
        replicated = meshes.replicated_sharding(mesh)
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, self.state), replicated)
        options = meshes.compiler_options(mesh, self.model.device)
        key = jax.eval_shape(jax.random.key, 0)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
        jitted = jax.jit(self.train_step, donate_argnums=0, out_shardings=outputs, compiler_options=options)
        return self.model.lower(jitted, self.state, self.batch, key)

    def compile_train_step(self) -> jax.stages.Compiled:
        """Return the compiled training step (state, batch, key) -> (state, metrics). No array is allocated."""
        return self.lower_train_step().compile()

    def run_key(self) -> jax.Array:
        """Return the random key of the run, into which every step folds its number."""
        replicated = meshes.replicated_sharding(self.model.mesh)
        return jax.jit(lambda key: jax.random.split(key)[1], out_shardings=replicated)(jax.random.key(self.config.seed))

    def initial_state(self) -> TrainState:
        """Return the state at step 0 on the devices, with weights of `config.init_from` or random ones."""
        return model_setup.materialise(self.make_state, self.model.initial_weights(), self.state)

    def train_batches(self, source: data.Source) -> data.Batches:
        """Return this process's part of every training batch of a split, NumPy arrays by name."""
        options = {"batch_size": self.config.batch_size, "seed": self.config.seed}
        return self.task.data.train_batches(source, **options, process=multihost.index(), processes=multihost.count())

    def batches(
        self, source: data.Source, start: int, stop: int | None = None
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield the batches of `train_batches` from number `start` to `stop`, by default the run's end, prefetched."""
        stop, options = self.intervals.total if stop is None else stop, self.config.data
        batches = self.train_batches(source)
        return data.batches(batches, start=start, stop=stop, workers=options.workers, prefetch=options.prefetch)

    def put(self, host: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the global training batch on the devices from this process's part of it."""
        return self.model.put(host, self.batch)

    @functools.cached_property
    def flops_per_example(self) -> tuple[int, int]:
        """(Forward FLOPs, training FLOPs) per example, without rematerialisation; traces the model three times."""
        return self.model.count_flops(self.task, self.freezing.stop_gradients)

    @functools.cached_property
    def peak_examples(self) -> float | None:
        """Training examples/s at the peak bfloat16 throughput of all devices; None for other dtypes or devices."""
        peak = devices.peak_flops(self.model.device) if self.config.dtype == "bfloat16" else None
        return peak and peak * self.model.mesh.size / self.flops_per_example[1]


def check(config: ConfigDict) -> None:
    """Raise ConfigError if a key is invalid, without data or devices. `set_up_training` finds wrong shapes."""
    configs.check_keys(config)
    models.check(**config.model.to_dict())
    configs.check(config)
    tasks.build_task(config)
    if measures_conditioning(config):
        conditioning.tap(config.probe.measures)


def set_up_training(
    config: ConfigDict,
    *,
    examples: int | None,
    mesh: Mesh | None = None,
    device: Any = None,
    task: Task | None = None,
) -> Setup:
    """Return the set-up of a run, from a validated config, for `examples` per epoch (None if the data are unlimited).

    The mesh is by default the first device; `device` is the one to compile for, if not the mesh's. Raises ConfigError
    if the attention backend, mesh, schedule, task or an interval is not possible.
    """
    intervals = configs.intervals(config, examples)
    schedule = make_schedule(config, examples=examples, total=intervals.total)
    task = task or tasks.build_task(config)
    model = model_setup.set_up_model(config, mesh=mesh, device=device, batches=sharded_batches(config))
    task.objective.check_model(model.graphdef, model.weights)

    optim, params, no_decay = config.optim, model.weights[0], models.find_class(config.model.name).no_decay
    frozen = select_frozen(params, optim.freeze)
    settings = {name: optim[name] for name in ("b1", "b2", "eps", "weight_decay")}
    optimizer: optax.GradientTransformationExtraArgs = frozen.freeze(
        optimizers.OPTIMIZERS[optim.name](mask=optimizers.decay_mask(params, no_decay), **settings)
    )
    make_state = functools.partial(steps.init_state, optimizer=optimizer, ema=optim.ema > 0)
    gradient = steps.make_gradient(
        model.graphdef, task.objective, freeze=frozen.stop_gradients, accumulate=config.accumulate
    )
    train_step = steps.make_train_step(
        gradient,
        optimizer,
        schedule,
        divergence_loss=task.objective.divergence_loss,
        clip_norm=optim.clip_norm,
        ema=optim.ema,
        log_every=config.log_every,
    )
    return Setup(
        config=config,
        model=model,
        task=task,
        examples=examples,
        intervals=intervals,
        schedule=schedule,
        freezing=frozen,
        make_state=make_state,
        state=model_setup.with_shardings(jax.eval_shape(make_state, model.weights), model.mesh, model.axes),
        batch=model.abstract_batch(config.batch_size, task.data.specs(train=True)),
        train_step=meshes.with_mesh(model.mesh, train_step),
    )


@dataclasses.dataclass(frozen=True)
class Freezing:
    """Which parameters are trained: whole leaves, or single layers of a stack, which is one leaf with axis L first."""

    trained: Any  # tree like the parameters: 1.0 if a leaf is trained, 0.0 if it is frozen; (L,) numbers for a stack

    def stop_gradients(self, params: Any) -> Any:
        """Return the parameters with the gradient stopped at frozen leaves and layers; values stay."""

        def stop(trained: np.ndarray, leaf: Any) -> Any:
            if trained.all():
                return leaf
            frozen = jax.lax.stop_gradient(leaf)
            return jnp.where(_expand(trained > 0, leaf), leaf, frozen) if trained.any() else frozen

        return jax.tree.map(stop, self.trained, params)

    def freeze(self, optimizer: Any) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer without updates of frozen parameters, weight decay included.

        Leaves that are frozen entirely have no moments. If nothing is frozen, the optimizer is returned unchanged.
        """
        leaves = jax.tree.leaves(self.trained)
        if all(trained.all() for trained in leaves):
            return optimizer
        if not all(trained.any() for trained in leaves):
            optimizer = optax.masked(optimizer, jax.tree.map(lambda trained: bool(trained.any()), self.trained))

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            direction, state = optimizer.update(grads, state, params, **extra)
            return jax.tree.map(lambda trained, d: d * _expand(trained, d), self.trained, direction), state

        return optax.GradientTransformationExtraArgs(optimizer.init, update)  # ty: ignore[invalid-argument-type] - optax's protocol fixes names of arguments

    def count(self, params: Any) -> int:
        """Return the number of trained scalars in a tree of parameters or their shapes."""
        counts = jax.tree.map(lambda x, leaf: np.count_nonzero(x) * (leaf.size // x.size), self.trained, params)
        return int(sum(jax.tree.leaves(counts)))


def select_frozen(params: Any, patterns: Sequence[str]) -> Freezing:
    """Return which parameters are trained.

    Patterns have file-name wildcards and name parameters or modules: "patch_embed", "blocks.layers.[0-5]", "*.norm?". A
    layer has its index in the whole stack, also in a group of unequal layers. A pattern that starts with "!" unfreezes.
    The last matching one decides. Raises ConfigError if one matches nothing, or nothing is left to train.
    """
    trained, all_names = [], set()
    for name, leaf in flatten_names(params).items():
        names = _layer_names(name, leaf)
        all_names |= set().union(*names)
        trains = [not _is_frozen(patterns, names_of_layer) for names_of_layer in names]
        trained.append(np.asarray(trains if is_stacked(name) else trains[0], np.float32))
    for pattern in patterns:
        if not any(_matches(pattern.removeprefix("!"), name) for name in all_names):
            modules = ", ".join(sorted({name.partition(".")[0] for name in all_names}))
            raise ConfigError(f'optim.freeze: "{pattern}" matches no parameter and no module. There are: {modules}.')
    if not any(x.any() for x in trained):
        raise ConfigError(f"optim.freeze={tuple(patterns)} leaves nothing to train. Unfreeze a module, as in '!head'.")
    return Freezing(jax.tree.unflatten(jax.tree.structure(params), trained))


def _layer_names(name: str, leaf: Any) -> list[set[str]]:
    """Return the names of each layer of a leaf: the leaf's, also without its group, and the layer's own."""
    if not is_stacked(name):
        return [{name}]
    stack, first, rest = split_layer(name)
    return [{name, f"{stack}.{rest}", f"{stack}.{i}.{rest}"} for i in range(first, first + leaf.shape[0])]


def _is_frozen(patterns: Sequence[str], names: set[str]) -> bool:
    matching = [pattern for pattern in patterns if any(_matches(pattern.removeprefix("!"), name) for name in names)]
    return bool(matching) and not matching[-1].startswith("!")


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter's name, or the name of a module around it."""
    return any(fnmatchcase(prefix, pattern) for prefix in itertools.accumulate(name.split("."), "{}.{}".format))


def _expand(trained: np.ndarray, leaf: Any) -> np.ndarray:
    return trained.reshape(trained.shape + (1,) * (leaf.ndim - trained.ndim))
