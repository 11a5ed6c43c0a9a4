"""Sources of labelled images, and their transforms on the host.

A source of images maps 0 ≤ i < len to `{"image": bytes or uint8 array, "label": int}`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanformer.data.images import sources
from leanformer.data.images.sources import BUNDLED, FASHION, Folder, Idx, Synthetic, Tfds, prepare_tfds
from leanformer.data.source import Kind, Labelled, find, quote
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
    "tfds": Kind("tfds:<name>", lambda name, split, spec: Tfds(name, split, spec.dir)),
    "folder": Kind("folder:<path>", lambda path, split, spec: Folder(Path(path).expanduser(), split, spec.classes)),
    "idx": Kind("idx:<path>", lambda path, split, spec: Idx(Path(path).expanduser(), split)),
    "bundled": Kind("bundled:fashion_mnist", lambda _, split, spec: Idx(BUNDLED, split, FASHION)),
    "synthetic": Kind(
        "synthetic", lambda _, split, spec: Synthetic(split, spec.image_size, spec.channels, spec.num_classes or 0)
    ),
}


def build(name: str, dir: str | None) -> bool:
    """Download and prepare the data of a `data.name` of type tfds; return False for other types."""
    find(name, KINDS)
    return name.startswith("tfds:") and prepare_tfds(name.removeprefix("tfds:"), dir)


def count_classes(name: str, split: str, dir: str | None = None) -> int | None:
    """Return the number of classes of one split of a `data.name`, without listing all files; None if it is unknown.

    Raises the errors of `open_images`.
    """
    _, what = find(name, KINDS)
    folder = Path(what).expanduser()
    if name.startswith("folder:") and (folder / split).is_dir():
        return sources.count_classes(folder, split)
    return open_images(name, split, image_size=1, channels=3, num_classes=None, dir=dir).num_classes


def open_images(name: str, split: str, **requirements: Any) -> Labelled:
    """Return the source of images of one split of a `data.name`.

    Args:
        name: value of `data.name`, `<type>:<what>` with a type of KINDS.
        split: TFDS split, or name of a folder or stem of a file.
        requirements: attributes of `SourceSpec` as keyword arguments.

    Raises:
        ConfigError: the type is unknown, or the name is incomplete.
        DataError: the data are missing or incomplete, or do not fit the model. The message names the place and the
            command that gets them.
    """
    (kind, what), spec = find(name, KINDS), SourceSpec(**requirements)
    source, about = kind.open(what, split, spec), f'data.name="{name}", split "{split}"'
    if len(source) == 0:
        raise DataError(f"{about} has no examples. Choose another split.")
    if spec.classes and source.classes and list(spec.classes) != list(source.classes):
        raise DataError(f"{about} has the classes {quote(source.classes)}, the model {quote(spec.classes)}.")
    if None not in (source.num_classes, spec.num_classes) and source.num_classes > spec.num_classes:
        raise DataError(
            f"{about} has {source.num_classes} classes, model.num_classes={spec.num_classes}. "
            f"Set --config.model.num_classes={source.num_classes}."
        )
    return source
