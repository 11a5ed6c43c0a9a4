"""The training state: arrays only, made once from an NNX model and sharded from birth."""

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
    """All that a step reads and writes, or its shapes, or its places: hence no types on the leaves."""

    step: Any  # int32; the data position too: batch `step` comes next
    params: Any
    statistics: Any  # of batch normalisation, moved by the forward pass; empty in families without it
    moments: Any  # optimizer state
    ema: Any  # averaged parameters and statistics, or None
    skipped: Any  # int32: steps so far that were skipped, or left a parameter unsound
    skipped_in_row: Any  # int32
    window: dict[str, Any]  # sums since the last train record; in the state so that a resume has them

    @property
    def weights(self) -> tuple[Any, Any]:
        """What a forward pass needs besides the static definition: `nnx.merge(graphdef, *weights)`."""
        return self.params, self.statistics


def split(build: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, Callable[[Key[Array, ""]], tuple[Any, Any]], Any]:
    """A model's static definition, a function that makes its parameters and statistics from a key, and their shapes."""
    definitions = []

    def weights(key: Key[Array, ""]) -> tuple[Any, Any]:
        graphdef, params, statistics = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        definitions[:] = [graphdef]  # static, hence known from tracing: building a model once more costs as much again
        return nnx.as_pure(params), nnx.as_pure(statistics)

    shapes = jax.eval_shape(lambda: weights(jax.random.key(0)))  # a key of its own would start the devices
    return definitions[0], weights, shapes


def init(weights: tuple[Any, Any], optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """The state before step 0; call it under `jit` or `eval_shape`."""
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


def axes(graphdef: Any, weights: tuple[Any, Any]) -> dict[str, Axes]:
    """What layers and stacks say of the axes of each parameter and statistic, by its name; `weights` may be shapes."""
    model = nnx.merge(graphdef, *weights)
    stacks = [(*path, "layers") for path, module in nnx.iter_modules(model) if isinstance(module, Stack)]
    found = {}
    for path, variable in sorted(nnx.to_flat_state(nnx.state(model))):
        stacked = any(path[: len(stack)] == stack for stack in stacks)
        said = variable.get_metadata()
        name = ".".join(map(str, path))
        found[name] = Axes(variable.shape, stacked, said.get(sharing.KEY), sharing.KEY in said)
    return found


def placed(shapes: Any, mesh: Mesh | AbstractMesh, axes: Mapping[str, Axes]) -> Any:
    """Shapes and dtypes with the place of each leaf on the mesh, `axes` being the model's; nothing is allocated."""
    places = meshes.state_shardings(mesh, shapes, axes)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, places)


def unplaced(tree: Any) -> Any:
    """Return shapes and dtypes without shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def materialise[T](make: Callable[[Any], T], argument: Any, like: T) -> T:
    """`make(argument)` with every leaf born where `like` says, so no device ever holds the whole of it."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(argument)
