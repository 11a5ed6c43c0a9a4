"""AdamW, what it decays, when its moments are settled, and the names of leaves; all optimizers: `optimizers.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from leanformer.runtime.trees import leaf_names


def decay_mask(params: Any, no_decay: tuple[str, ...] = ()) -> Any:
    """True for the leaves that weight decay acts on: all but biases, norms' scales, shares of values and those named in
    `no_decay`.

    By name and not by number of axes, since the scan over layers stacks biases into matrices.
    """
    exempt = ("bias", "scale", "value_mix", *no_decay)
    flags = [name.rsplit(".", 1)[-1] not in exempt for name in leaf_names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def adamw(*, b1: float, b2: float, eps: float, weight_decay: float, mask: Any) -> optax.GradientTransformation:
    """AdamW's direction, decay included (Loshchilov & Hutter 2019); the step multiplies it by −learning rate.

    `update` takes `finite`, whether the moments move at all, and `b1` of this step where it is not always the same.
    """
    return optax.chain(_scale_by_adam(b1, b2, eps), optax.add_decayed_weights(weight_decay, mask))


def settled(new: Any) -> Any:
    """New moments or parameters that are done before others are made from them, where the compiler for CPUs would work
    those out from the old ones, and copy them for that. GPUs make them all in one kernel a leaf."""
    return jax.lax.platform_dependent(new, cpu=jax.lax.optimization_barrier, default=lambda new: new)


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_adam with `finite` and `b1` at each update. The bias is corrected as if `b1` had always been."""
    fixed = b1

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None, *, finite: Any = True, b1: Any = fixed
    ) -> tuple[Any, Any]:
        def blend(decay: Any, old: Array, new: Array) -> Array:
            return jnp.where(finite, decay * old + (1 - decay) * new, old)

        mu = jax.tree.map(lambda m, g: blend(b1, m, g), state.mu, grads)
        nu = jax.tree.map(lambda v, g: blend(b2, v, g * g), state.nu, grads)
        mu, nu = settled((mu, nu))
        count = state.count + 1
        first, second = 1 / (1 - b1**count), 1 / (1 - b2**count)
        direction = jax.tree.map(lambda m, v: first * m / (jnp.sqrt(second * v) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(jnp.where(finite, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(b1, b2, eps).init, update)
