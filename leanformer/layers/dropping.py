"""What training drops at random: single numbers, and whole residual branches; each example by a key of its own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key


OF = 1 << 16  # numbers that are drawn


def dropout(x: Float[Array, "b *rest"], rate: float, key: Key[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Zeroes each number with probability `rate`, to 16 bits, else divides it by 1 − rate; x itself without a key.

    Each example has its own key, and what a token loses does not depend on how many tokens come after it.
    """
    if key is None or not rate:
        return x
    kept = checkpoint_name(drawn(key, x.shape[1:], rate), "dropout")
    return jnp.where(kept, x / share_kept(rate), 0)


def drawn(key: Key[Array, "b"], shape: tuple[int, ...], rate: float) -> Bool[Array, "b *rest"]:
    """Which numbers of arrays of a shape, one an example, `dropout` leaves."""
    *tokens, width = shape

    def draw(key: Key[Array, ""]) -> Bool[Array, "*rest"]:
        words = jax.random.bits(key, (*tokens, -(-width // 2)), jnp.uint32)  # two numbers each: bits cost most here
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*tokens, -1)[..., :width]
        return halves >= round(rate * OF)

    return jax.vmap(draw)(key)


def share_kept(rate: float) -> float:
    """Of numbers, on average, exactly."""
    return 1 - round(rate * OF) / OF


def path_scales(key: Key[Array, "b"], rates: Float[np.ndarray, "l"], branches: int) -> Float[Array, "l {branches} b"]:
    """What each example's residual branches are multiplied by: 0 with a layer's rate, else 1 / (1 − rate).

    Stochastic depth (Huang et al. 2016). Each example has its own key, so what is dropped does not depend on its
    batch mates, on gradient accumulation or on the number of devices.
    """
    keep = 1 - jnp.asarray(rates)

    def draw(key: Key[Array, ""], keep: Float[Array, ""], index: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.bernoulli(jax.random.fold_in(key, index), keep) / keep

    index = jnp.arange(len(rates) * branches).reshape(len(rates), branches)
    over_examples = jax.vmap(draw, (0, None, None))
    return jax.vmap(jax.vmap(over_examples, (None, None, 0)), (None, 0, 0))(key, keep, index)


def drop_path(branch: Float[Array, "b *rest"], scale: Float[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Multiplies each example's branch by its scale; None leaves it as it is."""
    if scale is None:
        return branch
    return branch * scale.astype(branch.dtype).reshape(-1, *(1,) * (branch.ndim - 1))
