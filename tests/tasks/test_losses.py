"""Losses and ranks against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from messages import refuses

from leanformer.tasks.classification import classify, rank_of_label


B, V = 5, 7
# Logits are below 20 and rounded to float32 at each of some ten operations: 10 x 20 x 6e-8. Omitting one of seven terms
# changes a sum by 0.01 or more.
CLOSE = {"rtol": 1e-5, "atol": 1.2e-5}


@pytest.fixture
def logits(rng):
    return np.float32(4 * rng.standard_normal((B, V)))


@pytest.fixture
def targets(rng):
    x = rng.random((B, V))
    return np.float32(x / x.sum(-1, keepdims=True))


def test_losses_equal_numpy(logits, targets):
    p = np.exp(logits.astype(np.float64))
    expected = -(targets * np.log(p / p.sum(-1, keepdims=True))).sum(-1)
    np.testing.assert_allclose(classify(jnp.asarray(logits), jnp.asarray(targets), "softmax"), expected, **CLOSE)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(-1)
    np.testing.assert_allclose(classify(jnp.asarray(logits), jnp.asarray(targets), "sigmoid"), expected, **CLOSE)


def test_bfloat16_logits_are_computed_in_float32(logits, targets):
    rounded = jnp.asarray(logits, jnp.bfloat16)
    result = classify(rounded, jnp.asarray(targets), "softmax")
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, classify(rounded.astype(jnp.float32), jnp.asarray(targets), "softmax"))
    with refuses("softmax, sigmoid", error=ValueError):
        classify(jnp.asarray(logits), jnp.asarray(targets), "hinge")


def test_rank_is_the_position_in_sorted_order(logits):
    labels = np.arange(B) % V
    expected = [int(np.flatnonzero(np.argsort(-row) == label)[0]) for row, label in zip(logits, labels, strict=True)]
    np.testing.assert_array_equal(rank_of_label(jnp.asarray(logits), jnp.asarray(labels)), expected)


def test_tied_or_nan_logits_are_never_correct():
    labels = jnp.arange(3)
    assert (rank_of_label(jnp.zeros((3, V)), labels) == V - 1).all()
    assert (rank_of_label(jnp.full((3, V), jnp.nan), labels) >= V - 1).all()
    one_nan = jnp.zeros((3, V)).at[:, 5].set(jnp.nan).at[jnp.arange(3), labels].set(1.0)
    assert (rank_of_label(one_nan, labels) == 1).all()
