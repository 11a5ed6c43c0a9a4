"""Dropout and stochastic depth, with one random key per example."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key


OF = 1 << 16  # resolution of dropout rates: 16 random bits per number


def dropout(x: Float[Array, "b *rest"], rate: float, key: Key[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Set each number to zero with probability `rate`, and divide the others by `keep_probability`.

    Each example has its own key, and the mask of a token does not depend on the number of tokens after it.

    Args:
        x: array with the leading axis B.
        rate: probability of zero, rounded to 16 bits.
        key: random keys, one per example (B); None returns `x` unchanged.
    """
    if key is None or not rate:
        return x
    keep = checkpoint_name(dropout_mask(key, x.shape[1:], rate), "dropout")
    return jnp.where(keep, x / keep_probability(rate), 0)


def dropout_mask(key: Key[Array, "b"], shape: tuple[int, ...], rate: float) -> Bool[Array, "b *rest"]:
    """Draw the dropout masks of a batch, B *shape, from one key per example; True for numbers that are kept.

    Args:
        key: random keys, one per example.
        shape: shape of the array of one example, without the batch axis.
        rate: probability of False, rounded to 16 bits.
    """
    *tokens, width = shape

    def draw(key: Key[Array, ""]) -> Bool[Array, "*rest"]:
        words = jax.random.bits(
            key, (*tokens, -(-width // 2)), jnp.uint32
        )  # two numbers per word: drawing bits dominates the cost
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*tokens, -1)[..., :width]
        return halves >= round(rate * OF)

    return jax.vmap(draw)(key)


def keep_probability(rate: float) -> float:
    """Return the exact probability with which `dropout` keeps a number: 1 − rate, rounded to 16 bits."""
    return 1 - round(rate * OF) / OF


def path_scales(key: Key[Array, "b"], rates: Float[np.ndarray, "l"], branches: int) -> Float[Array, "l {branches} b"]:
    """Draw the factor of each residual branch and example, L branches B: 0 with the layer's rate, else 1 / (1 − rate).

    Stochastic depth (Huang et al. 2016). Each example has its own key, so the result does not depend on the rest of the
    batch, on gradient accumulation or on the number of devices.

    Args:
        key: random keys, one per example (B).
        rates: stochastic-depth rate of each layer (L), below 1.
        branches: number of residual branches of a layer.
    """
    keep = 1 - jnp.asarray(rates)

    def draw(key: Key[Array, ""], keep: Float[Array, ""], index: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.bernoulli(jax.random.fold_in(key, index), keep) / keep

    index = jnp.arange(len(rates) * branches).reshape(len(rates), branches)
    over_examples = jax.vmap(draw, (0, None, None))
    return jax.vmap(jax.vmap(over_examples, (None, None, 0)), (None, 0, 0))(key, keep, index)


def drop_path(branch: Float[Array, "b *rest"], scale: Float[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Multiply a branch by its stochastic-depth factors from `path_scales`.

    Args:
        branch: output of a residual branch, with the leading axis B.
        scale: one factor per example (B); None returns the branch unchanged.
    """
    if scale is None:
        return branch
    return branch * scale.astype(branch.dtype).reshape(-1, *(1,) * (branch.ndim - 1))
