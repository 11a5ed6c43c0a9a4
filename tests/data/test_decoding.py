"""Image resizing and decoding against Pillow, and corrupt files."""

import io
import math
import struct

import numpy as np
import pytest
from messages import refuses
from pictures import (
    BICUBIC,
    FULL_CROP,
    apply_eval_transform,
    apply_train_transform,
    draw_crop_box,
    encode,
    make_colour_ramps,
    make_natural_picture,
    pixel_difference,
    roughness,
)
from PIL import Image

from leanformer.data.images import transforms as module
from leanformer.data.images.decoding import jpeg_size
from leanformer.errors import CorruptExample


@pytest.mark.parametrize("length", [101, 225, 256, 320, 375, 448, 560])
def test_training_resize_is_as_sharp_as_pillows(length):
    """The bounds are the measured values, rounded up; without antialiasing the mean distance is 3 to 12."""
    pixels = make_natural_picture(length, length + 31, power=1.0)
    ours = apply_train_transform(pixels, size=224, **FULL_CROP)
    box = draw_crop_box(length + 31, length, np.random.default_rng(0), (1.0, 1.0), (1.0, 1.0))
    expected = np.asarray(Image.fromarray(pixels).resize((224, 224), BICUBIC, box=box))
    assert pixel_difference(ours, expected).mean() < 1.6
    assert 0.93 < roughness(ours) / roughness(expected) < 1.07


@pytest.mark.parametrize(("length", "shrink"), [(447, 1), (448, 2), (894, 2), (896, 4), (1792, 8)])
def test_reduced_decoding_is_close_to_full_decoding(length, shrink, monkeypatch):
    """The lengths need no rounding of the box."""
    data, shrinks = encode(make_natural_picture(length, length, power=1.2), quality=90), []
    decode = module.decode_jpeg
    monkeypatch.setattr(module, "decode_jpeg", lambda *a: (shrinks.append(a[2]), decode(*a))[1])
    ours = apply_train_transform(data, size=224, **FULL_CROP)
    full = Image.open(io.BytesIO(data)).resize((224, 224), BICUBIC)
    assert shrinks == [shrink]
    assert pixel_difference(ours, np.asarray(full)).mean() < 3  # libjpeg averages blocks, a different low-pass filter
    assert 0.9 < roughness(ours) / roughness(np.asarray(full)) < 1.1


def test_reduced_decoding_crops_the_same_region():
    """The box is rounded to whole reduced pixels: at most half of 8 pixels of a ramp of 1/4 level per pixel."""
    picture = make_colour_ramps(1000, 1000)
    data = encode(picture, quality=98, subsampling=0)
    for seed in range(12):
        ours = apply_train_transform(data, seed, size=64, crop_scale=(0.2, 1.0), flip=0.0)
        box = draw_crop_box(1000, 1000, np.random.default_rng(seed), (0.2, 1.0), (3 / 4, 4 / 3))
        expected = Image.fromarray(picture).resize((64, 64), BICUBIC, box=box)
        assert pixel_difference(ours, np.asarray(expected)).max() <= 3


