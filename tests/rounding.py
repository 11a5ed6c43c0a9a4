"""Tolerances for rounding: gradients and losses of small float32 models from two programs that compute the same."""

import numpy as np


# Float32 rounds each operation by at most u = 6e-8. Two programs may add the terms of a sum in different orders. A
# gradient sums n = 8 examples x 24 tokens = 200 terms; the rounding error is about sqrt(n) u, and at most n u, of the
# sum of their magnitudes. Forward and backward through two layers there are ten such sums in sequence, and terms cancel
# to a tenth of their magnitude: 10 x 10 x sqrt(200) u = 8e-5 of a leaf's norm. Gradients that cancel to zero, such as
# the key bias's, keep the rounding error of the other leaves: sqrt(n) u = 1e-6 of the norm of all leaves.
LEAF_TOLERANCE, TOTAL_TOLERANCE = 2e-4, 2e-6
LOSS_TOLERANCE = 1e-5  # relative: a mean over examples of results of about ten sums each, 10 sqrt(n) u


def global_norm(leaves):
    """Return the joint Euclidean norm of all leaves, in float64."""
    return np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves.values()))


def difference_norm(a, b):
    """Return the norm of the difference of two dictionaries of leaves."""
    assert a.keys() == b.keys()
    return global_norm({name: np.subtract(a[name], b[name], dtype=np.float64) for name in b})


def check_gradients(gradients, expected):
    """Assert that two gradients (dictionaries of leaves) differ only by rounding."""
    total = global_norm(expected)
    for name, value in expected.items():
        error = difference_norm({name: gradients[name]}, {name: value})
        allowed = LEAF_TOLERANCE * global_norm({name: value}) + TOTAL_TOLERANCE * total
        assert error <= allowed, f"{name}: {error / total:.1e} of the gradient's norm, allowed {allowed / total:.1e}"
    assert gradients.keys() == expected.keys()
