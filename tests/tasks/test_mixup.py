"""Normalisation, erasing, mixup and cutmix against NumPy and their own definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from leanformer.tasks import images as aug


B, H, W, C, V = 6, 13, 17, 3, 7


@pytest.fixture
def images(rng):
    return jnp.asarray(rng.standard_normal((B, H, W, C)), jnp.float32)


def test_normalise_equals_numpy(rng):
    pixels = rng.integers(0, 256, (B, H, W, C), dtype=np.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = (pixels / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(aug.normalise(jnp.asarray(pixels), mean, std), expected, atol=2e-6)


@functools.cache
def draw_mixes(number, **options):
    """Return `number` draws stacked along the first axis, as NumPy arrays."""
    options = {"mixup": 0.8, "cutmix": 1.0, "mix_prob": 1.0, "switch_prob": 0.5} | options
    keys = jax.random.split(jax.random.key(7), number)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda key: aug.draw_mix(key, H, W, **options)))(keys))


def mix_with_reversed(draws, index, images):
    """Return images mixed with themselves in reverse order, using the draw at `index`."""
    return np.asarray(aug.mix_images(jax.tree.map(lambda x: jnp.asarray(x[index]), draws), images, images[::-1]))


def test_mixup_is_a_blend_with_beta_shares(images):
    draws = draw_mixes(400, cutmix=0.0)
    shares, partners = draws.share, np.asarray(images[::-1])
    expected = shares[0] * np.asarray(images) + (1 - shares[0]) * partners
    # Six roundings of values below 5.
    np.testing.assert_allclose(mix_with_reversed(draws, 0, images), expected, atol=2e-6)
    assert not draws.inside.any()
    assert abs(shares.mean() - 0.5) < 4 * np.sqrt(1 / (4 * 2.6) / 400)  # Beta(a, a) has variance 1 / (4 (2 a + 1))
    np.testing.assert_allclose(shares.var(), 1 / (4 * 2.6), rtol=0.15)


@pytest.mark.parametrize("alpha", [0.1, 0.8, 1.0, 7.0])
def test_shares_are_beta_distributed(alpha):
    """Kolmogorov-Smirnov test: with 200,000 draws it detects a shift of half a per cent anywhere."""
    draws = np.asarray(aug.symmetric_beta(jax.random.key(11), alpha, (400_000,)), np.float64)
    assert np.isfinite(draws).all() and draws.min() >= 0 and draws.max() <= 1
    low, high = draws[draws < 0.5], 1 - draws[draws > 0.5]
    assert abs(len(low) - len(high)) < 4 * np.sqrt(len(draws))
    # Test each half separately: float32 resolves values near 0 that it rounds to the same number near 1.
    half = lambda x: 2 * stats.beta(alpha, alpha).cdf(x)  # noqa: E731
    assert stats.kstest(low[low > 1e-30], lambda x: (half(x) - half(1e-30)) / (1 - half(1e-30))).pvalue > 1e-3
    coarse = high[high > 1e-3]
    assert stats.kstest(coarse, lambda x: (half(x) - half(1e-3)) / (1 - half(1e-3))).pvalue > 1e-3
    np.testing.assert_allclose(draws.mean(), 0.5, atol=4 / np.sqrt(4 * len(draws)))
    np.testing.assert_allclose(draws.var(), 1 / (4 * (2 * alpha + 1)), rtol=0.01)


def test_cutmix_box_area_is_the_partner_share(images):
    """A box that no border clips covers 1 - lambda; clipping only shrinks it, so the mean share is over one half."""
    draws = draw_mixes(400, mixup=0.0)
    assert 0.5 < draws.share.mean() < 0.8 and draws.share.min() < 0.2 and draws.share.max() > 0.98
    for index, (inside, share) in enumerate(zip(draws.inside[:50], draws.share[:50], strict=True)):
        rows, columns = inside.any(1), inside.any(0)
        assert (inside == rows[:, None] & columns[None, :]).all()
        for side in (rows, columns):  # each an interval
            assert np.abs(np.diff(np.concatenate([[0], side, [0]]))).sum() in (0, 2)
        np.testing.assert_allclose(share, 1 - inside.mean(), atol=1e-6)
        expected = np.where(inside[None, :, :, None], images[::-1], images)
        np.testing.assert_array_equal(mix_with_reversed(draws, index, images), expected)


def test_probabilities_of_mixing_and_of_cutmix():
    cut = draw_mixes(600, switch_prob=0.25).weight == 1
    assert abs(np.mean(cut) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 600)
    draws = draw_mixes(20, mix_prob=0.0)
    assert (draws.share == 1).all() and (draws.weight == 1).all() and not draws.inside.any()


def test_soft_targets_equal_numpy(rng):
    labels, partners = (jnp.asarray(rng.integers(0, V, B)) for _ in range(2))
    mix = aug.Mix(jnp.float32(1), jnp.zeros((H, W), bool), jnp.float32(0.7))
    result = np.asarray(aug.soft_targets(mix, labels, partners, V, 0.1))
    expected = np.full((B, V), 0.1 / V)
    expected[np.arange(B), labels] += 0.9 * 0.7
    expected[np.arange(B), partners] += 0.9 * 0.3
    np.testing.assert_allclose(result, expected, atol=1e-6)
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-6)


def test_erasing_is_one_box_of_noise():
    n = 1000
    blank = jnp.full((n, 31, 37, 2), 5.0)
    keys = jax.random.split(jax.random.key(0), n)
    result = np.asarray(jax.jit(lambda images, keys: aug.erase(images, keys, 0.25))(blank, keys))
    changed = (result != 5).all(-1)
    erased = changed.any(axis=(1, 2))
    assert abs(erased.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / n)
    for box in changed[erased]:
        rows, columns = box.any(1), box.any(0)
        assert (box == rows[:, None] & columns[None, :]).all()
        assert 0.01 < box.mean() < 0.36
    noise = result[erased][changed[erased]]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02


def test_erased_boxes_are_uniformly_placed():
    """Row and column are uniform over the possible positions, and independent; squares would show a shared draw."""
    n, side = 3000, 24
    blank, keys = jnp.full((n, side, side, 1), 99.0), jax.random.split(jax.random.key(5), n)
    boxes = np.asarray(jax.jit(lambda keys: aug.erase(blank, keys, 1.0))(keys))[..., 0] != 99
    lines = [boxes.any(axis=2), boxes.any(axis=1)]  # n x side: rows and columns that a box covers
    lengths, first = (np.array([f(line) for line in lines]) for f in (lambda x: x.sum(1), lambda x: x.argmax(1)))
    places = (first + 0.5) / (side - lengths + 1)
    # Of m equally likely places, i + 1/2 of m has variance (1 - 1/m²) / 12, below 1/12.
    assert np.abs(places.mean(axis=1) - 0.5).max() < 4 * np.sqrt(1 / 12 / n)
    square = lengths[0] == lengths[1]
    assert square.sum() > 100
    for chosen in (slice(None), square):
        assert abs(np.corrcoef(places[:, chosen])[0, 1]) < 4 / np.sqrt(places[:, chosen].shape[1])


def test_erasing_is_independent_of_other_examples(images):
    keys = jax.random.split(jax.random.key(3), B)
    erase = jax.jit(lambda images, keys: aug.erase(images, keys, 0.9))
    whole = np.asarray(erase(images, keys))
    for i in range(B):
        single = np.asarray(erase(images[i : i + 1], keys[i : i + 1])[0])
        np.testing.assert_array_equal(single != images[i], whole[i] != images[i])
        # Another program may round the noise differently: a few units in the last place of numbers below 5.
        np.testing.assert_allclose(single, whole[i], rtol=0, atol=3e-6)
    assert (whole != images).any()
