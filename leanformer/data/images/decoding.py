"""Image decoding by OpenCV or Pillow."""

import io

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from leanformer.errors import CorruptExample


cv2.setNumThreads(0)  # worker processes already use all cores: threads inside OpenCV would only compete with them

MODES = {1: "L", 3: "RGB"}  # of Pillow, by number of channels
MAX_PIXELS = 89_478_485  # a larger claim is a decompression bomb; Pillow warns from here on


def decode_whole(image: bytes | np.ndarray | Image.Image, channels: int) -> np.ndarray:
    """Return an image as uint8, (height, width) for 1 channel and (height, width, 3) for 3 (RGB), without alpha."""
    if isinstance(image, bytes):
        jpeg_size(image)  # raises for truncated JPEGs, which Pillow accepts without the last two bytes
    if not isinstance(image, np.ndarray):
        try:
            return _pixels(Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image, channels)
        except CorruptExample:
            raise
        except Exception as error:  # malformed bytes, decoded only now, make Pillow's parsers raise almost anything
            what = f"these {len(image)} bytes" if isinstance(image, bytes) else f"this image of mode {image.mode}"
            # Pillow's message for an unknown format has the address of an object.
            reason = "not an image in a known format" if isinstance(error, UnidentifiedImageError) else str(error)
            raise CorruptExample(f"Pillow cannot decode {what}: {reason}") from error
    image = image[..., 0] if image.shape[2:] == (1,) else image
    if image.shape[2:] == {1: (), 3: (3,)}[channels]:
        return image
    return np.asarray(Image.fromarray(image).convert(MODES[channels]))


def _pixels(image: Image.Image, channels: int) -> np.ndarray:
    """Return the pixels of an image of any mode; alpha is dropped, and 16-bit grey keeps its high byte."""
    _check_size(*image.size)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # of 16 bits
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise CorruptExample("It has numbers of 32 bits, of which white is unknown. Store 8 or 16 bits")
    elif image.mode == "P":
        image = image.convert("RGBA")  # in a direct conversion to RGB, Pillow warns about transparent palettes
    return np.asarray(image.convert(MODES[channels]))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise CorruptExample(f"The header claims {width} x {height} pixels, more than {MAX_PIXELS:,}. Shrink the image")


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG that OpenCV decodes like Pillow; None for all that Pillow must decode."""
    at, size = 2, None
    if not data.startswith(b"\xff\xd8"):
        return None
    while data[at : at + 2] != b"\xff\xda":  # until the compressed data
        if data[at : at + 1] != b"\xff" or at + 10 > len(data):
            return None
        if data[at + 1] in (0xC0, 0xC1, 0xC2):  # frame: length, precision, height, width, number of components
            height, width = (int.from_bytes(data[i : i + 2]) for i in (at + 5, at + 7))
            _check_size(width, height)
            # Excludes 12 bits, CMYK, and a height given later.
            if data[at + 4] == 8 and data[at + 9] in (1, 3) and height:
                size = width, height
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
    # Some OpenCV versions return a half-grey image for a truncated file. In compressed data FF D9 can only be
    # the end marker; an embedded thumbnail ends earlier. Bytes after the marker are ignored.
    if data.rfind(b"\xff\xd9", at) < 0:
        raise CorruptExample(f"Truncated JPEG: no end-of-image marker in {len(data)} bytes")
    return size


def decode_jpeg(data: bytes, channels: int, shrink: int) -> np.ndarray:
    """Decode a JPEG with OpenCV, at 1 / shrink (1, 2, 4 or 8) of its size, ignoring its EXIF orientation."""
    # The REDUCED_COLOR flags mean BGR. The grey ones only set the scale, and combine with RGB.
    scale = 0 if shrink == 1 else getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{shrink}")
    order = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), scale | order | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise CorruptExample(f"OpenCV cannot decode this JPEG of {len(data)} bytes")
    return pixels
