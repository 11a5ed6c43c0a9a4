"""Digests per layer, and flags instead of NaN: bad numbers, one token, one head, equal tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.conditioning import ACTIVATIONS, digest, tap
from leanformer.conditioning.spectrum import FLOOR, Summary, condition


BATCH, TOKENS, WIDTH, MLP_DIM, HEADS, HEAD_DIM = 3, 17, 23, 29, 3, 5
measured = jax.jit(tap(ACTIVATIONS))  # one program for each number of tokens and heads


def block(rng, tokens, heads):
    """Arrays as a block hands them to a tap, Gaussian."""
    wide = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (tokens, WIDTH))
    shapes = wide | {"hidden": (tokens, MLP_DIM)} | dict.fromkeys(("q", "k", "v", "out"), (tokens, heads, HEAD_DIM))
    return {n: jnp.asarray(rng.standard_normal((BATCH, *s)), jnp.float32) for n, s in shapes.items()}


def read(arrays):
    """Digests of all measures, one layer, and that no NaN is in them; JSON forbids it too."""
    result = measured(arrays)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(result))
    layers = {name: digest(jax.tree.map(lambda x: x[None], value)) for name, value in result.items()}
    json.dumps(layers, allow_nan=False)
    return result, {name: layer for name, (layer,) in layers.items()}


def matrices(found):
    return [name for name, value in found.items() if isinstance(value, Summary)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_activations(rng, bad):
    arrays = block(rng, TOKENS, HEADS)
    clean, _ = read(arrays)
    result, layers = read({name: x.at[(1, *[0] * (x.ndim - 1))].set(bad) for name, x in arrays.items()})
    for name, layer in layers.items():
        assert layer["not_finite"] > 0, name
        assert layer["flags"], name
        assert layer["median"] is not None
        assert result[name].valid[np.array([0, 2])].all()
        assert not np.all(result[name].valid[1])
        for a, b in zip(jax.tree.leaves(clean[name]), jax.tree.leaves(result[name]), strict=True):
            np.testing.assert_array_equal(a[np.array([0, 2])], b[np.array([0, 2])])


def test_nothing_finite_at_all(rng):
    _, layers = read({name: jnp.full_like(x, np.nan) for name, x in block(rng, TOKENS, HEADS).items()})
    for layer in layers.values():
        assert layer["median"] is None
        assert layer["not_finite"] == layer["count"]
        assert layer["flags"]


def test_a_single_token(rng):
    result, layers = read(block(rng, 1, HEADS))
    for name in matrices(result):
        assert layers[name]["median"] == 1
        assert len(layers[name]["flags"]) == 1
    assert layers["head_correlation"]["flags"]


def test_one_head(rng):
    result, layers = read(block(rng, TOKENS, 1))
    assert len(layers["head_correlation"]["flags"]) == 1
    assert layers["head_correlation"]["median"] is None
    np.testing.assert_array_equal(
        result["attention_output"].condition_number, result["head_output"].condition_number[:, 0]
    )
    assert not layers["attention_output"]["flags"]


def test_all_tokens_equal(rng):
    equal = {name: jnp.repeat(x[:, :1], TOKENS, axis=1) for name, x in block(rng, TOKENS, HEADS).items()}
    del equal["block"]
    result, layers = read(equal | {"block": 2 * equal["tokens"]})
    for name in matrices(result):
        assert layers[name]["flags"], name
        assert layers[name]["singular"] == layers[name]["count"]
        np.testing.assert_allclose(layers[name]["median"], 1 / FLOOR, rtol=1e-6)
    assert layers["head_correlation"]["flags"]
    np.testing.assert_allclose(layers["attention_entropy"]["median"], np.log(TOKENS), rtol=1e-5)


def test_measures_do_not_depend_on_order_of_tokens_or_rotation_of_features(rng):
    arrays = block(rng, TOKENS, HEADS)
    arrays["q"] *= 3  # near uniform attention is ill-conditioned, and κ no better than κ times rounding
    order = rng.permutation(TOKENS)
    turn = {
        n: jnp.asarray(np.linalg.qr(rng.standard_normal((n, n)))[0], jnp.float32) for n in (HEAD_DIM, WIDTH, MLP_DIM)
    }
    plain = measured(arrays)
    permuted = measured({name: x[:, order] for name, x in arrays.items()})
    turned = measured({name: x @ turn[x.shape[-1]] for name, x in arrays.items()})
    for other in (permuted, turned):
        for name, value in plain.items():
            # Rounding of the entries, 32 of them in a row at most, and what κ makes of it.
            worst = max(10, *np.ravel(value.condition_number)) if isinstance(value, Summary) else 100
            for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(other[name]), strict=True):
                np.testing.assert_allclose(a, b, rtol=32 * np.finfo(np.float32).eps * worst, err_msg=name)


def test_digest_is_per_layer_over_examples_and_heads(rng):
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
