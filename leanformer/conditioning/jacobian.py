"""Conditioning of the Jacobian of the loss or of the outputs with respect to each block's parameters.

Its squared singular values are the eigenvalues of the empirical neural tangent kernel restricted to one block (Jacot et
al. 2018). They are computed from the Jacobian itself, since the kernel J Jᵀ would square the condition number.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from leanformer.conditioning.spectrum import Summary, singular_values, summarise


def block_jacobian(function: Callable[[Any, Any], Array], blocks: Any, examples: Any) -> Summary:
    """Return condition numbers of each block's Jacobian J, (B·V) x P: rows are outputs of examples, columns parameters.

    Cost: B·V backward passes, V at a time, and B·V times the parameters of all blocks in memory, briefly twice that
    (8 losses of a 12-layer ViT-B: 2.7 GB). Then a QR per parameter array, 2 (B·V)² flops per parameter.
    Float32 resolves about min(B·V, P) directions if the examples differ: equal examples make J singular.

    Args:
        function: function (blocks, example) -> loss of the example, shape () with V = 1, or its outputs (V,).
        blocks: parameters of the stacked blocks, leading axis L on every leaf.
        examples: pytree of examples with leading axis B.

    Returns:
        The summary of each block's Jacobian, with axis L.

    Raises:
        ValueError: there are no examples.
    """
    if not len(jax.tree.leaves(examples)[0]):
        raise ValueError("block_jacobian needs at least one example.")

    def rows(example: Any) -> Any:
        return jax.jacrev(lambda b: jnp.atleast_1d(function(b, example)).astype(jnp.float32))(blocks)

    def reduced(leaf: Float[Array, "b v l *p"]) -> Float[Array, "l r bv"]:
        by_layer = jnp.moveaxis(leaf, 2, 0).astype(jnp.float32)  # L B V ...
        transposed = by_layer.reshape(by_layer.shape[0], leaf.shape[0] * leaf.shape[1], -1).mT  # L P B·V
        with jax.enable_x64(True):  # float64, as in singular_values
            return jnp.linalg.qr(transposed.astype(jnp.float64), mode="r").astype(jnp.float32)

    leaves = jax.tree.leaves(jax.lax.map(rows, examples))
    count = sum(leaf[0, 0, 0].size for leaf in leaves)
    # QR of each leaf, then of the stacked factors, has the singular values of all columns concatenated.
    factors = jnp.concatenate([reduced(leaf) for leaf in leaves], axis=-2)
    return summarise(singular_values(factors), (leaves[0].shape[0] * leaves[0].shape[1], count))
