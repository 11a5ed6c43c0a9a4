"""Set-up of a model: definition, abstract weights and their shardings on a mesh. Nothing is allocated."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Key
from ml_collections import ConfigDict

from leanformer import models
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.layers import backends
from leanformer.layers.convolution import patch_grid
from leanformer.layers.stack import Stack
from leanformer.runtime import files, multihost
from leanformer.runtime import mesh as meshes
from leanformer.runtime.mesh import ParameterAxes
from leanformer.tasks import Batch, Objective, Spec, Task
from leanformer.training import run_files
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints, is_run


# Largest depth of a stack that a GPU runs without a loop over layers, if model.unroll is unset: a third fewer launches
# and copies, at most 2 % more memory, for 1.5 to 3.2 times the seconds of compilation (four configs, study/LOG.md).
UNROLLED = 12
# Keys of config.model that change nothing in evaluation, or only the initial weights.
IDLE = {"name", "drop_path", "remat", "unroll", "backend", "dropout", "attention_dropout", "qkv_init", "levers_on"}
IDLE |= {"packed"}  # a document alone is computed alike
# Those, and keys that start new weights, are seen by shapes, or belong to the head.
FREE = IDLE | {"layer_scale", "image_size", "max_length", "num_classes", "pool", "pooler_dim", "transform", "head_bias"}


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """Set-up of a model on a mesh, without allocated arrays. Weights are pairs (parameters, batch statistics)."""

    config: ConfigDict  # of the run; `model`, `init_from`, `dtype` and `seed` are used
    mesh: Mesh
    device: Any  # device to compile for: one of the mesh, or a GPU that is not attached
    backend: str  # attention backend, "xla", "cudnn" or "naive"
    backend_reason: str  # why it was selected, as text
    graphdef: Any  # static definition; `nnx.merge(graphdef, *weights)` is the model
    init: Callable[[jax.Array], Any]  # function from a random key to initial weights
    weights: Any  # shapes, dtypes and shardings of the weights
    axes: Mapping[str, ParameterAxes]  # of each parameter and statistic by dotted name, which decide its sharding

    def merge(self, weights: Any) -> nnx.Module:
        """Return the model with `weights`."""
        return nnx.merge(self.graphdef, *weights)

    def random_weights(self, seed: int) -> Any:
        """Return randomly initialised weights, created directly with their shardings."""
        return materialise(self.init, jax.random.key(seed), self.weights)

    def initial_weights(self) -> Any:
        """Return weights from the path `config.init_from`, or random ones if it is unset; see `read_weights`."""
        c = self.config
        if c.init_from.path is None:
            return self.random_weights(c.seed)
        return self.read_weights(c.init_from.path, c.init_from.layout)

    def read_weights(self, path: str, layout: str, *, finished: bool = False) -> Any:
        """Return weights of this model from a file or folder of weights, or from a run, as `read_weights` below.

        `finished` weights were trained by this config, so what `init_from` permits does not apply. Raises WeightsError
        if the weights, or the config.json beside published ones, do not fit the model.
        """
        from leanformer import pretrained
        from leanformer.pretrained import layouts

        c, source_grid = self.config, self._compare_settings(path, layout)
        heads = models.find_class(c.model.name).classifiers
        permits = (False, False) if finished else (c.init_from.new_head, c.init_from.resize_positions)
        allowed = pretrained.Allowed(*permits, _find_grid(c.model), heads, source_grid)
        tensors = layouts.huggingface.rename_nanochat(read_weights(path, layout), c.model.to_dict())
        weights = pretrained.load(tensors, self.layout(layout), self.random_weights(c.seed), allowed)
        return jax.device_put(weights, jax.tree.map(lambda leaf: leaf.sharding, self.weights))

    def _compare_settings(self, path: str, layout: str) -> tuple[int, int] | None:
        """Compare the config with the files beside weights, and return the grid of patches they are for, if known."""
        if layout == "own" or is_run(path):  # `read_weights` refuses a run in another layout
            folder = _folder_of(path)
            beside = files.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
            if "config" not in beside:
                return None
            source = run_files.load_config(folder)
            self._warn_of_changes(folder, source)
            return _find_grid(source.model)
        from leanformer.pretrained import published

        c = self.config
        if "mean" in c.get("data", {}):
            self._warn(path, {f"data.{key}": (x, c.data[key]) for key, x in published.normalisation(path).items()})
        return published.check(path, layout, models.find_class(c.model.name).settings(c.model.to_dict()))

    def _warn_of_changes(self, folder: Path, source: ConfigDict) -> None:
        """Warn of settings that differ from those of the run `source` and that shapes of weights do not show."""
        family = models.find_class(self.config.model.name)
        theirs, ours = (family.settings(c.model.to_dict()) for c in (source, self.config))
        pairs: dict[str, Any] = {f"model.{key}": (theirs.get(key), x) for key, x in ours.items() if key not in FREE}
        images = self.config.get("data", {}).get("mean") is not None and "mean" in source.data
        pairs |= {f"data.{key}": (source.data[key], self.config.data[key]) for key in ("mean", "std") if images}
        self._warn(folder, pairs)

    def _warn(self, folder: str | Path, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Warn of settings whose values, of the weights and of this config, differ."""
        changed = [f"{key}={old}, now {new}" for key, (old, new) in pairs.items() if (old or None) != (new or None)]
        if changed and multihost.is_primary():
            print(f"WARNING: {folder}: these weights were trained with {'; '.join(changed)}.", file=sys.stderr)

    def check_source(self, tokenizer: Any, classes: Sequence[str] | None) -> None:
        """Raise DataError if the data's tokenizer or order of classes is not the initial weights'."""
        if self.config.init_from.path is not None:
            folder = _folder_of(self.config.init_from.path)
            run_files.check_tokenizer(folder, tokenizer)
            if not self.config.init_from.new_head:
                run_files.check_classes(folder, classes)

    def layout(self, name: str) -> list[Any]:
        """Return the map between a layout, one of `layouts.LAYOUTS`, and the parameters of this model."""
        from leanformer.pretrained import layouts, native_layout

        if name == "own":
            return native_layout(self.weights)
        return layouts.layout(name, self.config.model.to_dict())

    def abstract_batch(self, size: int, specs: Mapping[str, Spec]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of a global batch of `size` examples."""
        make = functools.partial(jax.ShapeDtypeStruct, sharding=meshes.batch_sharding(self.mesh))
        return {name: make((size, *shape), dtype) for name, (shape, dtype) in specs.items()}

    def put(self, host: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, jax.Array]:
        """Return the named global arrays of a batch on the devices from this process's part of them."""
        return meshes.put_batch(self.mesh, {name: host[name] for name in names})

    def eval_step(self, objective: Objective, *, detail: bool = False) -> Callable[[Any, Batch], dict[str, Any]]:
        """Return the evaluation step (weights, batch) -> sums, to be jitted; see `step.make_eval_step`."""
        return meshes.with_mesh(self.mesh, steps.make_eval_step(self.graphdef, objective, detail=detail))

    def probe_step(self, objective: Objective, measures: Sequence[str]) -> Callable[[Any, Batch], dict[str, Any]]:
        """Return the probe step (weights, batch) -> measures in float32, to be jitted; see `step.make_probe_step`."""
        return meshes.with_mesh(self.mesh, steps.make_probe_step(self.in_float32().graphdef, objective, measures))

    def in_float32(self) -> "ModelSetup":
        """Return the set-up in float32, to be measured: bfloat16 resolves a condition number of some hundreds."""
        if self.config.dtype == "float32":
            return self
        c = self.config.copy_and_resolve_references().unlock()
        c.dtype, c.model.backend = "float32", "auto"
        return set_up_model(c, mesh=self.mesh, device=self.device)

    def count_flops(self, task: Task, freeze: Callable[[Any], Any]) -> tuple[int, int]:
        """Return (forward FLOPs, training FLOPs) per example, without rematerialisation."""
        plain = self.config.copy_and_resolve_references()
        plain.unlock()
        plain.model.update(backend="naive", remat="none")
        model, objective = set_up_model(plain), task.objective
        weights = without_shardings(model.weights)
        train, held_out = (
            without_shardings(model.abstract_batch(1, specs))
            for specs in (task.data.specs(train=True), task.data.specs(train=False))
        )
        forward = steps.make_eval_step(model.graphdef, objective)
        training = steps.make_gradient(model.graphdef, objective, freeze=freeze)
        return count.flops(forward, weights, held_out), count.flops(training, weights, train, jax.random.key(0))

    def lower(self, jitted: Any, *args: Any) -> jax.stages.Lowered:
        """Return a jitted function lowered for `device`, attached or not, from arguments or their shapes."""
        platform = {"gpu": "cuda"}.get(self.device.platform, self.device.platform)
        attached = self.device.platform == self.mesh.devices.flat[0].platform
        return jitted.trace(*args).lower(lowering_platforms=None if attached else (platform,))


def set_up_model(
    c: ConfigDict, *, mesh: Mesh | None = None, device: Any = None, batches: Mapping[str, int] | None = None
) -> ModelSetup:
    """Return the set-up of a model on a mesh, by default the first device, from a validated config.

    `device` is the device to compile for, if not the mesh's. Raises ConfigError if the attention backend does not run
    on it, or the mesh does not fit the model or a size in `batches`, by config key.
    """
    mesh = mesh or meshes.make_mesh(devices=jax.devices()[:1])
    device = device or mesh.devices.flat[0]
    backend, reason = _select_backend(c, device)
    graphdef, init, weights = abstract_model(c, backend, select_unroll(c, mesh, device))
    axes = declared_axes(graphdef, weights)
    meshes.check_batches(mesh, batches or {})
    meshes.check_split(axes, mesh.shape["tensor"])
    weights = with_shardings(weights, mesh, axes)
    return ModelSetup(c, mesh, device, backend, reason, graphdef, init, weights, axes)


def abstract_model(
    c: ConfigDict, backend: str = "naive", unroll: int | None = None
) -> tuple[Any, Callable[[jax.Array], Any], Any]:
    """Return a model's static definition, the initialisation of its weights from a key, and their shapes.

    `unroll` layers per scan iteration are used if the config leaves model.unroll unset.
    """
    arguments = c.model.to_dict() | {"backend": backend, "dtype": jnp.dtype(c.dtype)}
    if arguments.get("unroll") is None and unroll is not None:
        arguments["unroll"] = unroll
    return split_model(lambda rngs: models.build(rngs=rngs, **arguments))


def split_model(
    build: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Any, Callable[[Key[Array, ""]], tuple[Any, Any]], Any]:
    """Return a model's static definition, the function that initialises its weights from a key, and their shapes."""
    definitions = []

    def weights(key: Key[Array, ""]) -> tuple[Any, Any]:
        graphdef, params, statistics = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        definitions[:] = [graphdef]  # static, so tracing provides it; building the model again would double the time
        return nnx.as_pure(params), nnx.as_pure(statistics)

    # Under `jit`, whose trace `materialise` uses again; a concrete key would start the devices.
    shapes = jax.eval_shape(jax.jit(weights), jax.eval_shape(lambda: jax.random.key(0)))
    return definitions[0], weights, shapes


def declared_axes(graphdef: Any, weights: tuple[Any, Any]) -> dict[str, ParameterAxes]:
    """Return {dotted name: axes} of every parameter and statistic of a model, also of those that declare nothing."""
    model = nnx.merge(graphdef, *weights)
    stacks = [(*path, "layers") for path, module in nnx.iter_modules(model) if isinstance(module, Stack)]
    result = {}
    for path, variable in sorted(nnx.to_flat_state(nnx.state(model))):
        stacked = any(path[: len(stack)] == stack for stack in stacks)
        metadata, key = variable.get_metadata(), meshes.DECLARED
        result[".".join(map(str, path))] = ParameterAxes(variable.shape, stacked, metadata.get(key), key in metadata)
    return result


def with_shardings(shapes: Any, mesh: Mesh | AbstractMesh, axes: Mapping[str, ParameterAxes]) -> Any:
    """Return a tree of shapes of weights or of a training state, with shardings on a mesh added."""
    shardings = meshes.state_shardings(mesh, shapes, axes)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def without_shardings(tree: Any) -> Any:
    """Return a tree of shapes and dtypes from a tree of arrays or shapes, without their shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def materialise[T](make: Callable[[Any], T], argument: Any, like: T) -> T:
    """Return `make(argument)`, each leaf created with its sharding in `like`, so that no device holds all."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(argument)


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
    family, model = models.find_class(c.model.name), c.model.to_dict()
    return backends.resolve(
        c.model.backend,
        device=device,
        dtype=c.dtype,
        mask=family.mask_parts(model),
        soft_cap=model.get("soft_cap"),
        dropout=model.get("attention_dropout"),
        **family.attention_widths(model),
    )


def read_weights(path: str, layout: str) -> Mapping[str, Any]:
    """Return the arrays in a file of weights, or in a run's best or else newest checkpoint, by their names there.

    Returns the EMA weights if the run keeps them. Raises ConfigError for a run in a layout other than "own",
    CheckpointError or WeightsError if the weights cannot be read, or are not finite.
    """
    if not is_run(path):
        from leanformer import pretrained

        return pretrained.read(path)
    if layout != "own":
        raise ConfigError(f'{path} is the folder of a run, whose layout is "own", not "{layout}". Use "own".')
    with Checkpoints(Path(path).expanduser() / "checkpoints") as saved:
        return saved.restore_weights(None, saved.best()).tensors


def _find_grid(m: Any) -> tuple[int, int] | None:
    """Return the rows and columns of patches for a section `model`; None for one without patches."""
    return patch_grid(m.image_size, m.patch_size) if "patch_size" in m else None


def _folder_of(path: str) -> Path:
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else folder.parent
