"""Nyström attention against its three matrices in float64 NumPy, one example at a time and without padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx
from random_weights import fill_weights

from leanformer import models
from leanformer.conditioning import singular_values, tap
from leanformer.layers import nystrom
from leanformer.layers.attention import attend
from leanformer.layers.masks import Context, Mask
from leanformer.layers.multihead import MultiHeadAttention


B, T, D, N, H, V, M, TAPS = 3, 29, 17, 2, 5, 3, 7, 11
softmax = functools.partial(scipy.special.softmax, axis=-1)
LENGTHS = np.array([29, 13, 5])  # all tokens; not a multiple of the landmarks; fewer tokens than landmarks


def iterate_pseudo_inverse(a, iterations, c):
    z, eye = a.T / c, np.eye(len(a))
    for _ in range(iterations):
        p = a @ z
        z = z @ (13 * eye - 15 * p + 7 * p @ p - p @ p @ p) / 4
    return z


def average_landmarks(x, number):
    n = len(x)
    number = min(n, number)
    return np.stack([np.mean([x[t] for t in range(n) if t * number // n == i], axis=0) for i in range(number)])


def apply_three_matrices(q, k, v, number):  # T H, one head
    q_m, k_m = average_landmarks(q, number), average_landmarks(k, number)
    f1, f2, f3 = (softmax(a @ b.T / np.sqrt(q.shape[1])) for a, b in ((q, k_m), (q_m, k_m), (q_m, k)))
    return f1 @ iterate_pseudo_inverse(f2, 6, f2.sum(0).max() * f2.sum(1).max()) @ f3 @ v


def reference(module, x):
    """Return the module's output for one example without padding, x: T D."""
    w = {name: np.float64(getattr(module, name).kernel[...]) for name in ("query", "key", "value", "out")}
    b = {name: np.float64(getattr(module, name).bias[...]) for name in w}
    q, k, v = (np.einsum("td,dnh->nth", x, w[name]) + b[name][:, None] for name in ("query", "key", "value"))
    heads = np.stack([apply_three_matrices(*qkv, module.landmarks) for qkv in zip(q, k, v, strict=True)])
    if hasattr(module, "skip"):
        taps = np.float64(module.skip[...])
        for n, h in np.ndindex(heads.shape[0], heads.shape[2]):
            heads[n, :, h] += np.convolve(v[n, :, h], taps[::-1, n], "full")[len(taps) // 2 :][: len(x)]
    return np.einsum("nth,nhd->td", heads, w["out"]) + b["out"]


def sharpen_attention(module, rng):
    """Set queries and keys so large that attention is far from uniform, and non-zero biases."""
    for part, scale in ((module.query, 0.5), (module.key, 0.5), (module.value, 0.3), (module.out, 0.3)):
        part.kernel[...] = jnp.asarray(scale * rng.standard_normal(part.kernel.shape), jnp.float32)
        part.bias[...] = jnp.asarray(0.2 * rng.standard_normal(part.bias.shape), jnp.float32)
    return module


def make_attention(rng, **changes):
    arguments = {"landmarks": M, "convolution": TAPS} | changes
    module = fill_weights(lambda: nystrom.NystromAttention(D, N, H, V, **arguments, rngs=nnx.Rngs(0)))
    return sharpen_attention(module, rng)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


def make_context(tokens):
    """Return the context of a padding mask: lengths, or booleans if padding lies between tokens."""
    is_mask = tokens is not None and tokens.ndim == 2
    return Context(mask=Mask(keep=tokens) if is_mask else Mask(lengths=tokens))


def run(module, x, lengths=None):
    """Run the module jitted, as users do."""
    graphdef, params = nnx.split(module)
    return jax.jit(lambda p, x, lengths: nnx.merge(graphdef, p)(x, make_context(lengths))[0])(params, x, lengths)


GAPS = np.random.default_rng(0).random((B, T)) < 0.6
SHORT = np.array([3, 20, T - 1])


@pytest.mark.parametrize(
    ("tokens", "padding", "options"),
    [
        (T, None, {}),  # not a multiple of the landmarks
        (T, None, {"backend": "naive", "convolution": 0}),
        (4 * M, None, {"convolution": 0}),
        (T, LENGTHS, {}),
        (T, LENGTHS, {"backend": "naive"}),
        (T, GAPS, {"convolution": 0}),  # a convolution depends on distance, so gaps change it
        (T, SHORT, {"landmarks": T}),  # attention over this many tokens without padding is exact
        (T + 3, SHORT, {"landmarks": T}),
    ],
)
def test_output_matches_the_three_matrices(rng, tokens, padding, options):
    module, x = make_attention(rng, **options), jnp.asarray(rng.standard_normal((B, tokens, D)), jnp.float32)
    lengths = np.full(B, tokens) if padding is None else padding
    valid = GAPS if padding is GAPS else np.arange(tokens) < lengths[:, None]
    result = run(module, x, padding)
    for i in range(B):
        expected = reference(module, np.float64(x[i])[valid[i]])
        np.testing.assert_allclose(result[i][valid[i]], expected, atol=1e-5 * np.abs(expected).max())


def test_attention_in_tests_is_neither_uniform_nor_exact(rng, x):
    module = make_attention(rng, convolution=0)
    _, arrays, _ = nnx.jit(lambda module, x: module(x))(module, x)
    assert np.abs(arrays["landmark_probabilities"] - 1 / M).max() > 0.3
    q, k, v = (getattr(module, name)(x) for name in ("query", "key", "value"))
    assert np.abs(arrays["out"] - attend(q, k, v)).max() > 0.05 * np.abs(arrays["out"]).max()


def test_padding_affects_neither_output_nor_gradient(rng, x):
    module, lengths = make_attention(rng), jnp.asarray(LENGTHS)
    valid = (np.arange(T) < LENGTHS[:, None])[..., None]
    other = jnp.where(valid, x, 7 * x[::-1] + 1)
    np.testing.assert_array_equal(
        jnp.where(valid, run(module, x, lengths), 0), jnp.where(valid, run(module, other, lengths), 0)
    )
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jnp.where(valid, run(module, x, lengths), 0))))(x)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(jnp.where(valid, 0, gradient), 0)
    assert (np.abs(gradient).max(axis=-1)[valid[..., 0]] > 0).all()


