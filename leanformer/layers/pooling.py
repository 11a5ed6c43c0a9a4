"""Pooling of tokens to one vector per sequence."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from leanformer.layers.masks import Mask


def mean_pool(x: Float[Array, "b t d"], lengths: Int[Array, "b"] | None) -> Float[Array, "b d"]:
    """Return the mean over the valid tokens of each row, (B D); over all tokens if `lengths` is None."""
    if lengths is None:
        return x.mean(axis=1)
    valid = Mask(lengths=lengths).valid_tokens(x.shape[1])[..., None]
    return jnp.where(valid, x, 0).sum(axis=1) / lengths[:, None].astype(x.dtype)
