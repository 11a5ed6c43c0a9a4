"""Digests per layer, with flags instead of NaN: non-finite values, one token, one head, equal tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.conditioning import ACTIVATIONS, digest, tap
from leanformer.conditioning.spectrum import FLOOR, Summary, condition


BATCH, TOKENS, WIDTH, MLP_DIM, HEADS, HEAD_DIM = 3, 17, 23, 29, 3, 5
measure = jax.jit(tap(ACTIVATIONS))  # one program for each number of tokens and heads


def make_arrays(rng, tokens, heads):
    """Return Gaussian arrays as a block passes them to a tap."""
    wide = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (tokens, WIDTH))
    shapes = wide | {"hidden": (tokens, MLP_DIM)} | dict.fromkeys(("q", "k", "v", "out"), (tokens, heads, HEAD_DIM))
    return {n: jnp.asarray(rng.standard_normal((BATCH, *s)), jnp.float32) for n, s in shapes.items()}


def compute_digests(arrays):
    """Return all measures and their digests of one layer; check that neither contains NaN, which JSON forbids."""
    result = measure(arrays)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(result))
    layers = {name: digest(jax.tree.map(lambda x: x[None], value)) for name, value in result.items()}
    json.dumps(layers, allow_nan=False)
    return result, {name: layer for name, (layer,) in layers.items()}


def list_summaries(measures):
    return [name for name, value in measures.items() if isinstance(value, Summary)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_activations_are_flagged_per_example(rng, bad):
    arrays = make_arrays(rng, TOKENS, HEADS)
    clean, _ = compute_digests(arrays)
    result, layers = compute_digests({name: x.at[(1, *[0] * (x.ndim - 1))].set(bad) for name, x in arrays.items()})
    for name, layer in layers.items():
        assert layer["not_finite"] > 0, name
        assert layer["flags"], name
        assert layer["median"] is not None
        assert result[name].valid[np.array([0, 2])].all()
        assert not np.all(result[name].valid[1])
        for a, b in zip(jax.tree.leaves(clean[name]), jax.tree.leaves(result[name]), strict=True):
            np.testing.assert_array_equal(a[np.array([0, 2])], b[np.array([0, 2])])


def test_all_values_non_finite(rng):
    _, layers = compute_digests({name: jnp.full_like(x, np.nan) for name, x in make_arrays(rng, TOKENS, HEADS).items()})
    for layer in layers.values():
        assert layer["median"] is None
        assert layer["not_finite"] == layer["count"]
        assert layer["flags"]


def test_single_token_is_flagged(rng):
    result, layers = compute_digests(make_arrays(rng, 1, HEADS))
    for name in list_summaries(result):
        assert layers[name]["median"] == 1
        assert len(layers[name]["flags"]) == 1
    assert layers["head_correlation"]["flags"]


def test_single_head_has_no_head_correlation(rng):
    result, layers = compute_digests(make_arrays(rng, TOKENS, 1))
    assert len(layers["head_correlation"]["flags"]) == 1
    assert layers["head_correlation"]["median"] is None
    np.testing.assert_array_equal(
        result["attention_output"].condition_number, result["head_output"].condition_number[:, 0]
    )
    assert not layers["attention_output"]["flags"]


def test_equal_tokens_are_singular(rng):
    equal = {name: jnp.repeat(x[:, :1], TOKENS, axis=1) for name, x in make_arrays(rng, TOKENS, HEADS).items()}
    del equal["block"]
    result, layers = compute_digests(equal | {"block": 2 * equal["tokens"]})
    for name in list_summaries(result):
        assert layers[name]["flags"], name
        assert layers[name]["singular"] == layers[name]["count"]
        np.testing.assert_allclose(layers[name]["median"], 1 / FLOOR, rtol=1e-6)
    assert layers["head_correlation"]["flags"]
    np.testing.assert_allclose(layers["attention_entropy"]["median"], np.log(TOKENS), rtol=1e-5)


def test_digest_covers_examples_and_heads_per_layer(rng):
    x = rng.standard_normal((2, BATCH, HEADS, 11, 7)).astype(np.float32)
    x[0, 0, 0, 1] = x[0, 0, 0, 0] = 0
    x[1, 0, 0] = np.nan
    x[1, 0, 1, :, 3] = x[1, 0, 1, :, 2]
    first, second = digest(condition(x))
    s = np.linalg.svd(x[0].astype(np.float64), compute_uv=False)
    kappa = s[..., 0] / s[..., -1]
    np.testing.assert_allclose([first[k] for k in ("q10", "median", "q90")], np.quantile(kappa, (0.1, 0.5, 0.9)), 1e-4)
    assert first["shape"] == [11, 7]
    assert first["count"] == 9
    assert first["flags"] == []
    assert (second["not_finite"], second["singular"], second["negligible"], len(second["flags"])) == (1, 1, 1, 2)
