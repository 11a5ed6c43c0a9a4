"""Sources of labelled images, and their transforms on the host.

A source of images maps 0 ≤ i < len to `{"image": bytes or uint8 array, "label": int}`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanformer.data import source as names
from leanformer.data.images.cache import Cache
from leanformer.data.images.sources import BUNDLED, FASHION, Folder, Idx, Synthetic, Tfds, prepare_tfds
from leanformer.data.source import Kind, Labelled, find
from leanformer.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Requirements of a model on a source of images.

    Attributes:
        image_size: side of the model's images in pixels, or (height, width); the size of images of `synthetic`.
        channels: number of channels of the model's images, 1 or 3.
        num_classes: largest allowed number of classes, None for any; the number of classes of `synthetic`.
        classes: class names in the order of the model's outputs; None for those of the split.
        dir: folder of TFDS data; None for $TFDS_DATA_DIR, else ~/tensorflow_datasets.
    """

    image_size: int | Sequence[int]
    channels: int
    num_classes: int | None
    classes: Sequence[str] | None = None
    dir: str | None = None


KINDS = {  # by the part of `data.name` before the colon
    "tfds": Kind("tfds:<name>", lambda name, split, w: Tfds(name, split, w.dir), build=lambda *a: prepare_tfds(*a[:2])),
    "folder": Kind("folder:<path>", lambda path, split, w: Folder(Path(path).expanduser(), split, w.classes)),
    "cache": Kind("cache:<path>", lambda path, split, w: Cache(Path(path).expanduser(), split, w.channels)),
    "idx": Kind("idx:<path>", lambda path, split, w: Idx(Path(path).expanduser(), split)),
    "bundled": Kind("bundled:fashion_mnist", lambda _, split, w: Idx(BUNDLED, split, FASHION)),
    "synthetic": Kind("synthetic", lambda _, split, w: Synthetic(split, w.image_size, w.channels, w.num_classes or 0)),
}


def open_images(name: str, split: str, **requirements: Any) -> Labelled:
    """Return the source of images of one split of a `data.name`.

    Args:
        name: value of `data.name`, `<type>:<what>` with a type of KINDS.
        split: TFDS split, or name of a folder or stem of a file.
        requirements: attributes of `SourceSpec` as keyword arguments.

    Raises:
        ConfigError: the type is unknown, the name is incomplete.
        DataError: the data are missing or incomplete, or do not fit the model. The message names the place and the
            command that gets them.
    """
    (kind, what), w = find(name, KINDS), SourceSpec(**requirements)
    source = kind.open(what, split, w)
    if len(source) == 0:
        raise DataError(f'data.name="{name}", split "{split}" has no examples. Choose another split.')
    if w.classes and source.classes and list(w.classes) != list(source.classes):
        raise DataError(
            f'data.name="{name}", split "{split}": found classes: {names.quote(source.classes)}. Expected, in this '
            f"order: {names.quote(w.classes)}. Use the data that the model was trained on."
        )
    if None not in (source.num_classes, w.num_classes) and source.num_classes > w.num_classes:
        raise DataError(
            f'data.name="{name}", split "{split}" has {source.num_classes} classes, '
            f"model.num_classes={w.num_classes}. Set --config.model.num_classes={source.num_classes}."
        )
    return source
