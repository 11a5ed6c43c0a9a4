"""Image transforms against Pillow, and against the definitions of their random parts."""

import math

import cv2
import numpy as np
import pytest
from pictures import (
    BICUBIC,
    FILL,
    FULL_CROP,
    apply_train_transform,
    draw_crop_box,
    encode,
    make_colour_ramps,
    make_natural_picture,
    pixel_difference,
)
from PIL import Image, ImageEnhance, ImageOps

from leanformer.data.images.transforms import OPERATIONS, Augmentation, random_view, train_transform


# RandAugment's operations. Levels m are 0..10 here, as in timm; every reference uses Pillow.


def compute_factor(m: float, sign: int) -> float:
    return max(0.1, 1.0 + sign * m / 10 * 0.9)


def solarize_add(picture: Image.Image, add: int) -> Image.Image:
    return picture.point([min(255, v + add) if v < 128 else v for v in range(256)] * len(picture.getbands()))


def posterize(picture: Image.Image, bits: int) -> Image.Image:
    return ImageOps.posterize(picture, bits) if bits else picture.point(lambda v: 0)


def fill(picture: Image.Image) -> tuple[int, ...] | int:
    return FILL if picture.mode == "RGB" else 100


def apply_affine(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, BICUBIC, fillcolor=fill(picture))


LOOKUPS = {
    "AutoContrast": lambda p, m, sign: ImageOps.autocontrast(p),
    "Equalize": lambda p, m, sign: ImageOps.equalize(p),
    "Invert": lambda p, m, sign: ImageOps.invert(p),
    "PosterizeIncreasing": lambda p, m, sign: posterize(p, 4 - int(m / 10 * 4)),
    "SolarizeIncreasing": lambda p, m, sign: ImageOps.solarize(p, 256 - int(m / 10 * 256)),
    "SolarizeAdd": lambda p, m, sign: solarize_add(p, int(m / 10 * 110)),
    "ContrastIncreasing": lambda p, m, sign: ImageEnhance.Contrast(p).enhance(compute_factor(m, sign)),
    "BrightnessIncreasing": lambda p, m, sign: ImageEnhance.Brightness(p).enhance(compute_factor(m, sign)),
}
BLENDS = {
    "ColorIncreasing": lambda p, m, sign: ImageEnhance.Color(p).enhance(compute_factor(m, sign)),
    "SharpnessIncreasing": lambda p, m, sign: ImageEnhance.Sharpness(p).enhance(compute_factor(m, sign)),
}
GEOMETRIC = {
    "Rotate": lambda p, m, sign: p.rotate(sign * m / 10 * 30, BICUBIC, fillcolor=fill(p)),
    "ShearX": lambda p, m, sign: apply_affine(p, (1, sign * m / 10 * 0.3, 0, 0, 1, 0)),
    "ShearY": lambda p, m, sign: apply_affine(p, (1, 0, 0, sign * m / 10 * 0.3, 1, 0)),
    "TranslateXRel": lambda p, m, sign: apply_affine(p, (1, 0, sign * m / 10 * 0.45 * p.size[0], 0, 1, 0)),
    "TranslateYRel": lambda p, m, sign: apply_affine(p, (1, 0, 0, 0, 1, sign * m / 10 * 0.45 * p.size[1])),
}
LEVELS = [(m, sign) for m in (0.0, 1.3, 4.99, 7.5, 9.0, 9.61, 10.0) for sign in (1, -1)]


def apply(name: str, pixels: np.ndarray, m: float, sign: int) -> np.ndarray:
    return OPERATIONS[name](pixels, m / 10, sign * m / 10, FILL if pixels.ndim == 3 else (100,))


