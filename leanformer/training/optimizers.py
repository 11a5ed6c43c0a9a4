"""Optimizers by name, and the schedules of their rates.

All have decoupled weight decay. `update` also takes this step's `b1`, which only AdamW uses; the training step
multiplies the result by -learning rate.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Real
from ml_collections import ConfigDict

from leanformer.errors import ConfigError


# Remaining fraction of the decay from the peak to the final learning rate, by the progress of the decay from 0 to 1.
SCHEDULES = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": jnp.ones_like,
}
# Number of input axes of a kernel, after the axis of layers, by the last two parts of its name.
INPUTS = {
    **{f"{name}{up}.kernel": 1 for name in ("query", "key", "value") for up in ("", "_up")},  # D N H, R N H
    "weights.kernel": 1,  # outlook attention: D N 9 9
    "out.kernel": 2,  # N H D
}


def learning_rate(
    step: Real[Array, ""] | int,
    *,
    lr: float,
    warmup_lr: float,
    final_lr: float,
    warmup: int,
    total: int,
    schedule: str = "cosine",
) -> Float[Array, ""]:
    """Return the rate at a step: linear warm-up from `warmup_lr` to `lr`, then decay to `final_lr` at `total`."""
    step = jnp.asarray(step, jnp.float32)
    rising = warmup_lr + (lr - warmup_lr) * step / (warmup or 1)
    progress = jnp.clip((step - warmup) / ((total - warmup) or 1), 0, 1)
    falling = final_lr + (lr - final_lr) * SCHEDULES[schedule](progress)
    return jnp.where(step < warmup, rising, falling)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Function from a step to (learning rate, beta1)."""

    warmup: int  # steps
    learning_rate: Callable[[Any], Array]
    b1: Callable[[Any], Any]  # one cycle from b1 to b1_peak in the warm-up, and back; constant without b1_peak

    def __call__(self, step: Any) -> tuple[Array, Any]:
        return self.learning_rate(step), self.b1(step)


def make_schedule(config: ConfigDict, *, examples: int | None, total: int) -> Schedule:
    """Return the schedule of a run of `total` steps, with `examples` per epoch; None if the data are unlimited.

    Raises ConfigError if the warm-up is as long as the run, or in epochs of unlimited data.
    """
    optim = config.optim
    if optim.warmup_epochs and examples is None:
        raise ConfigError(
            f"optim.warmup_epochs={optim.warmup_epochs}: the training data are unlimited and have no epochs. Set "
            "--config.optim.warmup_epochs=0 and --config.optim.warmup_steps."
        )
    warmup = optim.warmup_steps or round(optim.warmup_epochs * (examples or 0) / config.batch_size)
    if optim.warmup_share:
        warmup = round(optim.warmup_share * total)
    if warmup and warmup >= total:
        names = ("warmup_epochs", "warmup_steps", "warmup_share")
        keys = ", ".join(f"optim.{name}={optim[name]}" for name in names if optim[name])
        raise ConfigError(
            f"{keys}: the warm-up has {warmup} steps, but the whole run only {total}. Shorten the warm-up or lengthen "
            "the run."
        )
    plan = {name: optim[name] for name in ("lr", "warmup_lr", "final_lr", "schedule")}
    rate = functools.partial(learning_rate, **plan, warmup=warmup, total=total)
    if optim.b1_peak is None:
        return Schedule(warmup, rate, lambda _: optim.b1)
    cycle = {"lr": optim.b1_peak, "warmup_lr": optim.b1, "final_lr": optim.b1, "schedule": "linear"}
    return Schedule(warmup, rate, functools.partial(learning_rate, **cycle, warmup=warmup, total=total))


def decay_mask(params: Any, no_decay: tuple[str, ...] = ()) -> Any:
    """Return a tree like `params` with True for leaves with weight decay: all but biases, scales and `no_decay`.

    Leaves are selected by the last parts of their names, and not by their number of axes, because the scan over layers
    stacks biases to matrices. Only `temperature` is selected by axes: timm and DeiT exempt vectors, so one factor per
    head (N) has no weight decay; XCiT's (N 1 1) has it in the published training.
    """
    exempt = ("bias", "scale", *no_decay)

    def decays(name: str, leaf: Any) -> bool:
        last = name.rsplit(".", 1)[-1]
        return last not in exempt and not (last == "temperature" and leaf.ndim == 1 + is_stacked(name))

    return _map_named(decays, params)


