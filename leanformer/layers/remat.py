"""What the backward pass computes again of a layer, and what the forward pass keeps for it."""

import functools
from typing import Any

import jax

from leanformer.layers.attention import ATTENDED


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether it is cuDNN's forward kernel, whose output and sums its gradient reads; JAX gives them no names."""
    return primitive.name.startswith("dot_product_attention_fwd")


# What the backward pass computes again, by what the forward pass keeps. "light" keeps the products with weights, what
# attention's gradient reads and what dropout drew, and computes again what costs little next to moving it through
# memory: norms, GELU and, without a fused kernel, the T x S attention matrix.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "light": functools.reduce(
        jax.checkpoint_policies.save_from_both_policies,
        (
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("dropout", ATTENDED),
            _fused_attention,
        ),
    ),
    "block": jax.checkpoint_policies.nothing_saveable,
}
