"""AdamW with decoupled weight decay, and the mask of decayed parameters. `optimizers.py` has all optimizers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from leanformer.runtime.trees import leaf_names


def decay_mask(params: Any, no_decay: tuple[str, ...] = ()) -> Any:
    """Return a tree with True for leaves with weight decay: all except biases, scales and `no_decay`.

    Leaves are selected by name and not by their number of axes, because the scan over layers stacks biases to matrices.

    Args:
        no_decay: last parts of further names without decay.
    """
    exempt = ("bias", "scale", *no_decay)
    flags = [name.rsplit(".", 1)[-1] not in exempt for name in leaf_names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def adamw(*, b1: float, b2: float, eps: float, weight_decay: float, mask: Any) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov & Hutter 2019) without learning rate.

    The step multiplies the direction, which includes weight decay, by -learning rate.
    `update` takes `finite`, False to leave the moments unchanged, and `b1` of this step if it is scheduled.
    """
    return optax.chain(_scale_by_adam(b1, b2, eps), optax.add_decayed_weights(weight_decay, mask))


def materialise_barrier(new: Any) -> Any:
    """Return new moments or parameters behind an optimisation barrier on CPUs.

    Without it XLA for CPUs recomputes them from the old values where they are used, and copies the old values for that.
    On GPUs all of them are computed in one kernel per leaf, without a barrier.
    """
    return jax.lax.platform_dependent(new, cpu=jax.lax.optimization_barrier, default=lambda new: new)


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return optax.scale_by_adam with `finite` and `b1` per update; bias correction assumes that `b1` was constant."""
    fixed = b1

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None, *, finite: Any = True, b1: Any = fixed
    ) -> tuple[Any, Any]:
        def blend(decay: Any, old: Array, new: Array) -> Array:
            return jnp.where(finite, decay * old + (1 - decay) * new, old)

        mu = jax.tree.map(lambda m, g: blend(b1, m, g), state.mu, grads)
        nu = jax.tree.map(lambda v, g: blend(b2, v, g * g), state.nu, grads)
        mu, nu = materialise_barrier((mu, nu))
        count = state.count + 1
        first, second = 1 / (1 - b1**count), 1 / (1 - b2**count)
        direction = jax.tree.map(lambda m, v: first * m / (jnp.sqrt(second * v) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(jnp.where(finite, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(b1, b2, eps).init, update)
