"""Encoded images to pixels: JPEGs by OpenCV where it decodes as Pillow does, all else by Pillow."""

import io

import cv2
import numpy as np
from PIL import Image

from leanformer.errors import CorruptExample


# Parallelism comes from worker processes: threads inside OpenCV would only compete with them.
cv2.setNumThreads(0)

MAX_PIXELS = 89_478_485  # a header that claims more is a decompression bomb; it is where Pillow starts to warn


class CorruptImage(CorruptExample):
    """Bytes that cannot be decoded to an image; the message says why."""


def whole(image: bytes | np.ndarray | Image.Image, channels: int) -> np.ndarray:
    """Whole image, (height, width) when `channels` is 1 and (height, width, 3) when it is 3."""
    if isinstance(image, Image.Image):
        try:
            return _pixels(image, channels)
        except Exception as error:  # one of a file is decoded only now, and may be malformed
            raise CorruptImage(f"Pillow cannot decode this image of mode {image.mode}: {error}") from error
    if not isinstance(image, np.ndarray):
        return _decode(image, channels)
    image = image[..., 0] if image.shape[2:] == (1,) else image
    if image.shape[2:] == {1: (), 3: (3,)}[channels]:
        return image
    return np.asarray(Image.fromarray(image).convert({1: "L", 3: "RGB"}[channels]))


def _decode(data: bytes, channels: int) -> np.ndarray:
    """Decodes anything that Pillow reads."""
    jpeg_size(data)  # Pillow does not miss the last two bytes
    try:
        return _pixels(Image.open(io.BytesIO(data)), channels)
    except Exception as error:  # malformed bytes make Pillow's parsers raise almost anything
        raise CorruptImage(f"Pillow cannot decode these {len(data)} bytes: {error}") from error


def _pixels(image: Image.Image, channels: int) -> np.ndarray:
    """Return the pixels of an image of any mode: alpha is dropped, 16-bit grey keeps its high byte."""
    _check_size(*image.size)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # straight to RGB, Pillow warns about transparent palettes
    return np.asarray(image.convert({1: "L", 3: "RGB"}[channels]))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise CorruptImage(f"The header claims {width} x {height} pixels, more than {MAX_PIXELS}.")


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG that OpenCV decodes as Pillow does; None leaves the verdict to Pillow."""
    at, size = 2, None
    if not data.startswith(b"\xff\xd8"):
        return None
    while data[at : at + 2] != b"\xff\xda":  # until the compressed data
        if data[at : at + 1] != b"\xff" or at + 10 > len(data):
            return None
        if data[at + 1] in (0xC0, 0xC1, 0xC2):  # frame: length, precision, height, width, number of components
            height, width = (int.from_bytes(data[i : i + 2]) for i in (at + 5, at + 7))
            _check_size(width, height)
            if data[at + 4] == 8 and data[at + 9] in (1, 3) and height:  # not 12 bits, CMYK, a height that follows
                size = width, height
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
    # Some OpenCV versions return a half-grey image for a truncated file. In compressed data FF D9 can only be
    # the end marker; that of an embedded thumbnail lies before. What follows the marker is ignored.
    if data.rfind(b"\xff\xd9", at) < 0:
        raise CorruptImage(f"Truncated JPEG: no end-of-image marker in {len(data)} bytes.")
    return size


def decode_jpeg(data: bytes, channels: int, shrink: int) -> np.ndarray:
    # The REDUCED_COLOR flags mean BGR. The grey ones carry the scale alone, and combine with RGB.
    scale = 0 if shrink == 1 else getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{shrink}")
    order = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), scale | order | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise CorruptImage(f"OpenCV cannot decode this JPEG of {len(data)} bytes.")
    return pixels
