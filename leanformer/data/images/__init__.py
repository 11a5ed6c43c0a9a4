"""Images with a label: where they come from, and what the host makes of them.

A source of images maps 0 ≤ i < len to `{"image": bytes or uint8 array, "label": int}`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanformer.data import source as names
from leanformer.data.images import tfds
from leanformer.data.images.cache import Cache
from leanformer.data.images.folder import Folder
from leanformer.data.images.idx import BUNDLED, FASHION, Idx
from leanformer.data.images.synthetic import Synthetic
from leanformer.data.source import Kind, Source, find
from leanformer.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a model wants of a source of images.

    Attributes:
        image_size, channels, num_classes: of the model; `synthetic` makes just that.
        classes: by name, in the order of the model's outputs; those of the split if not given.
        dir: where TFDS data are; else $TFDS_DATA_DIR, else ~/tensorflow_datasets.
    """

    image_size: int | Sequence[int]
    channels: int
    num_classes: int
    classes: Sequence[str] | None = None
    dir: str | None = None


KINDS = {  # by the word before the colon of `data.name`
    "tfds": Kind(
        "tfds:<name>",
        lambda name, split, w: tfds.Tfds(name, split, w.dir),
        build=lambda name, dir, _: tfds.get(name, dir),
    ),
    "folder": Kind("folder:<path>", lambda path, split, w: Folder(Path(path).expanduser(), split, w.classes)),
    "cache": Kind("cache:<path>", lambda path, split, w: Cache(Path(path).expanduser(), split, w.channels)),
    "idx": Kind("idx:<path>", lambda path, split, w: Idx(Path(path).expanduser(), split)),
    "bundled": Kind("bundled:fashion_mnist", lambda _, split, w: Idx(BUNDLED, split, FASHION)),
    "synthetic": Kind("synthetic", lambda _, split, w: Synthetic(split, w.image_size, w.channels, w.num_classes)),
}


def open_images(name: str, split: str, **wanted: Any) -> Source:
    """Opens `<kind>:<what>`, a kind of KINDS.

    Args:
        split: a TFDS split, or the name of a folder or file stem.
        wanted: the attributes of `Wanted`.

    Raises:
        ConfigError: of no kind here, or not whole.
        DataError: it is not there or not whole: where it was looked for and the command that gets it.
    """
    (kind, what), w = find(name, KINDS), Wanted(**wanted)
    source = kind.open(what, split, w)
    if len(source) == 0:
        raise DataError(f'data.name="{name}", split "{split}" holds no example at all.')
    if w.classes and source.classes and list(w.classes) != list(source.classes):
        raise DataError(
            f'data.name="{name}", split "{split}" has the classes {names.shown(source.classes)}, and known are '
            f"{names.shown(w.classes)}, or in another order. Give the data that the model was trained on."
        )
    if source.num_classes is not None and source.num_classes > w.num_classes:
        raise DataError(
            f'data.name="{name}", split "{split}" has {source.num_classes} classes, '
            f"model.num_classes={w.num_classes}. Set --config.model.num_classes={source.num_classes}."
        )
    return source
