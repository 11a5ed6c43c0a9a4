"""Image decoding by OpenCV or Pillow, and folders of smaller images, which load faster than large originals."""

import functools
import hashlib
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from leanformer.data.loader import map_ordered
from leanformer.errors import CorruptExample, DataError
from leanformer.runtime import files


cv2.setNumThreads(0)  # worker processes already use all cores: threads inside OpenCV would only compete with them

MODES = {1: "L", 3: "RGB"}  # of Pillow, by number of channels
MAX_PIXELS = 89_478_485  # a larger claim is a decompression bomb; Pillow warns from here on
QUALITY = 90  # JPEG quality of smaller images
IMAGES_PER_CALL = 1024  # images that a worker process writes per call


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


def shrink_images(source: Any, folder: Path, split: str, *, short_side: int | None, channels: int, workers: int) -> int:
    """Write the images of a split to `<folder>/<split>/<class>/`, to be read as `folder:<folder>`; return their number.

    Larger images are resized to `short_side`, bicubic as in Pillow, and stored as JPEGs of `channels`; others, and
    unreadable ones, keep their bytes, as all do with `short_side=None`. Files that exist are kept, so a killed call can
    be repeated; DataError if they are of other images or another size.
    """
    if not isinstance(source[0]["image"], bytes):
        raise DataError("The data are pixels in memory, not encoded images: smaller ones would save no time.")
    names = [name.replace("/", "_") for name in source.classes or map(str, range(source.num_classes or 0))]
    listed = hashlib.sha256("\n".join(map(source.name, range(len(source)))).encode()).hexdigest()
    recipe, record = {"images": listed, "short_side": short_side, "channels": channels}, folder / f"{split}.json"
    if (folder / split).exists() and not (record.is_file() and files.read_json(record) == recipe):
        raise DataError(f"{folder / split} has other images, or of another size. Choose another folder as --out.")
    files.write_json(record, recipe)
    for name in names:
        (folder / split / name).mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "classes.txt", "\n".join([*names, ""]))
    task = functools.partial(_write_some, source, [folder / split / name for name in names], short_side, channels)
    groups = [list(group) for group in itertools.batched(range(len(source)), IMAGES_PER_CALL)]
    return sum(map_ordered(task, groups, workers))


def _write_some(
    source: Any, folders: Sequence[Path], short_side: int | None, channels: int, indices: Sequence[int]
) -> int:
    for index in indices:
        example = source[index]
        path = folders[example["label"]] / f"{index:08d}"
        if path.with_suffix(".jpg").exists() or path.with_suffix(".png").exists():
            continue
        image = example["image"] if short_side is None else _shrink(example["image"], short_side, channels)
        with files.atomic_write(path.with_suffix(".png" if image.startswith(b"\x89PNG") else ".jpg")) as draft:
            draft.write_bytes(image)
    return len(indices)


def _shrink(image: bytes, short_side: int, channels: int) -> bytes:
    """Return the JPEG of a larger image; the bytes of one that is small or unreadable."""
    try:
        pixels = decode_whole(image, channels)
    except CorruptExample:
        return image
    height, width = pixels.shape[:2]
    if min(height, width) <= short_side:
        return image
    scale = short_side / min(height, width)
    out = io.BytesIO()
    smaller = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    smaller.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()