@pytest.mark.parametrize("padded", [False, True])
def test_example_is_bitwise_independent_of_others_in_batch(rng, x, padded):
    def run_first_example(scale, x, lengths):
        return np.asarray(run(make_attention(np.random.default_rng(1), scale=scale), x, lengths))[0]

    others = x.at[1:].set(jnp.asarray(9 * rng.standard_normal((B - 1, T, D)), jnp.float32))
    lengths = (jnp.asarray(LENGTHS), jnp.array([29, 2, 23])) if padded else (None, None)
    np.testing.assert_array_equal(
        run_first_example("matrix", x, lengths[0]), run_first_example("matrix", others, lengths[1])
    )
    assert not np.array_equal(run_first_example("batch", x, lengths[0]), run_first_example("batch", others, lengths[1]))


def test_as_many_landmarks_as_tokens_is_exact_attention(rng, x):
    for options in ({}, {"padding": "zeros"}):
        module = make_attention(rng, landmarks=T, convolution=0, **options)
        exact = fill_weights(lambda: MultiHeadAttention(D, N, H, V, rngs=nnx.Rngs(1)))
        nnx.update(exact, nnx.state(module))
        for lengths in (None, jnp.asarray(LENGTHS)) if options else (None,):
            valid = np.full((B, T, 1), True) if lengths is None else (np.arange(T) < LENGTHS[:, None])[..., None]
            result, expected = (jnp.where(valid, run(m, x, lengths), 0) for m in (module, exact))
            np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert set(nnx.eval_shape(lambda module, x: module(x)[1], module, x)) == {"v", "out"}


