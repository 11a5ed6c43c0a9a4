"""How far two programs that compute the same may be apart: gradients of small models in float32, leaf by leaf."""

import jax
import numpy as np

from leanformer.runtime.trees import leaf_names


# Float32 rounds each operation by u = 6e-8 at most. Two programs add the terms of a sum in another order; a gradient
# sums n = 8 examples x 24 tokens = 200 terms, whose rounding is about sqrt(n) u, and at most n u, of the sum of their
# sizes. Ten such sums follow one another, forth and back through two layers, and terms cancel to a tenth of their
# sizes: 10 x 10 x sqrt(200) u = 8e-5 of a leaf's norm. What cancels to zero, as the gradient of the keys' bias does,
# is left with rounding of the others' size: sqrt(n) u = 1e-6 of the norm of all.
LEAF, WHOLE = 2e-4, 2e-6
LOSS = 1e-5  # relative: a mean over examples of what some ten sums have made, 10 sqrt(n) u


def by_name(tree):
    """Return a tree's leaves by their dotted names."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def norm(leaves):
    """Return the Euclidean norm of all leaves together, in float64."""
    return np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves.values()))


def distance(a, b):
    """Return the norm of the difference of leaves by name."""
    assert a.keys() == b.keys()
    return norm({name: np.subtract(a[name], b[name], dtype=np.float64) for name in b})


def check_gradients(found, expected):
    """Assert that two gradients by name differ by rounding alone."""
    whole = norm(expected)
    for name, value in expected.items():
        error = distance({name: found[name]}, {name: value})
        allowed = LEAF * norm({name: value}) + WHOLE * whole
        assert error <= allowed, f"{name}: {error / whole:.1e} of the gradient's norm, allowed {allowed / whole:.1e}"
    assert found.keys() == expected.keys()
