"""Where examples come from: anything with a length and random access.

A source of images maps 0 ≤ i < len to `{"image": bytes or uint8 array, "label": int}`. Sources are picklable, since
worker processes hold copies.
"""

import gzip
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from leanformer.config.rules import sides
from leanformer.data import classes as names
from leanformer.data.cache import Cache
from leanformer.data.folder import Folder
from leanformer.errors import DataError


BUNDLED = Path(__file__).parent / "bundled"
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@runtime_checkable
class Source(Protocol):
    """Examples with random access. One without a length is endless; it can be trained on.

    Where examples have labels it has `num_classes`, None where the data do not say; and `classes`, their names, number
    0 first, None where they have none.
    """

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Which example that is, in words."""


def size(source: Source) -> int | None:
    """How many examples a source has; None of an endless one."""
    return len(source) if hasattr(source, "__len__") else None


def open_source(
    name: str,
    split: str,
    *,
    dir: str | None = None,
    image_size: int | Sequence[int],
    channels: int,
    num_classes: int,
    classes: Sequence[str] | None = None,
) -> Source:
    """Opens `tfds:<name>`, `folder:<path>`, `cache:<path>`, `idx:<path>`, `bundled:fashion_mnist` or `synthetic`.

    Args:
        split: a TFDS split, or the name of a folder or file stem.
        dir: where TFDS data are; else $TFDS_DATA_DIR, else ~/tensorflow_datasets.
        image_size, channels, num_classes: what the model wants; `synthetic` makes just that.
        classes: by name, in the order of the model's outputs; those of this split if not given.

    Raises:
        DataError: it is not there or not whole: where it was looked for and the command that gets it.
    """
    kind, _, rest = name.partition(":")
    if kind == "tfds":
        source = Tfds(rest, split, dir)
    elif kind == "folder":
        source = Folder(Path(rest).expanduser(), split, classes)
    elif kind == "idx":
        source = Idx(Path(rest).expanduser(), split)
    elif name == "bundled:fashion_mnist":
        source = Idx(BUNDLED, split, FASHION)
    elif kind == "cache":
        source = Cache(Path(rest).expanduser(), split, channels)
    elif name == "synthetic":
        source = Synthetic(split, image_size, channels, num_classes)
    else:
        raise DataError(
            f'data.name="{name}" is unknown: choose tfds:<name>, folder:<path>, cache:<path>, idx:<path>, '
            "bundled:fashion_mnist or synthetic."
        )
    if len(source) == 0:
        raise DataError(f'data.name="{name}", split "{split}" holds no example at all.')
    if classes and source.classes and list(classes) != list(source.classes):
        raise DataError(
            f'data.name="{name}", split "{split}" has the classes {names.shown(source.classes)}, and known are '
            f"{names.shown(classes)}, or in another order. Give the data that the model was trained on."
        )
    if source.num_classes is not None and source.num_classes > num_classes:
        raise DataError(
            f'data.name="{name}", split "{split}" has {source.num_classes} classes, '
            f"model.num_classes={num_classes}. Set --config.model.num_classes={source.num_classes}."
        )
    return source


class Tfds:
    """A prepared TensorFlow Datasets set in a random-access format, read without TensorFlow; images stay encoded."""

    def __init__(self, dataset: str, split: str, dir: str | None):
        import tensorflow_datasets as tfds  # slow to import, and needed by this source alone

        self.dataset, self.split = dataset, split
        looked = dir or os.environ.get("TFDS_DATA_DIR") or str(Path("~/tensorflow_datasets").expanduser())
        prepare = f"python -m leanformer.prepare build --config=FILE --config.data.name=tfds:{dataset}"
        try:
            builder = tfds.builder(dataset, data_dir=looked, file_format="array_record")
        except tfds.core.DatasetNotFoundError as error:
            raise DataError(
                f'data.name="tfds:{dataset}" is no TFDS dataset known here, and none is prepared in {looked}. '
                "See the list at tensorflow.org/datasets/catalog, or use folder:<path>."
            ) from error
        if not Path(builder.data_dir).exists() or not builder.info.splits:
            raise DataError(
                f'data.name="tfds:{dataset}" is not prepared. Looked in {builder.data_dir}. Get it, once, with\n'
                f"  {prepare}\nor point to it with --config.data.dir=DIR or TFDS_DATA_DIR=DIR."
            )
        if split.split("[")[0] not in builder.info.splits:
            raise DataError(
                f'data.name="tfds:{dataset}" has no split "{split}". Found: {", ".join(builder.info.splits)}.'
            )
        if not {"image", "label"} <= set(builder.info.features):
            raise DataError(
                f'data.name="tfds:{dataset}" has the features {", ".join(builder.info.features)}; '
                "image classification needs image and label."
            )
        try:
            self._examples = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        except NotImplementedError as error:
            raise DataError(
                f"{builder.data_dir} holds {builder.info.file_format.value} files, which have no random access. "
                f"Prepare it again as array_record:\n  {prepare}"
            ) from error
        label = builder.info.features["label"]
        self.num_classes, self.classes = label.num_classes, label.names

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._examples[index]
        return {"image": example["image"], "label": int(example["label"])}

    def name(self, index: int) -> str:
        return f"tfds:{self.dataset}, {self.split}, example {index}"


class Idx:
    """MNIST-format files, `<folder>/<split>-images-idx3-ubyte` and `-labels-idx1-ubyte`, plain or .gz, in memory.

    Args:
        classes: the labels by name, if they have any; `<folder>/classes.txt` else.
    """

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None = None):
        self.folder, self.split = str(folder), split
        self.classes = classes or names.listed(folder)
        self._images = _read_idx(folder, f"{split}-images-idx3-ubyte", axes=3)
        self._labels = _read_idx(folder, f"{split}-labels-idx1-ubyte", axes=1)
        if len(self._images) != len(self._labels):
            raise DataError(
                f"{folder}, {split}: {len(self._images)} images but {len(self._labels)} labels; one file is wrong."
            )
        seen = int(self._labels.max(initial=0)) + 1
        if self.classes and seen > len(self.classes):
            raise DataError(
                f"{folder}, {split}: there is a label {seen - 1}, and {len(self.classes)} classes from 0 on."
            )
        self.num_classes = len(self.classes or range(seen))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._images[index], "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return f"{self.folder}, {self.split}, image {index}"


def _read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """One IDX file of unsigned bytes: magic 0, 0, 8, axes, then big-endian sizes, then data."""
    path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
    if path is None:
        found = ", ".join(sorted(p.name for p in folder.glob("*ubyte*"))) or "no IDX file"
        raise DataError(f"{folder} has no {stem} or {stem}.gz; found {found}. Set data.train_split, data.eval_split.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Get it again.") from error
    header = 4 + 4 * axes
    if len(raw) < header or raw[:4] != bytes((0, 0, 8, axes)):
        raise DataError(f"{path} is not an IDX file of unsigned bytes with {axes} axes: it starts {raw[:4]!r}.")
    shape = struct.unpack(f">{axes}I", raw[4:header])
    if len(raw) - header != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path} says {shape} but holds {len(raw) - header} bytes. It is truncated: get it again.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


class Synthetic:
    """Noise around one random picture per class: learnable, endless in kind, free of any file."""

    classes = None

    def __init__(self, split: str, image_size: int | Sequence[int], channels: int, num_classes: int):
        self.split, self.num_classes = split, num_classes
        self._length = 65536 if split == "train" else 2048
        self._salt = 0 if split == "train" else 1
        shape = (min(num_classes, 64), *sides(image_size), channels)
        self._pictures = np.random.default_rng(0).integers(0, 192, shape, dtype=np.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = index % self.num_classes
        picture = self._pictures[label % len(self._pictures)]
        noise = np.random.default_rng((self._salt, index)).integers(0, 64, picture.shape, dtype=np.uint8)
        return {"image": picture + noise, "label": label}

    def name(self, index: int) -> str:
        return f"synthetic {self.split} example {index}"
