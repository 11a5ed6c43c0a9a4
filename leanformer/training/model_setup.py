"""Setup of a model: definition, abstract weights and their placement on a mesh. Nothing is allocated."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from leanformer import models
from leanformer.config.rules import patch_grid
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.layers import backends
from leanformer.runtime import files
from leanformer.runtime import mesh as meshes
from leanformer.runtime.mesh import ParameterAxes
from leanformer.tasks import Batch, Objective, Spec, Task
from leanformer.training import state as states
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints, is_run


# Largest depth of a stack that a GPU runs without a loop over layers, if model.unroll is unset: a third fewer launches
# and copies, at most 2 % more memory, for 1.5 to 3.5 times the seconds of compilation (four configs, docs/gpus.md).
UNROLLED = 12


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """Setup of a model on a mesh, without allocated arrays.

    Attributes:
        config: config of the run, of which `model`, `init_from`, `dtype` and `seed` are used.
        mesh: devices of the weights.
        device: device to compile for: one of the mesh, or a GPU that is not attached.
        backend: attention backend, "xla", "cudnn" or "naive".
        backend_reason: reason for its selection, as text.
        graphdef: static definition; `nnx.merge(graphdef, *weights)` is the model.
        init: function from a random key to initial weights.
        weights: shapes, dtypes and shardings of (parameters, batch statistics).
        axes: {dotted name: `mesh.ParameterAxes`} of each parameter and statistic, which decide its sharding.
    """

    config: ConfigDict
    mesh: Mesh
    device: Any
    backend: str
    backend_reason: str
    graphdef: Any
    init: Callable[[jax.Array], Any]
    weights: Any
    axes: Mapping[str, ParameterAxes]

    def merge(self, weights: Any) -> nnx.Module:
        """Return the model as an `nnx.Module` with `weights`, a pair (parameters, batch statistics)."""
        return nnx.merge(self.graphdef, *weights)

    def random_weights(self, seed: int) -> Any:
        """Return randomly initialised (parameters, batch statistics), created directly with their shardings."""
        return states.materialise(self.init, jax.random.key(seed), self.weights)

    def initial_weights(self, *, finite: bool = True) -> Any:
        """Return (parameters, batch statistics) from the path `config.init_from`, or random ones if it is unset.

        Args:
            finite: True to reject weights that contain NaN or infinity.

        Raises:
            WeightsError: the weights cannot be read, do not fit the model, or are not finite.
        """
        c = self.config
        if c.init_from.path is None:
            return self.random_weights(c.seed)
        return self.read_weights(c.init_from.path, c.init_from.layout, finite=finite)

    def read_weights(self, path: str, layout: str, *, finite: bool = True) -> Any:
        """Return (parameters, batch statistics) of this model from a file of weights, or from the best checkpoint of a
        run (the newest if none was evaluated), of its EMA weights if it has them.

        For published weights, the config.json beside them is compared with the model first. Warns if it is missing.

        Args:
            path: file or folder of weights, or folder of a run.
            layout: layout of the file, one of `layouts.LAYOUTS`; "own" for a run.
            finite: True to reject weights that contain NaN or infinity.

        Raises:
            ConfigError: `path` is a run, and `layout` is not "own"; or the model has no such layout.
            CheckpointError: the run has no checkpoint, or it is damaged.
            WeightsError: the weights cannot be read, or are not finite and `finite` is True; their config.json does not
                match the model, or they differ from the model in more than `config.init_from` allows.
        """
        grid = self._compare_settings(path, layout)
        return self.map_weights(read_weights(path, layout, finite=finite), layout, grid)

    def _compare_settings(self, path: str, layout: str) -> tuple[int, int] | None:
        """Compare the config with what the files beside weights say of them. Raises WeightsError if it differs.

        Returns the rows and columns of patches of the model that the weights are from; None if they are unknown.
        """
        from leanformer.pretrained import published

        if layout == "own" or is_run(path):  # `read_weights` refuses a run in another layout
            from leanformer.tasks import artifacts

            folder = Path(path).expanduser()
            folder = folder if folder.is_dir() else folder.parent
            beside = files.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
            return patch_grid(artifacts.load_config(folder).model) if "config" in beside else None
        c = self.config
        return published.check(path, layout, models.find_class(c.model.name).settings(c.model.to_dict()))

    def check_other_tokenizer(self, chosen: Any) -> None:
        """Raise DataError if the tokenizer of the data differs from the one beside the weights in `config.init_from`.

        Args:
            chosen: tokenizer of the data, `data.text.Tokenizer`; None for data without one.
        """
        if self.config.init_from.path is None:
            return
        from leanformer.tasks import artifacts

        path = Path(self.config.init_from.path).expanduser()
        artifacts.check_tokenizer(path if path.is_dir() else path.parent, chosen)

    def map_weights(self, tensors: Mapping[str, Any], layout: str, source_grid: tuple[int, int] | None = None) -> Any:
        """Return (parameters, batch statistics) of this model, with its shardings, from tensors of a file.

        Args:
            tensors: arrays by their names in the file.
            layout: layout of the tensors, one of `layouts.LAYOUTS`.
            source_grid: rows and columns of patches of the model that the tensors are from; None if unknown.

        Raises:
            WeightsError: the tensors differ from the model in more than `config.init_from` allows.
        """
        from leanformer import pretrained
        from leanformer.pretrained import layouts

        c = self.config
        heads = models.find_class(c.model.name).classifiers
        start, grid = c.init_from, patch_grid(c.model)
        allowed = pretrained.Allowed(start.new_head, start.resize_positions, grid, heads, source_grid)
        tensors = layouts.huggingface.rename_nanochat(tensors, c.model)
        weights = pretrained.load(tensors, self.layout(layout), self.random_weights(c.seed), allowed)
        return jax.device_put(weights, jax.tree.map(lambda leaf: leaf.sharding, self.weights))

    def layout(self, name: str) -> list[Any]:
        """Return the map between a layout and the parameters of this model, a list of `layouts.entries.Entry`.

        Args:
            name: one of `layouts.LAYOUTS`; "own" for the names of leanformer.

        Raises:
            ConfigError: the layout does not exist for this model.
        """
        from leanformer.pretrained import layouts, native_layout

        if name == "own":
            return native_layout(self.weights)
        return layouts.layout(name, self.config.model.to_dict())

    def abstract_batch(self, size: int, specs: Mapping[str, Spec]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of a global batch of `size` examples.

        Args:
            specs: shape and dtype of each array of one example, by name.
        """
        place = meshes.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((size, *shape), dtype, sharding=place) for name, (shape, dtype) in specs.items()
        }

    def put(self, host: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, jax.Array]:
        """Return the global arrays of a batch on the devices, sharded over the batch.

        Args:
            host: this process's part of each array, with leading axis B / processes.
            names: arrays to take; others of `host`, such as indices, stay there.
        """
        return meshes.put_batch(self.mesh, {name: host[name] for name in names})

    def with_mesh[**P, R](self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, to be jitted, with the mesh set for the sharding constraints in it."""
        return meshes.with_mesh(self.mesh, function)

    def eval_step(self, objective: Objective, *, detail: bool = False) -> Callable[[Any, Batch], dict[str, Any]]:
        """Return the evaluation step (weights, batch) -> sums, to be jitted; see `step.make_eval_step`.

        Args:
            objective: objective with the statistics.
            detail: True to add sums that are too expensive for evaluations during training.
        """
        return self.with_mesh(steps.make_eval_step(self.graphdef, objective, detail=detail))

    def probe_step(self, objective: Objective, measures: Sequence[str]) -> Callable[[Any, Batch], dict[str, Any]]:
        """Return the probe step (weights, batch) -> {measure: Summary or Reading}, to be jitted.

        See `step.make_probe_step` for its results.

        Args:
            objective: objective that makes the model's inputs from a batch.
            measures: names in `conditioning.ACTIVATIONS`.
        """
        return self.with_mesh(steps.make_probe_step(self.graphdef, objective, measures))

    def count_flops(self, task: Task, freeze: Callable[[Any], Any]) -> tuple[int, int]:
        """Return (forward FLOPs, training FLOPs) per example, without those of rematerialisation.

        Args:
            task: task of the run, with its inputs and loss.
            freeze: function that stops the gradients of frozen parameters, `Freezing.stop_gradients`.
        """
        plain = self.config.copy_and_resolve_references()
        plain.unlock()
        plain.model.update(backend="naive", remat="none")
        model, objective = build(plain), task.objective
        weights = states.without_shardings(model.weights)
        train, held_out = (
            states.without_shardings(model.abstract_batch(1, specs))
            for specs in (task.data.specs(train=True), task.data.specs(train=False))
        )
        forward = steps.make_eval_step(model.graphdef, objective)
        training = steps.make_gradient(model.graphdef, objective, freeze=freeze)
        return count.flops(forward, weights, held_out), count.flops(training, weights, train, jax.random.key(0))

    def lower(self, jitted: Any, *args: Any) -> jax.stages.Lowered:
        """Return a jitted function lowered for `device`, attached or not.

        Args:
            jitted: result of `jax.jit`.
            args: arguments, or their shapes, dtypes and shardings.
        """
        platform = {"gpu": "cuda"}.get(self.device.platform, self.device.platform)
        attached = self.device.platform == self.mesh.devices.flat[0].platform
        return jitted.trace(*args).lower(lowering_platforms=None if attached else (platform,))


def build(
    c: ConfigDict, *, mesh: Mesh | None = None, device: Any = None, batches: Mapping[str, int] | None = None
) -> ModelSetup:
    """Build the model setup of a validated config. Nothing is allocated.

    Args:
        c: validated config.
        mesh: device mesh; the first device if None.
        device: device to compile for, which need not be attached; that of the mesh if None.
        batches: sizes of batches by the names of their keys, which the mesh must divide.

    Raises:
        ConfigError: the attention backend does not run on the device, or the mesh does not fit the model or a batch.
    """
    mesh = mesh or meshes.make_mesh(devices=jax.devices()[:1])
    device = device or mesh.devices.flat[0]
    backend, reason = _select_backend(c, device)
    graphdef, init, weights = abstract_model(c, backend, select_unroll(c, mesh, device))
    axes = states.declared_axes(graphdef, weights)
    meshes.check_batches(mesh, batches or {})
    meshes.check_split(axes, mesh.shape["tensor"])
    return ModelSetup(
        config=c,
        mesh=mesh,
        device=device,
        backend=backend,
        backend_reason=reason,
        graphdef=graphdef,
        init=init,
        weights=states.with_shardings(weights, mesh, axes),
        axes=axes,
    )


def abstract_model(
    c: ConfigDict, backend: str = "naive", unroll: int | None = None
) -> tuple[Any, Callable[[jax.Array], Any], Any]:
    """Return a model's static definition, the function that initialises its weights from a key, and their shapes.

    No model is built and nothing is allocated.

    Args:
        c: config of the run, of which `model` and `dtype` are used.
        backend: resolved attention backend.
        unroll: layers per scan iteration, used if the config leaves model.unroll unset.
    """
    arguments = c.model.to_dict() | {"backend": backend, "dtype": jnp.dtype(c.dtype)}
    if arguments.get("unroll") is None and unroll is not None:
        arguments["unroll"] = unroll
    return states.split(lambda rngs: models.build(rngs=rngs, **arguments))


def select_unroll(c: ConfigDict, mesh: Mesh, device: Any) -> int | None:
    """Return the default of model.unroll for a device: all layers of a single stack on a single GPU, None otherwise.

    It is also None for stacks of more than UNROLLED layers. Models of several stages take minutes to compile with loops
    already (DaViT-B: 150 CPU seconds). On several GPUs the scheduler would keep more activations (41 % more memory for
    vit_b_7x16 on mesh.data=8), and overlap the gradients with fewer matmuls.
    """
    depth, single = c.model.depth, device.platform == "gpu" and mesh.size == 1
    return depth if single and isinstance(depth, int) and depth <= UNROLLED else None


def _select_backend(c: ConfigDict, device: Any) -> tuple[str, str]:
    """Return the attention backend for a device, and the reason for its selection."""
    family, arguments = models.find_class(c.model.name), c.model.to_dict()
    about: dict[str, Any] = {
        "dtype": c.dtype,
        "mask": family.mask_parts(arguments),
        "soft_cap": arguments.get("soft_cap"),
    }
    about |= {"dropout": arguments.get("attention_dropout")}
    return backends.resolve(c.model.backend, device=device, **about, **family.attention_widths(arguments))


def read_weights(path: str, layout: str, *, finite: bool = True) -> Mapping[str, Any]:
    """Return the arrays in a file of weights, or in a run's best or else newest checkpoint, by their names there.

    Of a run that keeps EMA weights, the result is these.

    Args:
        path: file or folder of weights, or folder of a run.
        layout: layout of the file, one of `layouts.LAYOUTS`; "own" for a run.
        finite: True to reject weights that contain NaN or infinity.

    Raises:
        ConfigError: `path` is a run, and `layout` is not "own".
        CheckpointError: the run has no checkpoint, or it is damaged.
        WeightsError: the weights cannot be read, or are not finite and `finite` is True.
    """
    if not is_run(path):
        from leanformer import pretrained

        return pretrained.read(path, finite=finite)
    if layout != "own":
        raise ConfigError(f'{path} is the folder of a run, whose layout is "own", not "{layout}". Use "own".')
    with Checkpoints(Path(path).expanduser() / "checkpoints") as saved:
        restored = saved.restore_weights(None, saved.best(), finite=finite)
    return restored.tensors
