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
from leanformer.runtime import sharing
from leanformer.runtime.sharing import Axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state that a step reads and writes. Leaves are arrays, shapes or shardings, so they have no types.

    Attributes:
        step: int32, number of steps so far, including skipped ones; the next batch is number `step`.
        params: tree of the parameters.
        statistics: tree of the statistics of batch normalisation and σReparam, updated by the forward pass; empty in
            models without them.
        moments: state of the optimizer.
        ema: EMA of (parameters, statistics); None if the run keeps none.
        skipped: int32, number of steps so far that were skipped, or left a parameter too large or not finite.
        skipped_in_row: int32, number of consecutive such steps up to now.
        window: sums of "loss", "grad_norm" and "steps" since the last multiple of log_every, which survive a resume.
    """

    step: Any
    params: Any
    statistics: Any
    moments: Any
    ema: Any
    skipped: Any
    skipped_in_row: Any
    window: dict[str, Any]

    @property
    def weights(self) -> tuple[Any, Any]:
        """Weights of a forward pass as a pair (parameters, statistics), for `nnx.merge(graphdef, *weights)`."""
        return self.params, self.statistics


def split(build: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, Callable[[Key[Array, ""]], tuple[Any, Any]], Any]:
    """Return a model's static definition, the function that initialises its weights from a key, and their shapes.

    Weights are (parameters, batch statistics), as nested dictionaries; shapes are the same with `jax.ShapeDtypeStruct`.
    Nothing is allocated.

    Args:
        build: function that builds the model from random keys.
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
    """Return the state at step 0. Call this under `jit`, so that arrays get their shardings, or under `eval_shape`.

    Args:
        weights: (parameters, batch statistics).
        optimizer: optimizer whose state is initialised.
        ema: True to keep EMA weights, which start as a copy of the weights.
    """
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


def declared_axes(graphdef: Any, weights: tuple[Any, Any]) -> dict[str, Axes]:
    """Return {dotted name: `sharing.Axes`} of every parameter and statistic of a model.

    An `Axes` holds the shape, whether the first axis is one of layers, and the axis along which the layer declares that
    tensor parallelism may split the array. Those without a declaration are included, with `declared` False.

    Args:
        graphdef: static definition of the model.
        weights: (parameters, batch statistics), or their shapes.
    """
    model = nnx.merge(graphdef, *weights)
    stacks = [(*path, "layers") for path, module in nnx.iter_modules(model) if isinstance(module, Stack)]
    result = {}
    for path, variable in sorted(nnx.to_flat_state(nnx.state(model))):
        stacked = any(path[: len(stack)] == stack for stack in stacks)
        metadata = variable.get_metadata()
        name = ".".join(map(str, path))
        result[name] = Axes(variable.shape, stacked, metadata.get(sharing.KEY), sharing.KEY in metadata)
    return result


def with_shardings(shapes: Any, mesh: Mesh | AbstractMesh, axes: Mapping[str, Axes]) -> Any:
    """Return a tree of shapes and dtypes of weights or of a training state, with shardings on a mesh added.

    Args:
        shapes: tree of `jax.ShapeDtypeStruct`.
        mesh: device mesh.
        axes: result of `declared_axes` for the model.
    """
    shardings = meshes.state_shardings(mesh, shapes, axes)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def without_shardings(tree: Any) -> Any:
    """Return a tree of shapes and dtypes from a tree of arrays or shapes, without their shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def materialise[T](make: Callable[[Any], T], argument: Any, like: T) -> T:
    """Return `make(argument)` with every leaf created directly with its sharding, so that no device holds all.

    Args:
        make: function that can be jitted.
        argument: its argument.
        like: tree of shapes with shardings, of the structure of the result.
    """
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(argument)
