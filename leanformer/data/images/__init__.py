"""Sources of labelled images, selected by `data.name`, and their transforms on the host.

A source of images maps 0 ≤ i < len to `{"image": bytes or uint8 array, "label": int}`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanformer.data.images import sources
from leanformer.data.images.sources import BUNDLED, FASHION, Folder, Idx, Synthetic, Tfds, prepare_tfds
from leanformer.data.source import Kind, find, quote
from leanformer.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Requirements of a model on a source of images."""

    image_size: int | Sequence[int]  # side of the model's images in pixels, or (height, width)
    channels: int  # of the model's images, 1 or 3
    num_classes: int | None  # most classes, None for any
    classes: Sequence[str] | None = None  # names in the order of the model's outputs; None: the split's
    dir: str | None = None  # folder of TFDS data; None for $TFDS_DATA_DIR, else ~/tensorflow_datasets


KINDS = {  # by the part of `data.name` before the colon
    "tfds": Kind("tfds:<name>", lambda name, split, spec: Tfds(name, split, spec.dir)),
    "folder": Kind("folder:<path>", lambda path, split, spec: Folder(Path(path).expanduser(), split, spec.classes)),
    "idx": Kind("idx:<path>", lambda path, split, spec: Idx(Path(path).expanduser(), split)),
    "bundled": Kind("bundled:fashion_mnist", lambda _, split, spec: Idx(BUNDLED, split, FASHION)),
    "synthetic": Kind(
        "synthetic", lambda _, split, spec: Synthetic(split, spec.image_size, spec.channels, spec.num_classes or 0)
    ),
}


def build_images(name: str, dir: str | None) -> bool:
    """Download and prepare the data of a `data.name` of type tfds; return False for other types."""
    find(name, KINDS)
    return name.startswith("tfds:") and prepare_tfds(name.removeprefix("tfds:"), dir)


def count_classes(name: str, split: str, dir: str | None = None) -> int | None:
    """Return the number of classes of one split, without listing all files; None if it is unknown."""
    _, what = find(name, KINDS)
    folder = Path(what).expanduser()
    if name.startswith("folder:") and (folder / split).is_dir():
        return sources.count_classes(folder, split)
    return open_images(name, split, image_size=1, channels=3, num_classes=None, dir=dir).num_classes


def open_images(name: str, split: str, **requirements: Any) -> Any:
    """Return the source of one split of a `data.name`; keyword arguments are fields of `SourceSpec`."""
    (kind, what), spec = find(name, KINDS), SourceSpec(**requirements)
    source, about = kind.open(what, split, spec), f'data.name="{name}", split "{split}"'
    if spec.classes and source.classes and list(spec.classes) != list(source.classes):
        raise DataError(f"{about} has the classes {quote(source.classes)}, the model {quote(spec.classes)}.")
    if None not in (source.num_classes, spec.num_classes) and source.num_classes > spec.num_classes:
        raise DataError(
            f"{about} has {source.num_classes} classes, model.num_classes={spec.num_classes}. "
            f"Set --config.model.num_classes={source.num_classes}."
        )
    return source
