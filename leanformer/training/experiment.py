"""From a checked config to the pieces that train, evaluate and cost share: mesh, model, state, steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from leanformer import models, pretrained, tasks
from leanformer.config import total_steps
from leanformer.config.rules import patches, shared_out
from leanformer.costs import count
from leanformer.layers import backends
from leanformer.pretrained import checks as weight_checks
from leanformer.pretrained import layouts
from leanformer.runtime import mesh as meshes
from leanformer.runtime.target import lower, seen_by
from leanformer.tasks import Leaf, Task
from leanformer.training import optim, optimizers, rates, schedules
from leanformer.training import state as states
from leanformer.training import step as steps
from leanformer.training.checkpoint import read_weights
from leanformer.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that follows from the config and its task. Nothing is on a device yet."""

    config: ConfigDict
    mesh: Mesh
    device: Any  # that programs are built for
    backend: str  # of attention, and why
    backend_reason: str
    total: int  # optimizer steps
    warmup: int  # of them
    examples: int | None  # of an epoch, where data have an end
    graphdef: Any
    make_weights: Callable[[jax.Array], Any]  # from a key
    make_state: Callable[[Any], TrainState]  # from weights
    like: TrainState  # shapes, dtypes and places
    trained: int  # parameters that are not frozen
    task: Task
    schedule: Callable[..., tuple[Any, Any]]  # from a step to the learning rate and the first moment's decay
    loss_of: Callable[..., Any]  # that the step takes the gradient of
    step_of: Callable[..., Callable[..., Any]]  # the step by a schedule
    train_step: Callable[..., Any]  # by its own
    eval_step: Callable[..., Any]
    probe_step: Callable[..., Any] | None  # (weights, batch) to what the measures are; None if the probe is off

    def compile_train_step(self) -> jax.stages.Compiled:
        """The training step, ahead of time and without allocating; call it as (state, batch, key)."""
        return self.lower_train_step().compile()

    def lower_train_step(self) -> jax.stages.Lowered:
        """The training step as the compiler gets it."""
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, self.like), meshes.replicated(self.mesh))
        options = {"out_shardings": outputs, "compiler_options": meshes.compiler_options(self.mesh, self.device)}
        jitted = jax.jit(self.train_step, donate_argnums=0, **options)
        key = jax.eval_shape(jax.random.key, 0)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=meshes.replicated(self.mesh))
        return self._lower(jitted, self.like, self.abstract_batch(), key)

    def lower_eval_step(self) -> jax.stages.Lowered:
        """The evaluation step likewise."""
        return self._lower(jax.jit(self.eval_step), self.like.weights, self.abstract_batch(train=False))

    def lower_probe_step(self) -> jax.stages.Lowered:
        """The probe's step likewise, where there is one."""
        batch = self._abstract(self.config.probe.examples, self.task.leaves())
        return self._lower(jax.jit(self.probe_step), self.like.weights, batch)

    def _lower(self, jitted: Any, *args: Any) -> jax.stages.Lowered:
        return lower(jitted, *args, device=self.device, live=self.mesh.devices.flat[0])

    def run_key(self) -> jax.Array:
        """The key that every step folds its number into."""
        second = jax.jit(lambda key: jax.random.split(key)[1], out_shardings=meshes.replicated(self.mesh))
        return second(jax.random.key(self.config.seed))

    def initial_state(self) -> TrainState:
        """The state before step 0. Raises as `first_weights`."""
        return states.materialise(self.make_state, self.first_weights(), self.like)

    def first_weights(self, *, finite: bool = True) -> Any:
        """The weights of `config.init_from`, or random ones where it names none.

        Args:
            finite: whether to refuse weights with a NaN or an infinity.

        Raises:
            WeightsError: they cannot be read, or do not fit the model.
        """
        c = self.config.init_from
        if c.path is None:
            return self.random_weights(self.config.seed)
        return self.read(c.path, c.layout, finite=finite)

    def read(
        self, path: str, layout: str, *, step: int | None = None, best: bool | None = None, finite: bool = True
    ) -> Any:
        """Weights from a file in a layout, or from the folder of a run, as `checkpoint.read_weights`. Raises as that
        and `fitted`, and WeightsError where what is published beside them tells of another model."""
        if layout == "huggingface":
            weight_checks.check_published(path, self.config.model.to_dict())
        return self.fitted(read_weights(path, layout, step=step, best=best, finite=finite), layout)

    def fitted(self, tensors: pretrained.Tensors, layout: str) -> Any:
        """Weights from tensors in a layout. Raises WeightsError where more differs than `config.init_from` allows."""
        c, fresh = self.config.init_from, self.random_weights(self.config.seed)
        heads = models.family(self.config.model.name).classifiers
        allowed = pretrained.Allowed(c.new_head, c.resize_positions, patches(self.config.model), heads)
        found = pretrained.load(tensors, self.layout(layout), fresh, allowed)
        return jax.device_put(found, jax.tree.map(lambda leaf: leaf.sharding, self.like.weights))

    def random_weights(self, seed: int) -> Any:
        """Weights at initialisation, born where they live."""
        return states.materialise(self.make_weights, jax.random.key(seed), self.like.weights)

    def layout(self, source: str) -> list[layouts.Entry]:
        """The key map to a layout, "own" being our own names. Raises ConfigError for one that the family has not."""
        if source == "own":
            return pretrained.own_layout(self.like.weights)
        return layouts.layout(source, self.config.model.to_dict())

    def abstract_batch(self, *, train: bool = True) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch, for training, or with `mask` for evaluation."""
        task, c = self.task, self.config
        if train:
            return self._abstract(c.batch_size, task.leaves() | task.targets(train=True))
        return self._abstract(c.eval.batch_size, task.leaves() | task.targets(train=False) | {"mask": ((), bool)})

    def _abstract(self, size: int, leaves: dict[str, Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
        place = meshes.over_batch(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((size, *shape), dtype, sharding=place) for name, (shape, dtype) in leaves.items()
        }

    def seen(self, step: int) -> dict[str, int]:
        """Examples that so many steps have trained on, and their tokens where a run can be measured by these."""
        examples = step * self.config.batch_size
        tokens = {"tokens_seen": examples * self.config.model.max_length} if "total_tokens" in self.config else {}
        return {"examples_seen": examples, **tokens}

    @property
    def notes(self) -> dict[str, str]:
        """What the task has to say of the model, for the start page."""
        with seen_by(self.device):
            return self.task.notes(self.graphdef, self.like.weights)

    @functools.cached_property
    def flops_per_example(self) -> tuple[int, int]:
        """Model FLOPs of one example, forward and training; recomputation and fused kernels do not change them."""
        plain = self.config.copy_and_resolve_references()
        plain.unlock()
        plain.update(batch_size=1, accumulate=1, total_steps=1)
        plain.eval.batch_size = 1
        plain.optim.update(warmup_epochs=0.0, warmup_steps=0, warmup_share=0.0, schedule="constant")
        plain.optim.name = "adamw"  # the products inside another are a step's, not an example's
        plain.model.update(backend="naive", remat="none")
        one = build(plain, examples=1, mesh=None)
        forward = count.flops(one.eval_step, one.like.weights, _free(one.abstract_batch(train=False)))
        return forward, count.flops(one.train_step, one.like, _free(one.abstract_batch()), jax.random.key(0))

    @functools.cached_property
    def kept_bytes(self) -> int:
        """What the forward pass of the batch, in one piece, keeps for the backward pass besides weights and batch."""

        def back(weights: tuple[Any, Any], batch: Any, key: Any) -> Any:
            parts, shared = self.task.draw(batch, key, key)
            others = weights[1], parts, shared, self.task.weight(batch)
            return jax.vjp(lambda params: self.loss_of(params, *others)[0], weights[0])[1]

        with seen_by(self.device):
            weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.like.weights)
            traced = jax.make_jaxpr(back)(weights, _free(self.abstract_batch()), jax.random.key(0)).jaxpr
        return count.bytes_made(traced)


def build(
    c: ConfigDict, *, examples: int | None, mesh: Mesh | None, device: Any = None, task: Task | None = None
) -> Experiment:
    """Builds an experiment from a checked config.

    Args:
        examples: in the training split, which sets the length of an epoch; None where they have no end.
        mesh: where it runs; None for one device, to count and not to run.
        device: that its programs are built for, if not for those of the mesh: a `target.Gpu`, say.
        task: that of the config, made anew if not given.

    Raises:
        ConfigError: an attention backend, mesh, schedule or task that cannot be, found out only now.
    """
    one_device = mesh is None
    mesh = mesh or meshes.make_mesh(devices=jax.devices()[:1])
    device = device or mesh.devices.flat[0]
    family = models.family(c.model.name)
    backend, reason = _backend(c, device)
    if not one_device:
        for name, size in shared_out(c).items():
            meshes.check_batch(mesh, name, size)

    o, total = c.optim, total_steps(c, examples)
    warmup, schedule = schedules.make(o, batch_size=c.batch_size, examples=examples, total=total)
    graphdef, make_weights, weights = model(c, backend)
    axes = states.axes(graphdef, weights)
    if not one_device:
        meshes.check_split(axes, mesh.shape.get("tensor", 1))
    own = rates.of(
        weights[0],
        freeze=o.freeze,
        layer_decay=o.layer_decay,
        head=1.0 if o.head_lr is None else o.head_lr / o.lr,
        heads=family.classifiers,
        bottom_up=family.bottom_up,
    )
    mask = optim.decay_mask(weights[0], family.no_decay)
    settings = {name: o[name] for name in ("b1", "b2", "eps", "weight_decay")}
    optimizer = own.applied(optimizers.make(o.name, mask=mask, **settings))
    make_state = functools.partial(states.init, optimizer=optimizer, ema=c.optim.ema > 0)
    task = task or tasks.of(c)
    with seen_by(device):
        task.fit(graphdef, weights)

    def step_of(schedule: Any) -> Any:
        settings = {"clip_norm": c.optim.clip_norm, "ema": c.optim.ema, "log_every": c.log_every}
        settings |= {"hold": own.hold, "accumulate": c.accumulate}
        return meshes.on(mesh, steps.make_train_step(graphdef, optimizer, task, schedule, **settings))

    return Experiment(
        config=c,
        mesh=mesh,
        device=device,
        backend=backend,
        backend_reason=reason,
        total=total,
        warmup=warmup,
        examples=examples,
        graphdef=graphdef,
        make_weights=make_weights,
        make_state=make_state,
        like=states.placed(jax.eval_shape(make_state, weights), mesh, axes),
        trained=own.trained(weights[0]),
        task=task,
        schedule=schedule,
        loss_of=meshes.on(mesh, steps.make_loss(graphdef, task, own.hold)),
        step_of=step_of,
        train_step=step_of(schedule),
        eval_step=meshes.on(mesh, steps.make_eval_step(graphdef, task)),
        probe_step=meshes.on(mesh, steps.make_probe_step(graphdef, task, c.probe.measures)) if c.probe.every else None,
    )


def _backend(c: ConfigDict, device: Any) -> tuple[str, str]:
    """That of attention on a device, and why."""
    family, arguments = models.family(c.model.name), c.model.to_dict()
    about = {"dtype": c.dtype, "mask": family.mask_parts(arguments), "soft_cap": arguments.get("soft_cap")}
    about |= {"dropout": arguments.get("attention_dropout")}
    return backends.resolve(c.model.backend, device=device, **about, **family.attention_widths(arguments))


def model(c: ConfigDict, backend: str = "naive") -> tuple[Any, Callable[[jax.Array], Any], Any]:
    """A config's model as `state.split` gives it: its definition, what makes its weights, and their shapes."""
    arguments = c.model.to_dict() | {"backend": backend, "dtype": jnp.dtype(c.dtype)}
    return states.split(lambda rngs: models.build(rngs=rngs, **arguments))


def _free(batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes that say nothing of a place."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
