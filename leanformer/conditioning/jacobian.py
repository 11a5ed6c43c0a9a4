"""Conditioning of the Jacobian of the loss, or of the outputs, with respect to each block's parameters.

Its squared singular values are the eigenvalues of the empirical neural tangent kernel restricted to one block (Jacot et
al. 2018). They are taken from the Jacobian itself: the kernel J Jᵀ would square the condition number.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from leanformer.conditioning.spectrum import Summary, singular_values, summarise


def block_jacobian(function: Callable[[Any, Any], Array], blocks: Any, examples: Any) -> Summary:
    """Condition numbers of each block's Jacobian J, (B·V) x P: rows are outputs of examples, columns its parameters.

    Cost: B·V backward passes, V at a time, and B·V times the parameters of all blocks in memory, twice for a moment
    (8 losses of a 12-layer ViT-B: 2.7 GB); then a QR for each parameter array, 2 (B·V)² flops for each parameter.
    Float32 tells about min(B·V, P) directions apart as long as they differ: equal examples make J singular.

    Args:
        function: (blocks, example) to the example's loss (), V = 1, or to its outputs (V,).
        blocks: parameters of the stacked blocks, leading axis L on every leaf.
        examples: pytree with leading axis B.

    Returns:
        A summary with axis L.
    """

    def rows(example: Any) -> Any:
        return jax.jacrev(lambda b: jnp.atleast_1d(function(b, example)).astype(jnp.float32))(blocks)

    def reduced(leaf: Float[Array, "b v l *p"]) -> Float[Array, "l r bv"]:
        by_layer = jnp.moveaxis(leaf, 2, 0).astype(jnp.float32)  # L B V ...
        transposed = by_layer.reshape(by_layer.shape[0], leaf.shape[0] * leaf.shape[1], -1).mT  # L P B·V
        with jax.enable_x64(True):  # as the singular values are
            return jnp.linalg.qr(transposed.astype(jnp.float64), mode="r").astype(jnp.float32)

    leaves = jax.tree.leaves(jax.lax.map(rows, examples))
    count = sum(leaf[0, 0, 0].size for leaf in leaves)
    # QR of the leaves, then of their stacked factors: the singular values of all the columns beside one another.
    factors = jnp.concatenate([reduced(leaf) for leaf in leaves], axis=-2)
    return summarise(singular_values(factors), (leaves[0].shape[0] * leaves[0].shape[1], count))