@pytest.mark.parametrize("tokens, taps", [(29, 11), (3, 35), (64, 35), (200, 35), (130, 67), (5, 1)])
def test_convolution_along_the_tokens(rng, tokens, taps):
    x, kernel = rng.standard_normal((B, tokens, N, H)), rng.standard_normal((taps, N))
    result = nystrom.convolve(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    expected = np.empty_like(x)
    for b, n, h in np.ndindex(B, N, H):
        expected[b, :, n, h] = np.convolve(x[b, :, n, h], kernel[::-1, n], "full")[taps // 2 :][:tokens]
    np.testing.assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())


VIT = {"image_size": 8, "patch_size": 2, "channels": 1, "num_classes": 3, "width": D, "depth": 2, "mlp_dim": 19}
VIT |= {"num_heads": N, "head_dim": H, "value_dim": V}


def test_measures_on_a_vit_with_nystrom_attention(rng):
    model = fill_weights(lambda: models.build("vit", **VIT, attention="nystrom", landmarks=M, rngs=nnx.Rngs(0)))
    assert model.blocks.layers.attention.skip.shape == (2, 35, N)
    images = jnp.asarray(rng.standard_normal((B, 8, 8, 1)), jnp.float32)
    names = ["landmark_probabilities", "pseudo_inverse_residual", "attention_probabilities", "largest_logit"]
    run = nnx.jit(lambda model, images, tap: model(images, tap=tap), static_argnums=2)
    _, arrays = run(model, images, dict)
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays["blocks"].items()}
    assert "q" not in arrays and "k" not in arrays
    matrix, inverse = arrays["landmark_probabilities"], arrays["pseudo_inverse"]
    assert matrix.shape == inverse.shape == (2, B, N, M, M)

    result = run(model, images, tap(names, reduce=singular_values))[1]["blocks"]
    assert set(result) == set(names[:2])  # this attention is not a softmax of q·k
    s = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(result[names[0]], s, atol=1e-6 * s.max())
    residual = result["pseudo_inverse_residual"]
    expected = np.linalg.norm(matrix @ inverse @ matrix - matrix, axis=(-2, -1)) / np.linalg.norm(matrix, axis=(-2, -1))
    assert residual.valid.all() and expected.max() > 1e-3
    np.testing.assert_allclose(residual.value, expected, rtol=1e-3, atol=1e-6)


def test_pseudo_inverse_converges_to_numpy_pinv(rng):
    a = softmax(rng.standard_normal((B, N, M, M)))
    a[..., -2:, :] = a[..., -2:] = 0  # landmarks without tokens
    for scale in ("matrix", "batch"):
        result = nystrom.pseudo_inverse(jnp.asarray(a, jnp.float32), iterations=20, scale=scale)
        expected = np.linalg.pinv(a)
        np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())
        assert not np.any(result[..., -2:, :]) and not np.any(result[..., -2:])


@pytest.mark.parametrize("scale", ["matrix", "batch"])
def test_pseudo_inverse_of_zeros_is_zero_with_finite_gradient(rng, scale):
    a = jnp.asarray(softmax(rng.standard_normal((B, N, M, M))), jnp.float32)
    for zeros in (a.at[0].set(0), 0 * a):  # one example that is only padding; all of them
        gradient = jax.jit(jax.grad(lambda a: jnp.sum(nystrom.pseudo_inverse(a, scale=scale)[1:] ** 2)))(zeros)
        assert np.isfinite(gradient).all()
        assert not np.any(nystrom.pseudo_inverse(zeros, scale=scale)[0])


def test_pseudo_inverse_starts_from_scaled_transpose(rng):
    a = softmax(2 * rng.standard_normal((B, N, M, M)))
    columns, rows = a.sum(axis=-2).max(axis=-1), a.sum(axis=-1).max(axis=-1)
    for scale, c in (("matrix", columns * rows), ("batch", np.full((B, N), columns.max() * rows.max()))):
        result = nystrom.pseudo_inverse(jnp.asarray(a, jnp.float32), iterations=1, scale=scale)
        for i in np.ndindex(B, N):
            np.testing.assert_allclose(result[i], iterate_pseudo_inverse(a[i], 1, c[i]), rtol=1e-4, atol=1e-6)


def test_landmarks_are_contiguous_groups_of_similar_size():
    result = np.asarray(nystrom.landmark_tokens(Mask(lengths=jnp.asarray(LENGTHS)), T, M))
    assert [list(row) for row in result.sum(axis=-1)] == [
        [5, 4, 4, 4, 4, 4, 4],
        [2, 2, 2, 2, 2, 2, 1],
        [1] * 5 + [0] * 2,
    ]
    for row, n in zip(result, LENGTHS, strict=True):
        assert list(row.sum(axis=0)) == [1] * n + [0] * (T - n)
        assert (np.diff(row[:, :n].argmax(axis=0)) >= 0).all()
    np.testing.assert_array_equal(nystrom.landmark_tokens(Mask(), T, M), result[0])
    np.testing.assert_array_equal(
        nystrom.landmark_tokens(Mask(keep=jnp.asarray(np.arange(T) < LENGTHS[:, None])), T, M), result
    )
