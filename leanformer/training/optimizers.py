"""The optimizers by name. Weight decay is decoupled in all of them, and a step that is not finite moves no moments.

`update` takes, besides gradients, moments and parameters, `finite`, whether the moments move at all, and `b1` of this
step, which AdamW alone can change; what it returns the step multiplies by −learning rate.

The layers of a stack are one leaf with a leading axis L, and a layer's weight may have more axes than two. `matrix`
says which of them are rows and which columns, for the optimizers that see matrices and not numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from leanformer.training.optim import adamw


# How many of a kernel's axes, after that of the layers, are inputs, by the last two parts of its name.
INPUTS = {
    **{f"{name}{up}.kernel": 1 for name in ("query", "key", "value") for up in ("", "_up")},  # D N H, R N H
    "weights.kernel": 1,  # of outlook attention: D N 9 9
    "out.kernel": 2,  # N H D
}


class Matrix(NamedTuple):
    """Axes of a leaf that are the inputs and the outputs of a product; each of the other axes' places has its own."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def matrix(name: str, ndim: int) -> Matrix | None:
    """The matrices that a leaf is made of; None for one that is no product's weight, such as a bias or positions."""
    *_, module, leaf = ("", *name.split("."))
    layers = int(_stacked(name))
    by_axes = {2: 1, 4: 3}.get(ndim - layers)  # D F, and k k C D of a convolution; k k D of a depthwise one has none
    inputs = INPUTS.get(f"{module}.{leaf}", by_axes)
    if leaf != "kernel" or inputs is None:
        return None
    return Matrix(tuple(range(layers, layers + inputs)), tuple(range(layers + inputs, ndim)))


def make(
    name: str, *, b1: float, b2: float, eps: float, weight_decay: float, mask: Any
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of that name. `mask` is True for the leaves that decay."""
    return OPTIMIZERS[name](b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)


def _decoupled(
    rule: Callable[[float, float, float], optax.GradientTransformation],
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """A rule with a guard and with weight decay beside it, as AdamW has both."""
    moves = rule(b1, b2, eps)

    def update(grads: Any, state: Any, params: Any = None, *, finite: Any = True, **_: Any) -> tuple[Any, Any]:
        direction, moved = moves.update(grads, state, params)
        return direction, jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)

    guarded = optax.GradientTransformationExtraArgs(moves.init, update)
    return optax.chain(guarded, optax.add_decayed_weights(weight_decay, mask))


def _lion(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """The sign of a momentum (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms); nothing is divided, so
    there is no use for `eps`."""
    return optax.scale_by_lion(b1, b2)


def _sgd(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """The sum of all gradients, each step's weighing `b1` times the next's: heavy-ball momentum. No second moment."""
    return optax.trace(b1)


def _muon(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """For matrices inside stacks, momentum `b1` with all singular values brought near 1 (Jordan et al. 2024, Muon: An
    optimizer for hidden layers in neural networks); for all else, the embeddings and the head among it, Adam.

    Every layer's matrix is one by itself; queries, keys and values are three, D × NH. A direction of R × C is scaled
    to the size of Adam's, by 0.2 √max(R, C), so that one learning rate does for both (Liu et al. 2025, Muon is
    Scalable for LLM Training).
    """

    def kind(name: str, leaf: Array) -> str:
        return "muon" if _stacked(name) and matrix(name, leaf.ndim) else "adam"

    def axes(name: str, leaf: Array) -> optax.contrib.MuonDimensionNumbers:
        return optax.contrib.MuonDimensionNumbers(*matrix(name, leaf.ndim))

    def scaled(name: str, direction: Array) -> Array:
        inputs, outputs = matrix(name, direction.ndim)
        return 0.2 * max(_size(direction, inputs), _size(direction, outputs)) ** 0.5 * direction

    orthogonal = optax.contrib.scale_by_muon(
        beta=b1, eps=eps, weight_dimension_numbers=functools.partial(_map_named, axes)
    )
    sized = optax.stateless(lambda updates, _: _map_named(scaled, updates))
    kinds = {"muon": optax.chain(orthogonal, sized), "adam": optax.scale_by_adam(b1, b2, eps)}
    return optax.partition(kinds, functools.partial(_map_named, kind))


class FactoredState(NamedTuple):
    """Adafactor's second moments. Of a matrix `row` is the mean over its outputs and `column` that over its inputs,
    axes kept with length 1, so that both live where their parameter does; of any other leaf `row` is all of it."""

    count: Array
    row: Any
    column: Any


def _adafactor(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost) as large ViTs
    are trained with it (Zhai et al. 2022, Scaling Vision Transformers): without scaling by the parameters,
    β₂ = 1 − t^−0.8 but at most `b2`, and momentum `b1`, which takes the memory that the second moments save unless it
    is 0. `eps` is in units of the gradient: its square joins the squares."""

    def means(name: str, squares: Array) -> tuple[Array, Array]:
        found = matrix(name, squares.ndim)
        if found is None:
            return squares, jnp.ones((1,) * squares.ndim)
        return squares.mean(found.outputs, keepdims=True), squares.mean(found.inputs, keepdims=True)

    def init(params: Any) -> FactoredState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        row, column = (_map_named(lambda name, x, i=i: means(name, x)[i], zeros) for i in range(2))
        return FactoredState(jnp.int32(0), row, column)

    def update(grads: Any, state: FactoredState, params: Any = None) -> tuple[Any, FactoredState]:
        count = state.count + 1
        decay = jnp.minimum(1 - count.astype(jnp.float32) ** -0.8, b2)

        def move(name: str, g: Array, old: Array, which: int) -> Array:
            return decay * old + (1 - decay) * means(name, jnp.square(g) + eps**2)[which]

        def divide(name: str, g: Array, row: Array, column: Array) -> Array:
            found = matrix(name, g.ndim)
            over = row if found is None else row * column / row.mean(found.inputs, keepdims=True)
            direction = g * jax.lax.rsqrt(over)
            layer = tuple(range(int(_stacked(name)), g.ndim))
            size = jnp.sqrt(jnp.square(direction).mean(layer, keepdims=True))
            return direction / jnp.maximum(1, size)  # of one layer's leaf at most as long as Adam's

        row = _map_named(functools.partial(move, which=0), grads, state.row)
        column = _map_named(functools.partial(move, which=1), grads, state.column)
        return _map_named(divide, grads, row, column), FactoredState(count, row, column)

    second = optax.GradientTransformation(init, update)
    return optax.chain(second, optax.ema(b1, debias=False)) if b1 else second


OPTIMIZERS = {"adamw": adamw} | {
    name: functools.partial(_decoupled, rule)
    for name, rule in {"lion": _lion, "muon": _muon, "adafactor": _adafactor, "sgd": _sgd}.items()
}


def _stacked(name: str) -> bool:
    return "layers" in name.split(".")


def _size(leaf: Array, axes: tuple[int, ...]) -> int:
    return functools.reduce(lambda size, axis: size * leaf.shape[axis], axes, 1)


def _map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` of a function that takes a leaf's dotted name first."""
    return jax.tree.map_with_path(
        lambda path, *leaves: function(jax.tree_util.keystr(path, simple=True, separator="."), *leaves), tree, *rest
    )