def matrix(name: str, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the input and the output axes of a matmul's weight, whose other axes enumerate matrices, or None."""
    *_, module, leaf = ("", *name.split("."))
    layers = int(is_stacked(name))
    by_axes = {2: 1, 4: 3}.get(ndim - layers)  # D F, or k k C D of a convolution; depthwise (k k D) has no matrix
    inputs = INPUTS.get(f"{module}.{leaf}", by_axes)
    if leaf != "kernel" or inputs is None:
        return None
    return tuple(range(layers, layers + inputs)), tuple(range(layers + inputs, ndim))


def _make(
    rule: Callable[..., optax.GradientTransformation], *, weight_decay: float, mask: Any, **settings: float
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a rule (b1, b2, eps), with decoupled weight decay (Loshchilov & Hutter 2019)."""
    direction = optax.with_extra_args_support(rule(**settings))
    return optax.chain(direction, optax.add_decayed_weights(weight_decay, mask))


def _adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return optax.scale_by_adam whose `update` can replace b1; bias correction assumes that b1 was constant."""
    fixed = b1

    def update(grads: Any, state: Any, params: Any = None, *, b1: Any = fixed, **_: Any) -> tuple[Any, Any]:
        return optax.scale_by_adam(b1, b2, eps).update(grads, state, params)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(b1, b2, eps).init, update)  # ty: ignore[invalid-argument-type] - optax's protocol fixes names of arguments


def _muon(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Return Muon for matrices inside stacks, and Adam for all other leaves, such as embeddings and the head.

    Muon is momentum `b1` with all singular values set close to 1 (Jordan et al. 2024, Muon: An optimizer for hidden
    layers in neural networks). The matrix of each layer is treated separately, and queries, keys and values are three
    matrices of D x NH. A direction of R x C is scaled by 0.2 sqrt(max(R, C)) to the size of Adam's, so that both have
    the same learning rate (Liu et al. 2025, Muon is Scalable for LLM Training).
    """

    def select(name: str, leaf: Array) -> str:
        return "muon" if is_stacked(name) and matrix(name, leaf.ndim) else "adam"

    def get_axes(name: str, leaf: Array) -> optax.contrib.MuonDimensionNumbers:
        axes: Any = matrix(name, leaf.ndim)
        return optax.contrib.MuonDimensionNumbers(*axes)

    def scale(name: str, direction: Array) -> Array:
        axes: Any = matrix(name, direction.ndim)
        longest = max(math.prod(direction.shape[i] for i in side) for side in axes)
        return 0.2 * longest**0.5 * direction

    orthogonal = optax.contrib.scale_by_muon(
        beta=b1, eps=eps, weight_dimension_numbers=functools.partial(_map_named, get_axes)
    )
    scaled = optax.stateless(lambda updates, _: _map_named(scale, updates))
    rules: dict[Any, Any] = {"muon": optax.chain(orthogonal, scaled), "adam": optax.scale_by_adam(b1, b2, eps)}
    return optax.partition(rules, functools.partial(_map_named, select))


RULES: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adam,
    "muon": _muon,
    "sgd": lambda b1, b2, eps: optax.trace(b1),  # heavy-ball momentum, without a second moment
}
# Functions (b1, b2, eps, weight_decay, mask) -> optimizer without learning rate, whose `update` takes b1; `mask` is
# True for the leaves with weight decay.
OPTIMIZERS = {name: functools.partial(_make, rule) for name, rule in RULES.items()}


def is_stacked(name: str) -> bool:
    """Return whether the parameter of a dotted name is stacked over layers, so that its first axis is L."""
    return "layers" in name.split(".")


def split_layer(name: str) -> tuple[str, int, str]:
    """Return (name of the stack, index of its first layer, rest of the name) of a stacked parameter's dotted name.

    The index is above 0 for layers of a later group of equal layers (`stack.Groups`).

    >>> split_layer("blocks.layers.from4.mlp.up.kernel")
    ('blocks.layers', 4, 'mlp.up.kernel')
    """
    before, _, after = name.partition(".layers.")
    group, _, rest = after.partition(".")
    first = re.fullmatch(r"from(\d+)", group)
    return f"{before}.layers", int(first[1]) if first else 0, rest if first else after


def _map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Map a function of a leaf's dotted name and the leaf over a tree."""
    return jax.tree.map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="."), leaf), tree
    )
