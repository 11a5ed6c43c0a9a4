"""Image transforms against Pillow, against the definitions of their random parts, and on files that are broken."""

import io
import math
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from leanformer.data.images import transforms as module
from leanformer.data.images.decoding import CorruptImage
from leanformer.data.images.transforms import OPERATIONS, eval_transform, random_view, train_transform


BICUBIC = Image.Resampling.BICUBIC
FILL = (124, 116, 104)
WHOLE = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0}


def natural(height: int, width: int, seed: int = 0, power: float = 1.0) -> np.ndarray:
    """A colour image whose amplitude falls as frequency ** -power, as in photographs for power 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf
    noise = np.random.default_rng(seed).standard_normal((4, height, width))
    field = np.fft.irfft2(np.fft.rfft2(noise) / frequency**power, s=(height, width))
    field /= field.std(axis=(1, 2), keepdims=True)
    field = 120 + 50 * (field[:1] + 0.4 * field[1:])  # colours are correlated
    return np.clip(field, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def ramps(height: int, width: int) -> np.ndarray:
    """Red grows with x, green with y, blue falls with x: position can be read from the colour."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, 255 - x], axis=-1).round().astype(np.uint8)


def encode(picture: np.ndarray | Image.Image, format: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def train(data: bytes | np.ndarray, seed: int = 0, **options: object) -> np.ndarray:
    options = {"size": 32, "channels": 3} | options
    return train_transform(data, np.random.default_rng(seed), **options)


def evaluate(data: bytes | np.ndarray, **options: object) -> np.ndarray:
    return eval_transform(data, **{"size": 32, "channels": 3, "crop_fraction": 0.875} | options)


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert a.shape == b.shape
    return np.abs(a.astype(int) - b.astype(int))


def roughness(pixels: np.ndarray) -> float:
    return math.sqrt((np.diff(pixels.astype(float), axis=1) ** 2).mean())


# RandAugment's operations. Levels m are 0..10 here, as in timm; each reference is Pillow's.


def factor(m: float, sign: int) -> float:
    return max(0.1, 1.0 + sign * m / 10 * 0.9)


def solarize_add(picture: Image.Image, add: int) -> Image.Image:
    return picture.point([min(255, v + add) if v < 128 else v for v in range(256)] * len(picture.getbands()))


def posterize(picture: Image.Image, bits: int) -> Image.Image:
    return ImageOps.posterize(picture, bits) if bits else picture.point(lambda v: 0)


def moved(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    fill = FILL if picture.mode == "RGB" else 100
    size, method = picture.size, Image.Transform.AFFINE
    return picture.transform(size, method, matrix, BICUBIC, fillcolor=fill)


def turned(picture: Image.Image, degrees: float) -> Image.Image:
    fill = FILL if picture.mode == "RGB" else 100
    return picture.rotate(degrees, BICUBIC, fillcolor=fill)


TABLES = {
    "AutoContrast": lambda p, m, sign: ImageOps.autocontrast(p),
    "Equalize": lambda p, m, sign: ImageOps.equalize(p),
    "Invert": lambda p, m, sign: ImageOps.invert(p),
    "PosterizeIncreasing": lambda p, m, sign: posterize(p, 4 - int(m / 10 * 4)),
    "SolarizeIncreasing": lambda p, m, sign: ImageOps.solarize(p, 256 - int(m / 10 * 256)),
    "SolarizeAdd": lambda p, m, sign: solarize_add(p, int(m / 10 * 110)),
    "ContrastIncreasing": lambda p, m, sign: ImageEnhance.Contrast(p).enhance(factor(m, sign)),
    "BrightnessIncreasing": lambda p, m, sign: ImageEnhance.Brightness(p).enhance(factor(m, sign)),
}
BLENDS = {
    "ColorIncreasing": lambda p, m, sign: ImageEnhance.Color(p).enhance(factor(m, sign)),
    "SharpnessIncreasing": lambda p, m, sign: ImageEnhance.Sharpness(p).enhance(factor(m, sign)),
}
MOVES = {
    "Rotate": lambda p, m, sign: turned(p, sign * m / 10 * 30),
    "ShearX": lambda p, m, sign: moved(p, (1, sign * m / 10 * 0.3, 0, 0, 1, 0)),
    "ShearY": lambda p, m, sign: moved(p, (1, 0, 0, sign * m / 10 * 0.3, 1, 0)),
    "TranslateXRel": lambda p, m, sign: moved(p, (1, 0, sign * m / 10 * 0.45 * p.size[0], 0, 1, 0)),
    "TranslateYRel": lambda p, m, sign: moved(p, (1, 0, 0, 0, 1, sign * m / 10 * 0.45 * p.size[1])),
}
LEVELS = [(m, sign) for m in (0.0, 1.3, 4.99, 7.5, 9.0, 9.61, 10.0) for sign in (1, -1)]


def apply(name: str, pixels: np.ndarray, m: float, sign: int) -> np.ndarray:
    return OPERATIONS[name](pixels, m / 10, sign * m / 10, FILL if pixels.ndim == 3 else (100,))


def test_every_operation_has_a_reference():
    assert set(OPERATIONS) == {*TABLES, *BLENDS, *MOVES}
    assert len(OPERATIONS) == 15


@pytest.mark.parametrize("name", TABLES)
def test_table_operations_equal_pillow(name):
    flat = np.full((13, 17, 3), 77, np.uint8)  # no contrast to stretch
    few = natural(5, 7) // 16  # fewer pixels than levels
    dark = (natural(41, 59, 2) // 3 + 20).astype(np.uint8)
    for pixels in (natural(61, 47), dark, flat, few, natural(61, 47)[..., 0].copy()):
        for m, sign in LEVELS:
            expected = np.asarray(TABLES[name](Image.fromarray(pixels), m, sign))
            np.testing.assert_array_equal(apply(name, pixels, m, sign), expected, f"{m} {sign}")


@pytest.mark.parametrize("name", BLENDS)
def test_blending_operations_equal_pillow_but_for_rounding(name):
    """Ours round once, Pillow rounds the degenerate image and cuts the blend: one grey level at most."""
    for pixels in (natural(61, 47), natural(61, 47)[..., 0].copy()):
        for m, sign in LEVELS:
            expected = np.asarray(BLENDS[name](Image.fromarray(pixels), m, sign))
            assert distance(apply(name, pixels, m, sign), expected).max() <= 1


def interior(name: str, shape: tuple[int, ...], m: float, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Where Pillow shows the image and where the fill, both 2 pixels away from the seam, which we smooth."""
    white = Image.new("L", shape[1::-1], 255)
    inside = np.asarray(MOVES[name](white, m, sign)) == 255
    kernel = np.ones((5, 5), np.uint8)
    shown = cv2.erode(inside.astype(np.uint8), kernel, borderValue=0)
    filled = cv2.erode((~inside).astype(np.uint8), kernel)
    return shown.astype(bool), filled.astype(bool)


@pytest.mark.parametrize("name", MOVES)
def test_moves_put_every_pixel_where_pillow_does(name):
    """On a smooth image interpolation hardly matters: half a pixel of displacement would be 1.5 levels and more."""
    pixels = ramps(79, 67)
    for m, sign in LEVELS:
        ours, expected = apply(name, pixels, m, sign), np.asarray(MOVES[name](Image.fromarray(pixels), m, sign))
        shown, filled = interior(name, pixels.shape, m, sign)
        assert shown.sum() > 1000
        assert distance(ours, expected)[shown].max() <= 1
        assert distance(ours, expected)[filled].max(initial=0) == 0
        grey, expected = apply(name, pixels[..., 0].copy(), m, sign), expected[..., 0]
        assert distance(grey, expected)[shown].max() <= 1
        assert (grey[filled] == 100).all()


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_nearer_to_bicubic_than_bilinear_is(name, monkeypatch):
    pixels = natural(224, 224)
    shown, _ = interior(name, pixels.shape, 7.7, 1)
    ours, bicubic = apply(name, pixels, 7.7, 1), np.asarray(MOVES[name](Image.fromarray(pixels), 7.7, 1))
    monkeypatch.setitem(globals(), "BICUBIC", Image.Resampling.BILINEAR)
    bilinear = np.asarray(MOVES[name](Image.fromarray(pixels), 7.7, 1))
    assert distance(ours, bicubic)[shown].mean() < 0.7 * distance(bilinear, bicubic)[shown].mean()


# Random draws


@pytest.fixture
def calls(monkeypatch):
    """Replaces every operation by one that only records (name, m, s)."""
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
        train_transform(pixels, rng, size=8, channels=3, rand_magnitude=9.0)
        drawn = [name for name, _, _ in calls[before:]]
        counts[len(drawn)] += 1
        twice += len(drawn) == 2 and drawn[0] == drawn[1]
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


def test_rand_augment_options(calls):
    pixels = np.zeros((8, 8, 3), np.uint8)
    train(pixels, size=8, rand_magnitude=0.0)
    assert not calls
    train(pixels, size=8, rand_magnitude=3.0, rand_std=0.0, rand_layers=5, rand_prob=1.0)
    assert [m for _, m, _ in calls] == [0.3] * 5
    train(pixels, size=8, rand_magnitude=3.0, rand_prob=0.0)
    assert len(calls) == 5


def test_rand_augment_equals_the_operations_in_turn(monkeypatch):
    pixels, order = natural(31, 31), []
    real = dict(OPERATIONS)
    for name in real:
        monkeypatch.setitem(OPERATIONS, name, lambda *a, name=name: (order.append((name, a)), real[name](*a))[1])
    result = train(pixels, size=31, **WHOLE, rand_magnitude=9.0, rand_layers=4, rand_prob=1.0)
    expected = pixels
    for name, (_, m, s, _) in order:
        expected = real[name](expected, m, s, FILL)
    assert len(order) == 4
    np.testing.assert_array_equal(result, expected)
    assert (result != pixels).any()


def test_color_jitter_draws_three_factors_in_any_order(monkeypatch):
    seen, rng = [], np.random.default_rng(0)
    for name in ("brightness", "contrast", "color"):
        monkeypatch.setattr(module, name, lambda x, f, name=name: (seen.append((name, f)), x)[1])
    for _ in range(300):
        train_transform(np.zeros((8, 8, 3), np.uint8), rng, size=8, channels=3, color_jitter=0.4)
    orders = {tuple(name for name, _ in seen[i : i + 3]) for i in range(0, 900, 3)}
    assert len(orders) == 6
    assert all(len(set(order)) == 3 for order in orders)
    factors = np.array([f for _, f in seen])
    assert 0.6 <= factors.min() < 0.61
    assert 1.39 < factors.max() <= 1.4
    np.testing.assert_allclose(factors.mean(), 1.0, atol=0.03)


@pytest.mark.parametrize("seed", range(6))
def test_color_jitter_changes_pixels_as_pillow_does(seed):
    """Exact on grey; on RGB one level of rounding in the colour step, times 1.4 twice, then cut: below 3."""
    pixels = natural(31, 31)
    for picture, channels, tolerance in ((pixels[..., 0].copy(), 1, 0), (pixels, 3, 3)):
        changed = train(picture, seed, size=31, channels=channels, **WHOLE, color_jitter=0.4)
        expected, rng = Image.fromarray(picture), np.random.default_rng(seed)
        random_view(31, 31, rng, (1.0, 1.0), (1.0, 1.0), 0.0)
        for index in rng.permutation(3):
            enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[index]
            expected = enhance(expected).enhance(rng.uniform(0.6, 1.4))
        expected = np.asarray(expected).reshape(31, 31, channels)
        assert distance(changed, expected).max() <= tolerance
        assert distance(changed, picture.reshape(31, 31, channels)).mean() > 1


def random_box(*arguments: object) -> tuple[int, int, int, int]:
    return random_view(*arguments, 0.5)[0]


def test_crop_area_and_ratio_are_uniform():
    """Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded with probability 0.01 by a right one; seeds are fixed."""
    rng, n = np.random.default_rng(0), 4000
    boxes = np.array([random_box(1500, 1500, rng, (0.08, 0.5), (3 / 4, 4 / 3)) for _ in range(n)])
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
    boxes = {random_box(10, 1000, np.random.default_rng(seed), scale, ratio) for seed in range(20)}
    assert boxes == {(0, 493, 10, 506)}  # 10 / (3/4) = 13 high
    boxes = {random_box(1000, 10, np.random.default_rng(seed), scale, ratio) for seed in range(20)}
    assert boxes == {(493, 0, 506, 10)}
    assert random_box(100, 100, np.random.default_rng(0), (2.0, 2.0), ratio) == (0, 0, 100, 100)


def test_crop_of_a_tiny_image_is_not_empty():
    for seed in range(50):
        assert train(np.full((1, 2, 3), 9, np.uint8), seed).tolist() == [[[9, 9, 9]] * 32] * 32


def test_flip():
    pixels = natural(32, 32)
    np.testing.assert_array_equal(train(pixels, **WHOLE), pixels)
    np.testing.assert_array_equal(train(pixels, **WHOLE | {"flip": 1.0}), pixels[:, ::-1])
    flips = sum((train(pixels, seed, **WHOLE | {"flip": 0.5}) != pixels).any() for seed in range(400))
    assert 160 <= flips <= 240


@pytest.mark.parametrize("channels", [1, 3])
def test_same_seed_same_pixels(channels):
    data = encode(natural(120, 150))
    options = {"channels": channels, "rand_magnitude": 9.0, "rand_layers": 4, "color_jitter": 0.3}
    first = [train(data, seed, **options) for seed in range(12)]
    np.random.default_rng(5).random(7)  # other generators do not matter
    again = [train(data, seed, **options) for seed in range(12)]
    np.testing.assert_array_equal(first, again)
    assert len({result.tobytes() for result in first}) == 12
    assert first[0].shape == (32, 32, channels)
    assert first[0].dtype == np.uint8


def test_inputs_are_not_changed():
    pixels = natural(32, 32)
    before = pixels.copy()
    pixels.setflags(write=False)
    for seed in range(40):
        options = WHOLE if seed % 2 else {}
        train(pixels, seed, **options, rand_magnitude=9.0, rand_layers=3, rand_prob=1.0, color_jitter=0.4)
    np.testing.assert_array_equal(pixels, before)


# Resizing


@pytest.mark.parametrize("length", [101, 225, 256, 320, 375, 448, 560])
def test_training_resize_is_as_sharp_as_pillows(length):
    """The bounds are the measured values, rounded up; without antialiasing the mean distance is 3 to 12."""
    pixels = natural(length, length + 31, power=1.0)
    ours = train(pixels, size=224, **WHOLE)
    box = random_box(length + 31, length, np.random.default_rng(0), (1.0, 1.0), (1.0, 1.0))
    expected = np.asarray(Image.fromarray(pixels).resize((224, 224), BICUBIC, box=box))
    assert distance(ours, expected).mean() < 1.6
    assert 0.93 < roughness(ours) / roughness(expected) < 1.07


@pytest.mark.parametrize(("length", "shrink"), [(447, 1), (448, 2), (894, 2), (896, 4), (1788, 4), (1792, 8)])
def test_reduced_decoding_is_close_to_full_decoding(length, shrink, monkeypatch):
    """The lengths need no rounding of the box."""
    data, used = encode(natural(length, length, power=1.2), quality=90), []
    decode = module.decode_jpeg
    monkeypatch.setattr(module, "decode_jpeg", lambda *a: (used.append(a[2]), decode(*a))[1])
    ours = train(data, size=224, **WHOLE)
    full = Image.open(io.BytesIO(data)).resize((224, 224), BICUBIC)
    assert used == [shrink]
    assert distance(ours, np.asarray(full)).mean() < 3  # libjpeg averages blocks, which is another low-pass
    assert 0.9 < roughness(ours) / roughness(np.asarray(full)) < 1.1


def test_reduced_decoding_crops_the_same_place():
    """The box is rounded to whole reduced pixels: at most half of 8 pixels of a ramp of 1/4 level per pixel."""
    picture = ramps(1000, 1000)
    data = encode(picture, quality=98, subsampling=0)
    for seed in range(12):
        ours = train(data, seed, size=64, crop_scale=(0.2, 1.0), flip=0.0)
        box = random_box(1000, 1000, np.random.default_rng(seed), (0.2, 1.0), (3 / 4, 4 / 3))
        expected = Image.fromarray(picture).resize((64, 64), BICUBIC, box=box)
        assert distance(ours, np.asarray(expected)).max() <= 3


@pytest.mark.parametrize(
    ("width", "height", "size", "fraction", "resized", "left", "top"),
    [
        (500, 375, 224, 0.875, (341, 256), 58, 16),  # 58.5 and 16: Python's round, half to even
        (375, 500, 224, 0.9, (248, 330), 12, 53),
        (90, 67, 32, 1.0, (42, 32), 5, 0),
        (67, 67, 32, 0.875, (36, 36), 2, 2),
        (20, 31, 32, 0.875, (36, 55), 2, 12),  # 11.5
        (36, 77, 32, 0.875, (36, 77), 2, 22),  # no resize; 22.5
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_eval_equals_pillow(width, height, size, fraction, resized, left, top, channels):
    pixels = natural(height, width)
    for data in (encode(pixels), encode(pixels, "PNG"), pixels):
        picture = Image.open(io.BytesIO(data)) if isinstance(data, bytes) else Image.fromarray(data)
        picture = picture.convert("L" if channels == 1 else "RGB").resize(resized, BICUBIC)
        expected = np.asarray(picture.crop((left, top, left + size, top + size)))
        ours = evaluate(data, size=size, channels=channels, crop_fraction=fraction)
        np.testing.assert_array_equal(ours, expected.reshape(size, size, channels))


@pytest.mark.parametrize("shape", [(32, 32), (32, 32, 1), (32, 32, 3)])
def test_eval_of_the_right_size_is_the_identity(shape):
    pixels = natural(32, 32)[..., : math.prod(shape[2:])].reshape(shape)
    channels = 3 if shape[2:] == (3,) else 1
    result = evaluate(pixels, channels=channels, crop_fraction=1.0)
    np.testing.assert_array_equal(result, pixels.reshape(32, 32, channels))


# Files


RED = (200, 30, 90)
GREY = 88  # of RED: 0.299 * 200 + 0.587 * 30 + 0.114 * 90


def solid(mode: str) -> Image.Image:
    picture = Image.new("RGB", (45, 40), RED)
    if mode.startswith("P"):
        picture = picture.quantize(4)
        picture.info |= {"transparency": bytes([128] * 4)} if mode == "P+transparency" else {}
        return picture
    if mode == "I;16":
        return Image.fromarray(np.full((40, 45), (GREY << 8) + 77, np.uint16))
    return picture.convert(mode)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("format", "mode", "expected"),
    [
        *[("PNG", mode, RED) for mode in ("RGB", "RGBA", "P", "P+transparency")],
        *[("PNG", mode, (GREY,) * 3) for mode in ("L", "LA", "I;16")],
        *[("JPEG", mode, RED) for mode in ("RGB", "CMYK")],
        ("JPEG", "L", (GREY,) * 3),
        ("BMP", "RGB", RED),
        ("TIFF", "CMYK", RED),
        ("WEBP", "RGB", RED),
        ("GIF", "P", RED),
    ],
)
def test_formats_and_modes(format, mode, expected, channels):
    data = encode(solid(mode), format)
    expected = expected if channels == 3 else (GREY,)
    tolerance = 2 if format in ("JPEG", "WEBP") or "P" in mode else 1  # lossy; palettes are rounded too
    for result in (train(data, channels=channels), evaluate(data, channels=channels)):
        assert result.shape == (32, 32, channels)
        assert np.abs(result.reshape(-1, channels).astype(int) - expected).max() <= tolerance


def test_one_bit_images():
    picture = Image.fromarray(np.tile([True, False], (40, 20)))
    assert set(np.unique(evaluate(encode(picture, "PNG"), crop_fraction=0.8))) == {0, 255}


@pytest.mark.parametrize("shape", [(40, 45), (40, 45, 1), (40, 45, 3), (40, 45, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_are_converted(shape, channels):
    pixels = np.zeros(shape, np.uint8)
    pixels[:] = GREY if math.prod(shape[2:]) == 1 else (*RED, 128)[: shape[2]]
    expected = RED if channels == 3 and shape[2:] in ((3,), (4,)) else (GREY,) * channels
    for result in (train(pixels, channels=channels), evaluate(pixels, channels=channels)):
        assert (result == expected).all()


def test_full_size_jpeg_decodes_as_in_pillow():
    """Both link libjpeg-turbo, so training and evaluation see the same pixels; one level for other builds."""
    for options in ({}, {"progressive": True}, {"subsampling": 0}):
        data = encode(natural(77, 91), quality=90, **options)
        assert distance(module.decode_jpeg(data, 3, 1), np.asarray(Image.open(io.BytesIO(data)))).max() <= 1


def test_exif_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, rotated = encode(natural(40, 60)), encode(natural(40, 60), exif=exif)
    assert plain != rotated
    np.testing.assert_array_equal(train(rotated, size=16), train(plain, size=16))
    np.testing.assert_array_equal(evaluate(rotated), evaluate(plain))


def with_thumbnail(data: bytes) -> bytes:
    """The JPEG with a whole small JPEG, end marker included, in an application segment."""
    thumbnail = encode(natural(8, 8))
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + data[2:]


JPEGS = {
    "baseline": lambda: encode(natural(50, 60)),
    "progressive": lambda: encode(natural(50, 60), progressive=True),
    "restart markers": lambda: encode(natural(50, 60), restart_marker_blocks=3),
    "grey": lambda: encode(natural(50, 60)[..., 0]),
    "CMYK": lambda: encode(Image.fromarray(natural(50, 60)).convert("CMYK")),
    "thumbnail": lambda: with_thumbnail(encode(natural(50, 60))),
    "large": lambda: encode(natural(300, 400)),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_truncated_jpeg_is_corrupt(kind):
    data = JPEGS[kind]()
    train(data), evaluate(data)
    cuts = {*range(1, 40), *range(40, len(data), 1 + len(data) // 40), *range(len(data) - 12, len(data))}
    for cut in sorted(cuts):
        for transform in (train, evaluate):
            with pytest.raises(CorruptImage):
                transform(data[:cut])


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("rest", [b"\x00", b"\x00" * 999, b"\xff", b"\xff\xd8 more \xff\xda", b"text\xff\xd9"])
def test_bytes_after_a_jpeg_are_ignored(kind, rest):
    data = JPEGS[kind]()
    np.testing.assert_array_equal(train(data + rest), train(data))
    np.testing.assert_array_equal(evaluate(data + rest), evaluate(data))


def test_zero_filled_tail_is_corrupt():
    """What a crashed file system leaves: the right length, but zeros from some point on."""
    data = JPEGS["large"]()
    for transform in (train, evaluate):
        with pytest.raises(CorruptImage):
            transform(data[: len(data) // 2] + bytes(len(data) // 2))


def test_fill_bytes_before_markers_are_legal():
    data = encode(natural(50, 60))
    np.testing.assert_array_equal(train(data[:2] + b"\xff\xff" + data[2:]), train(data))


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.5, 0.9])
def test_truncated_png_is_corrupt(keep):
    data = encode(natural(50, 60), "PNG")
    for transform in (train, evaluate):
        with pytest.raises(CorruptImage):
            transform(data[: int(keep * len(data))])


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 100, b"not an image", b"\xff\xd8", b"\xff\xd8\xff\xd9", np.random.default_rng(0).bytes(5000)],
    ids=["empty", "zeros", "text", "start", "start and end", "noise"],
)
def test_garbage_is_corrupt(data):
    for transform in (train, evaluate):
        with pytest.raises(CorruptImage, match=f"{len(data)} bytes"):
            transform(data)


@pytest.mark.parametrize(("width", "height"), [(60000, 60000), (11000, 11000), (1500, 60000)])
def test_decompression_bombs_are_corrupt(width, height):
    jpeg = bytearray(encode(natural(50, 60)))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    png = bytearray(encode(natural(50, 60), "PNG"))
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    for data in (bytes(jpeg), bytes(png)):
        for transform in (train, evaluate):
            with pytest.raises(CorruptImage):
                transform(data)


def test_flipped_bytes_never_raise_anything_else():
    data, rng, corrupt = encode(natural(50, 60)), np.random.default_rng(0), 0
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.integers(len(data))] ^= rng.integers(1, 256)
        for transform in (train, evaluate):
            try:
                assert transform(bytes(broken)).shape == (32, 32, 3)
            except CorruptImage:
                corrupt += 1
    assert 0 < corrupt < 600


def test_wrong_arguments_are_named():
    pixels = natural(8, 8)
    with pytest.raises(ValueError, match="channels=2"):
        train(pixels, channels=2)
    with pytest.raises(ValueError, match="float32"):
        evaluate(pixels.astype(np.float32))
    with pytest.raises(ValueError, match=r"crop_fraction=1\.5"):
        evaluate(pixels, crop_fraction=1.5)


def test_opencv_runs_one_thread():
    assert cv2.getNumThreads() == 1
