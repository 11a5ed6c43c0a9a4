"""Folders of smaller images, which load faster than large originals."""

import functools
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from leanformer.data.images.decoding import CorruptImage, decode_whole
from leanformer.data.pool import map_ordered
from leanformer.data.source import Labelled
from leanformer.errors import DataError
from leanformer.runtime import files


QUALITY = 90  # JPEG quality
IMAGES_PER_CALL = 1024  # images that a worker process writes per call


def write(source: Labelled, folder: Path, split: str, *, short_side: int | None, channels: int, workers: int) -> int:
    """Write the images of a split to `<folder>/<split>/<class>/`, to be read as `folder:<folder>`.

    Larger images are resized to `short_side`, bicubic as in Pillow, and stored as JPEGs; others, and unreadable ones,
    keep their bytes. Files that exist are kept, so a killed call can be repeated.

    Args:
        source: source of encoded images.
        folder: folder to write to; `classes.txt` in it keeps the order of the classes.
        split: name of the split.
        short_side: largest length of the short side in pixels; None keeps all images.
        channels: channels of the model, 1 or 3, which resized images have.
        workers: number of worker processes; 0 for this process.

    Returns:
        The number of images that were written or existed.

    Raises:
        DataError: the source has pixels instead of encoded images.
    """
    if not isinstance(source[0]["image"], bytes):
        raise DataError("The data are pixels in memory, not encoded images: smaller ones would save no time.")
    names = [name.replace("/", "_") for name in source.classes or map(str, range(source.num_classes or 0))]
    for name in names:
        (folder / split / name).mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "classes.txt", "\n".join([*names, ""]))
    task = functools.partial(_write_some, source, [folder / split / name for name in names], short_side, channels)
    groups = [list(group) for group in itertools.batched(range(len(source)), IMAGES_PER_CALL)]
    return sum(map_ordered(task, groups, workers))


def _write_some(
    source: Labelled, folders: Sequence[Path], short_side: int | None, channels: int, indices: Sequence[int]
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
    except CorruptImage:
        return image
    height, width = pixels.shape[:2]
    if min(height, width) <= short_side:
        return image
    scale = short_side / min(height, width)
    out = io.BytesIO()
    smaller = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    smaller.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()
