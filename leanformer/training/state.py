"""Training state: a tree of arrays, initialised from an NNX model directly with its shardings."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Key

from leanformer.layers.stack import Stack
from leanformer.runtime import mesh as meshes
from leanformer.runtime.mesh import ParameterAxes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state that a step reads and writes. Leaves are arrays, shapes or shardings, so they have no types."""

    step: Any  # int32, number of steps so far, including skipped ones; the next batch is number `step`
    params: Any
    statistics: Any  # of batch normalisation and σReparam, updated by the forward pass; empty in models without them
    moments: Any  # state of the optimizer
    ema: Any  # EMA of (parameters, statistics); None if the run keeps none
    skipped: Any  # int32, number of steps so far that were skipped, or left a parameter too large or not finite
    skipped_in_row: Any  # int32, number of consecutive such steps up to now
    window: dict[str, Any]  # sums since the last multiple of log_every, which survive a resume

    @property
    def weights(self) -> tuple[Any, Any]:
        """Weights of a forward pass, for `nnx.merge(graphdef, *weights)`."""
        return self.params, self.statistics


def split(build: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, Callable[[Key[Array, ""]], tuple[Any, Any]], Any]:
    """Return a model's static definition, the function that initialises its weights from a key, and their shapes.

    Weights are (parameters, batch statistics), as nested dictionaries. Nothing is allocated.
    """
    definitions = []

    def weights(key: Key[Array, ""]) -> tuple[Any, Any]:
        graphdef, params, statistics = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        definitions[:] = [graphdef]  # static, so tracing provides it; building the model again would double the time
        return nnx.as_pure(params), nnx.as_pure(statistics)

    # Under `jit`, whose trace `materialise` uses again; a concrete key would start the devices.
    shapes = jax.eval_shape(jax.jit(weights), jax.eval_shape(lambda: jax.random.key(0)))
    return definitions[0], weights, shapes


def init(weights: tuple[Any, Any], optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """Return the state at step 0. Call this under `jit`, so that arrays get their shardings, or under `eval_shape`."""
    params, statistics = weights
    return TrainState(
        step=jnp.int32(0),
        params=params,
        statistics=statistics,
        moments=optimizer.init(params),
        ema=jax.tree.map(jnp.copy, weights) if ema else None,
        skipped=jnp.int32(0),
        skipped_in_row=jnp.int32(0),
        window={name: jnp.float32(0) for name in ("loss", "grad_norm", "steps")},
    )


def window_means(state: TrainState) -> dict[str, Array]:
    """Return the means "loss" and "grad_norm" of a train record, over the steps in `state.window`."""
    return {name: state.window[name] / state.window["steps"] for name in ("loss", "grad_norm")}


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
    """Return `make(argument)` with every leaf created directly with its sharding, so that no device holds all.

    `like` is a tree of shapes with shardings.
    """
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(argument)
