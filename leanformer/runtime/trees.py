"""Names of the leaves of trees."""

from typing import Any

import jax


def leaf_names(tree: Any) -> list[str]:
    """Return the dotted names of a tree's leaves, in the order of `jax.tree.leaves`."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def flatten_names(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by dotted name.

    >>> flatten_names({"blocks": {"kernel": 1, "bias": 2}})
    {'blocks.bias': 2, 'blocks.kernel': 1}
    """
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
