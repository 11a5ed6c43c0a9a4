"""Sources of images: folders of files, IDX files with the bundled Fashion-MNIST, TensorFlow Datasets, synthetic."""

import gzip
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.config.rules import image_sides
from leanformer.data.source import listed_classes, number_classes, read_names
from leanformer.errors import DataError


BUNDLED = Path(__file__).parents[1] / "bundled"
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")


class Folder:
    """Image files in one folder per class, `<root>/<split>/<class>/<file>`, or listed in a split file.

    A split file `<root>/<split>.txt` has one file per line, relative to the root, optionally followed by a tab and the
    class, or by a space and a class without spaces. The default class is the name of the file's folder.

    Classes are `classes`, else the names in `<root>/classes.txt`, else in this split, sorted.
    """

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None):
        listing = root / f"{split}.txt"
        pairs = _read_split_file(listing) if listing.is_file() else _scan_folders(root, split)
        self.root = str(root)
        present = sorted({label for _, label in pairs})
        self.classes = list(classes or listed_classes(root) or present)
        self.num_classes = len(self.classes)
        number = number_classes(present, self.classes, f'data.name="folder:{root}", split "{split}"')
        # A byte array, since a million Python strings would be copied one by one into every worker.
        self._files = np.array([os.fsencode(file) for file, _ in pairs])
        self._labels = np.array([number[label] for _, label in pairs], np.int32)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Path(self.name(index)).read_bytes(), "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return str(Path(self.root) / os.fsdecode(self._files[index]))


def _scan_folders(root: Path, split: str) -> list[tuple[str, str]]:
    """Return the images in `<root>/<split>/<class>/`, sorted, as pairs (file relative to root, class)."""
    if not (root / split).is_dir():
        raise DataError(
            f'{root} has neither a folder "{split}" nor a split file "{split}.txt". Move the class folders into '
            f"{root / split}, or set data.name, data.train_split and data.eval_split."
        )
    pairs, ignored = [], 0
    for label in _class_folders(root / split):
        files = sorted(path.name for path in (root / split / label).iterdir())
        images = [file for file in files if _is_image(file)]
        pairs += [(f"{split}/{label}/{file}", label) for file in images]
        ignored += len(files) - len(images)
    if not pairs:
        raise DataError(
            f"{root / split} has no images in class folders. Expected {split}/<class>/<file> with one of "
            f"{' '.join(IMAGE_SUFFIXES)}, or a split file {split}.txt."
        )
    if ignored:
        warnings.warn(
            f"Ignored in {root / split}: {ignored} files. Images end in {' '.join(IMAGE_SUFFIXES)}.", stacklevel=3
        )
    return pairs


def _class_folders(folder: Path) -> list[str]:
    """Return the folders in a folder that contain an image, sorted; warns of others that are not empty."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found, others = [], []
    for name in names:
        with os.scandir(folder / name) as entries:
            (found if any(_is_image(entry.name) for entry in entries) else others).append(name)
    if others := [name for name in others if any((folder / name).iterdir())]:
        warnings.warn(f"Left out of {folder}, without an image such as .jpg: {', '.join(others)}.", stacklevel=4)
    return found


def count_classes(root: Path, split: str) -> int:
    """Return the number of classes of a split of a `Folder`, without reading the names of all its files."""
    if (listed := listed_classes(root)) is not None:
        return len(listed)
    listing = root / f"{split}.txt"
    return len({label for _, label in _read_split_file(listing)} if listing.is_file() else _class_folders(root / split))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def _read_split_file(listing: Path) -> list[tuple[str, str]]:
    """Return (file relative to root, class) per line."""
    pairs = []
    for line in read_names(listing):
        file, _, label = line.partition("\t")
        if not label and not file.lower().endswith(IMAGE_SUFFIXES):
            file, _, label = file.rpartition(" ")
        if not (name := label.strip() or Path(file).parent.name):
            raise DataError(f"{listing}: {file!r} has no class, and is in no folder that would name one.")
        pairs.append((Path(file).as_posix(), name))
    return pairs


class Idx:
    """MNIST-format files, `<folder>/<split>-images-idx3-ubyte` and `-labels-idx1-ubyte`, plain or .gz, in memory.

    Without `classes` or `<folder>/classes.txt`, classes have no names, and their number is the largest label plus 1.
    """

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None = None):
        self.folder, self.split = str(folder), split
        self.classes = classes or listed_classes(folder)
        self._images = _read_idx(folder, f"{split}-images-idx3-ubyte", axes=3)
        self._labels = _read_idx(folder, f"{split}-labels-idx1-ubyte", axes=1)
        seen = int(self._labels.max(initial=0)) + 1
        if len(self._images) != len(self._labels) or (self.classes and seen > len(self.classes)):
            raise DataError(
                f"{folder}, {split}: {len(self._images)} images, {len(self._labels)} labels up to {seen - 1}, and "
                f"{len(self.classes or range(seen))} classes do not belong together."
            )
        self.num_classes = len(self.classes or range(seen))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._images[index], "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return f"{self.folder}, {self.split}, image {index}"


def _read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic 0, 0, 8, axes, then big-endian sizes, then data."""
    path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
    if path is None:
        raise DataError(f"{folder} has no {stem} or {stem}.gz. Set data.train_split, data.eval_split.")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:4] != bytes((0, 0, 8, axes)):
        raise DataError(f"{path} is no IDX file of bytes with {axes} axes: it starts {raw[:4]!r}.")
    shape = np.frombuffer(raw, ">u4", axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


class Tfds:
    """Prepared TensorFlow dataset in a random-access format, read without TensorFlow.

    `split` may be a part, such as "train[:90%]".
    """

    def __init__(self, dataset: str, split: str, dir: str | None):
        import tensorflow_datasets as tfds  # slow to import, and needed only by this source

        self.dataset, self.split = dataset, split
        about = f'data.name="tfds:{dataset}", split "{split}", data.dir={dir or "the default folder"}'
        try:
            builder: Any = tfds.builder(dataset, data_dir=dir, file_format="array_record")
            self._examples: Any = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        except Exception as error:  # unknown, not prepared, another format, no such split: whatever TFDS raises
            raise DataError(
                f"{about} cannot be read: {error}\nPrepare it once with\n  python -m leanformer.prepare build "
                f"--config=FILE --config.data.name=tfds:{dataset}\nor set --config.data.dir or TFDS_DATA_DIR."
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


def prepare_tfds(dataset: str, dir: str | None) -> bool:
    """Download a TensorFlow dataset and prepare it in a random-access format. Return True."""
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder(dataset, data_dir=dir, file_format="array_record")
    builder.download_and_prepare()
    return True


class Synthetic:
    """Synthetic images: one random picture per class plus noise. They can be learned and need no files.

    The split "train" has 65,536 examples, any other 2,048. From 65 classes on, several share a picture.
    """

    classes = None

    def __init__(self, split: str, image_size: int | Sequence[int], channels: int, num_classes: int):
        self.split, self.num_classes = split, num_classes
        self._length, self._salt = (65536, 0) if split == "train" else (2048, 1)
        shape = (min(num_classes, 64), *image_sides(image_size), channels)
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
