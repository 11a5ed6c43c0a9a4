"""The training state: arrays only, made once from an NNX model and sharded from birth."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from leanformer import mesh as meshes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step reads and writes, or its shapes, or its places: hence no types on the leaves."""

    step: Any  # int32; the data position too: batch `step` comes next
    params: Any
    moments: Any  # optimizer state
    ema: Any  # averaged parameters, or an empty dict
    skipped: Any  # int32: non-finite steps so far
    skipped_in_row: Any  # int32
    window: dict[str, Any]  # sums since the last train record; in the state so that a resume has them


def split(build: Callable[[nnx.Rngs], nnx.Module], seed: int) -> tuple[Any, Callable[[], Any]]:
    """A model's static definition, and a function that makes its parameters as plain arrays from the seed."""

    def params() -> Any:
        return nnx.as_pure(nnx.state(build(nnx.Rngs(seed)), nnx.Param))

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(seed))), nnx.Param)
    return graphdef, params


def init(params: Callable[[], Any], optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """The state before step 0; call it under `jit` or `eval_shape`."""
    weights = params()
    return TrainState(
        step=jnp.int32(0),
        params=weights,
        moments=optimizer.init(weights),
        ema=jax.tree.map(jnp.copy, weights) if ema else {},
        skipped=jnp.int32(0),
        skipped_in_row=jnp.int32(0),
        window={name: jnp.float32(0) for name in ("loss", "grad_norm", "steps")},
    )


def abstract(make: Callable[[], TrainState], mesh: Mesh) -> TrainState:
    """Shapes, dtypes and places of the state that `make` makes; nothing is allocated."""
    shapes = jax.eval_shape(make)
    shardings = meshes.state_shardings(mesh, shapes)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, shardings)


def materialise(make: Callable[[], TrainState], like: TrainState) -> TrainState:
    """Makes the state with every leaf born where `like` says, so no device ever holds the whole of it."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()