@pytest.mark.parametrize(
    ("width", "height", "size", "fraction", "resized", "left", "top"),
    [
        (500, 375, 224, 0.875, (341, 256), 58, 16),  # 58.5 and 16: Python's round, half to even
        (375, 500, 224, 0.9, (248, 330), 12, 53),
        (90, 67, 32, 1.0, (42, 32), 5, 0),
        (67, 67, 32, 0.875, (36, 36), 2, 2),
        (20, 31, 32, 0.875, (36, 55), 2, 12),  # 11.5
        (36, 77, 32, 0.875, (36, 77), 2, 22),  # no resize; 22.5
        (131, 97, (35, 21), 0.9, (51, 38), 15, 2),  # ResizeKeepRatio of timm: the height of the crop decides
        (30, 60, (35, 21), 0.9, (23, 46), 1, 6),  # its width
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_eval_equals_pillow(width, height, size, fraction, resized, left, top, channels):
    pixels, (rows, columns) = make_natural_picture(height, width), np.broadcast_to(size, 2)
    for data in (encode(pixels), encode(pixels, "PNG"), pixels):
        picture = Image.open(io.BytesIO(data)) if isinstance(data, bytes) else Image.fromarray(data)
        picture = picture.convert("L" if channels == 1 else "RGB").resize(resized, BICUBIC)
        expected = np.asarray(picture.crop((left, top, left + columns, top + rows)))
        ours = apply_eval_transform(data, size=size, channels=channels, crop_fraction=fraction)
        np.testing.assert_array_equal(ours, expected.reshape(rows, columns, channels))


RED = (200, 30, 90)
GREY = 88  # luma of RED: 0.299 * 200 + 0.587 * 30 + 0.114 * 90


def make_solid_image(mode: str) -> Image.Image:
    picture = Image.new("RGB", (45, 40), RED)
    if mode.startswith("P"):
        picture = picture.quantize(4)
        picture.info |= {"transparency": bytes([128] * 4)} if mode == "P+transparency" else {}
        return picture
    if mode == "I;16":
        return Image.fromarray(np.full((40, 45), (GREY << 8) + 77, np.uint16))
    if mode == "1":
        return Image.fromarray(np.full((40, 45), True))
    return picture.convert(mode)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("format", "mode", "expected"),
    [
        *[("PNG", mode, RED) for mode in ("RGB", "RGBA", "P", "P+transparency")],
        *[("PNG", mode, (GREY,) * 3) for mode in ("L", "LA", "I;16")],
        ("PNG", "1", (255,) * 3),
        *[("JPEG", mode, RED) for mode in ("RGB", "CMYK")],
        ("JPEG", "L", (GREY,) * 3),
        ("WEBP", "RGB", RED),
        ("GIF", "P", RED),
    ],
)
def test_formats_and_modes_are_decoded(format, mode, expected, channels):
    data = encode(make_solid_image(mode), format)
    expected = expected if channels == 3 else (255 if mode == "1" else GREY,)
    tolerance = 2 if format in ("JPEG", "WEBP") or "P" in mode else 1  # lossy; palettes are rounded too
    for result in (apply_train_transform(data, channels=channels), apply_eval_transform(data, channels=channels)):
        assert result.shape == (32, 32, channels)
        assert np.abs(result.reshape(-1, channels).astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("shape", [(40, 45), (40, 45, 1), (40, 45, 3), (40, 45, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_are_converted(shape, channels):
    pixels = np.zeros(shape, np.uint8)
    pixels[:] = GREY if math.prod(shape[2:]) == 1 else (*RED, 128)[: shape[2]]
    expected = RED if channels == 3 and shape[2:] in ((3,), (4,)) else (GREY,) * channels
    for result in (apply_train_transform(pixels, channels=channels), apply_eval_transform(pixels, channels=channels)):
        assert (result == expected).all()


def test_full_size_jpeg_decodes_as_in_pillow():
    """Both link libjpeg-turbo, so training and evaluation see the same pixels; one level for other builds."""
    for options in ({}, {"progressive": True}, {"subsampling": 0}):
        data = encode(make_natural_picture(77, 91), quality=90, **options)
        assert pixel_difference(module.decode_jpeg(data, 3, 1), np.asarray(Image.open(io.BytesIO(data)))).max() <= 1


def test_exif_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, rotated = encode(make_natural_picture(40, 60)), encode(make_natural_picture(40, 60), exif=exif)
    assert plain != rotated
    np.testing.assert_array_equal(apply_train_transform(rotated, size=16), apply_train_transform(plain, size=16))
    np.testing.assert_array_equal(apply_eval_transform(rotated), apply_eval_transform(plain))


def add_thumbnail(data: bytes) -> bytes:
    """Return the JPEG with a complete small JPEG, including its end marker, in an application segment."""
    thumbnail = encode(make_natural_picture(8, 8))
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + data[2:]


JPEGS = {
    "baseline": lambda: encode(make_natural_picture(50, 60)),
    "progressive": lambda: encode(make_natural_picture(50, 60), progressive=True),
    "restart markers": lambda: encode(make_natural_picture(50, 60), restart_marker_blocks=3),
    "grey": lambda: encode(make_natural_picture(50, 60)[..., 0]),
    "CMYK": lambda: encode(Image.fromarray(make_natural_picture(50, 60)).convert("CMYK")),
    "thumbnail": lambda: add_thumbnail(encode(make_natural_picture(50, 60))),
    "large": lambda: encode(make_natural_picture(300, 400)),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_truncated_jpeg_is_corrupt(kind):
    data = JPEGS[kind]()
    apply_train_transform(data), apply_eval_transform(data)
    cuts = {*range(1, 40), *range(40, len(data), 1 + len(data) // 40), *range(len(data) - 12, len(data))}
    for cut in sorted(cuts):
        for transform in (apply_train_transform, apply_eval_transform):
            with pytest.raises(CorruptExample):
                transform(data[:cut])
    with pytest.raises(
        CorruptExample
    ):  # OpenCV versions decode such a file differently; a thumbnail's end does not count
        jpeg_size(data[:-2])


@pytest.mark.parametrize("kind", JPEGS)
def test_bytes_after_a_jpeg_are_ignored(kind):
    data = JPEGS[kind]()
    for rest in (b"\x00" * 999, b"\xff", b"\xff\xd8 more \xff\xda", b"text\xff\xd9"):
        np.testing.assert_array_equal(apply_train_transform(data + rest), apply_train_transform(data))
        np.testing.assert_array_equal(apply_eval_transform(data + rest), apply_eval_transform(data))


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", b"\xff\xd8\xff\xd9", encode(make_natural_picture(50, 60), "PNG")[:4000]],
    ids=["empty", "text", "start and end", "truncated PNG"],
)
def test_garbage_is_corrupt(data):
    for transform in (apply_train_transform, apply_eval_transform):
        with refuses(f"{len(data)} bytes", error=CorruptExample):
            transform(data)