def test_every_operation_has_a_reference():
    assert set(OPERATIONS) == {*LOOKUPS, *BLENDS, *GEOMETRIC} and len(OPERATIONS) == 15


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_operations_equal_pillow(name):
    flat = np.full((13, 17, 3), 77, np.uint8)  # no contrast to stretch
    few = make_natural_picture(5, 7) // 16  # fewer pixels than levels
    dark = (make_natural_picture(41, 59, 2) // 3 + 20).astype(np.uint8)
    for pixels in (make_natural_picture(61, 47), dark, flat, few, make_natural_picture(61, 47)[..., 0].copy()):
        for m, sign in LEVELS:
            expected = np.asarray(LOOKUPS[name](Image.fromarray(pixels), m, sign))
            np.testing.assert_array_equal(apply(name, pixels, m, sign), expected, f"{m} {sign}")


@pytest.mark.parametrize("name", BLENDS)
def test_blending_operations_equal_pillow_up_to_rounding(name):
    """Ours round once; Pillow rounds the degenerate image and truncates the blend: at most one grey level apart."""
    for pixels in (make_natural_picture(61, 47), make_natural_picture(61, 47)[..., 0].copy()):
        for m, sign in LEVELS:
            expected = np.asarray(BLENDS[name](Image.fromarray(pixels), m, sign))
            assert pixel_difference(apply(name, pixels, m, sign), expected).max() <= 1


def make_interior_masks(name: str, shape: tuple[int, ...], m: float, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of the image and of the fill in Pillow's result, 2 pixels away from the seam, which we smooth."""
    white = Image.new("L", shape[1::-1], 255)
    inside = np.asarray(GEOMETRIC[name](white, m, sign)) == 255
    kernel = np.ones((5, 5), np.uint8)
    shown = cv2.erode(inside.astype(np.uint8), kernel, borderValue=0)
    filled = cv2.erode((~inside).astype(np.uint8), kernel)
    return shown.astype(bool), filled.astype(bool)


@pytest.mark.parametrize("name", GEOMETRIC)
def test_geometric_operations_move_pixels_as_pillow_does(name):
    """On a smooth image, interpolation hardly matters; a shift by half a pixel would change 1.5 levels or more."""
    pixels = make_colour_ramps(79, 67)
    for m, sign in LEVELS:
        ours, expected = apply(name, pixels, m, sign), np.asarray(GEOMETRIC[name](Image.fromarray(pixels), m, sign))
        shown, filled = make_interior_masks(name, pixels.shape, m, sign)
        assert shown.sum() > 1000
        assert pixel_difference(ours, expected)[shown].max() <= 1
        assert pixel_difference(ours, expected)[filled].max(initial=0) == 0
        grey, expected = apply(name, pixels[..., 0].copy(), m, sign), expected[..., 0]
        assert pixel_difference(grey, expected)[shown].max() <= 1
        assert (grey[filled] == 100).all()


# Random draws


@pytest.fixture
def calls(monkeypatch):
    """Replace every operation by one that only records (name, m, s); return the record."""
    record = []
    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, lambda x, m, s, f, name=name: (record.append((name, m, s)), x)[1])
    return record


def test_rand_augment_draws_as_defined(calls):
    images, rng, pixels = 4000, np.random.default_rng(0), np.zeros((8, 8, 3), np.uint8)
    counts = np.zeros(3, int)
    twice = 0
    for _ in range(images):
        before = len(calls)
        train_transform(pixels, rng, size=8, channels=3, augmentation=Augmentation(rand_magnitude=9.0))
        applied = [name for name, _, _ in calls[before:]]
        counts[len(applied)] += 1
        twice += len(applied) == 2 and applied[0] == applied[1]
    np.testing.assert_allclose(counts / images, [0.25, 0.5, 0.25], atol=0.03)  # over 3.5 standard deviations
    assert 0 < twice < 3 * images / 4 / 15  # with replacement: 67 expected
    names, levels, signed = zip(*calls, strict=True)
    shares = np.array([names.count(name) for name in OPERATIONS]) / len(names)
    np.testing.assert_allclose(shares, 1 / 15, atol=0.016)  # 4 standard deviations
    levels, signed = np.array(levels), np.array(signed)
    assert levels.max() == 1.0  # clipped at 10, where 2.3 % of N(9, 0.5) lie beyond
    np.testing.assert_allclose((levels == 1.0).mean(), 0.0228, atol=0.01)
    np.testing.assert_allclose(np.median(levels), 0.9, atol=0.005)
    np.testing.assert_allclose(np.quantile(levels, 0.1587), 0.85, atol=0.005)
    np.testing.assert_array_equal(np.abs(signed), levels)
    np.testing.assert_allclose((signed > 0).mean(), 0.5, atol=0.035)


def test_rand_augment_applies_the_drawn_operations_in_order(monkeypatch):
    pixels, order = make_natural_picture(31, 31), []
    real = dict(OPERATIONS)
    for name in real:
        monkeypatch.setitem(OPERATIONS, name, lambda *a, name=name: (order.append((name, a)), real[name](*a))[1])
    result = apply_train_transform(pixels, size=31, **FULL_CROP, rand_magnitude=9.0, rand_layers=4, rand_prob=1.0)
    expected = pixels
    for name, (_, m, s, _) in order:
        expected = real[name](expected, m, s, FILL)
    assert len(order) == 4
    np.testing.assert_array_equal(result, expected)
    assert (result != pixels).any()


@pytest.mark.parametrize("seed", range(6))
def test_color_jitter_equals_pillow_enhancements(seed):
    """Exact on grey; on RGB one level of rounding in the colour step, times 1.4 twice, then clipped: below 3."""
    pixels = make_natural_picture(31, 31)
    for picture, channels, tolerance in ((pixels[..., 0].copy(), 1, 0), (pixels, 3, 3)):
        changed = apply_train_transform(picture, seed, size=31, channels=channels, **FULL_CROP, color_jitter=0.4)
        expected, rng = Image.fromarray(picture), np.random.default_rng(seed)
        random_view(31, 31, rng, (1.0, 1.0), (1.0, 1.0), 0.0)
        for index in rng.permutation(3):
            enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[index]
            expected = enhance(expected).enhance(rng.uniform(0.6, 1.4))
        expected = np.asarray(expected).reshape(31, 31, channels)
        assert pixel_difference(changed, expected).max() <= tolerance
        assert pixel_difference(changed, picture.reshape(31, 31, channels)).mean() > 1


def test_crop_area_and_ratio_are_uniform():
    """Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded with probability 0.01 by a correct sampler; seeds are fixed."""
    rng, n = np.random.default_rng(0), 4000
    boxes = np.array([draw_crop_box(1500, 1500, rng, (0.08, 0.5), (3 / 4, 4 / 3)) for _ in range(n)])
    left, top, right, bottom = boxes.T
    width, height = right - left, bottom - top
    assert boxes.min() >= 0
    assert boxes.max() <= 1500
    for values, low, high in (
        (width * height / 1500**2, 0.08, 0.5),
        (np.log(width / height), math.log(3 / 4), math.log(4 / 3)),
        (left / (1500 - width), 0.0, 1.0),
        (top / (1500 - height), 0.0, 1.0),
    ):
        empirical = (np.sort(values) - low) / (high - low)
        assert np.abs(empirical - (np.arange(n) + 0.5) / n).max() < 1.63 / math.sqrt(n)


def test_crop_falls_back_to_the_centre():
    scale, ratio = (0.9, 1.0), (3 / 4, 4 / 3)
    boxes = {draw_crop_box(10, 1000, np.random.default_rng(seed), scale, ratio) for seed in range(20)}
    assert boxes == {(0, 493, 10, 506)}  # 10 / (3/4) = 13 high
    boxes = {draw_crop_box(1000, 10, np.random.default_rng(seed), scale, ratio) for seed in range(20)}
    assert boxes == {(493, 0, 506, 10)}
    assert draw_crop_box(100, 100, np.random.default_rng(0), (2.0, 2.0), ratio) == (0, 0, 100, 100)
    for seed in range(50):  # crops of a tiny image are not empty
        assert apply_train_transform(np.full((1, 2, 3), 9, np.uint8), seed).tolist() == [[[9, 9, 9]] * 32] * 32


def test_flip():
    pixels = make_natural_picture(32, 32)
    np.testing.assert_array_equal(apply_train_transform(pixels, **FULL_CROP), pixels)
    np.testing.assert_array_equal(apply_train_transform(pixels, **FULL_CROP | {"flip": 1.0}), pixels[:, ::-1])
    half = FULL_CROP | {"flip": 0.5}
    assert 160 <= sum((apply_train_transform(pixels, seed, **half) != pixels).any() for seed in range(400)) <= 240


@pytest.mark.parametrize("channels", [1, 3])
def test_result_depends_only_on_input_and_seed(channels):
    """Inputs are not changed."""
    options = {"channels": channels, "rand_magnitude": 9.0, "rand_layers": 4, "rand_prob": 1.0, "color_jitter": 0.4}
    pixels = make_natural_picture(32, 32)
    before, data = pixels.copy(), encode(pixels)
    pixels.setflags(write=False)
    for image, box in ((pixels, FULL_CROP), (pixels, {}), (data, {})):
        first, again = (
            np.stack([apply_train_transform(image, seed, **options, **box) for seed in range(20)]) for _ in range(2)
        )
        np.testing.assert_array_equal(first, again)
        assert len(np.unique(first, axis=0)) == 20 and first.shape[1:] == (32, 32, channels) and first.dtype == np.uint8
    np.testing.assert_array_equal(pixels, before)
