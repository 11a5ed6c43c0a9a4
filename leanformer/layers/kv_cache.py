"""Key/value cache of causal attention, for decoding token by token.

An attention module allocates its cache (`empty_cache`), `Stack` adds the axis of layers, and `models.gpt` passes it to
each call in a `context.Context`. The cache holds the arrays of the module's `projections`: keys and values B S K H, or
the latents of latent attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from leanformer.layers.masks import Mask


def empty(batch: int, size: int, projection: Any) -> Float[Array, "b s k h"]:
    """Return a cache of zeros for the outputs of a projection, B S K H in the dtype of the projection.

    Args:
        batch: B, number of rows.
        size: S, number of tokens.
        projection: `nnx.LinearGeneral` from tokens to (heads, channels), that is (K, H).
    """
    return jnp.zeros((batch, size, *projection.out_features), projection.dtype)


def extend(cache: dict[str, Array], new: dict[str, Array], mask: Mask) -> dict[str, Array]:
    """Return the cache with new tokens, written from the mask's offset on. The caller ensures that they fit.

    Args:
        cache: arrays by name, with axes B S ...
        new: arrays of the new tokens by the same names, B T ...
        mask: causal mask whose offset is the number of tokens in the cache.

    Raises:
        ValueError: the mask is not causal or has no offset, so that empty positions would be visible.
    """
    if not mask.causal or mask.offset is None:
        raise ValueError("A cache requires a causal mask with an offset, which hides its empty positions.")
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=mask.offset, axis=1)
    return {name: write(old, new[name].astype(old.dtype)) for name, old in cache.items()}
