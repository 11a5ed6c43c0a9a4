"""Sources of images: folders of files, IDX files with the bundled Fashion-MNIST, TensorFlow Datasets, synthetic."""

import gzip
import os
import re
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from leanformer.config.rules import image_sides
from leanformer.data import fingerprints
from leanformer.data import source as names
from leanformer.errors import DataError
from leanformer.runtime import files


BUNDLED = Path(__file__).parents[1] / "bundled"
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
# Up to the last suffix of an image that ends a word.
PATH_WITH_SPACES = re.compile(rf"(.*(?:{'|'.join(map(re.escape, IMAGE_SUFFIXES))}))(?: |$)", re.IGNORECASE)


class Folder:
    """Image files in one folder per class, `<root>/<split>/<class>/<file>`, or listed in a split file.

    An example is {"image": content of the file, "label": number of the class}. Files that are not images in the folder
    of a class are ignored with a warning.

    A split file `<root>/<split>.txt` has one file per line, relative to the root, optionally followed by a tab, or a
    space, and the class. Without a tab, the file ends with the last suffix of an image, so that it may have spaces. The
    default class is the name of the file's folder.

    Args:
        root: folder of the dataset.
        split: name of the split.
        classes: class names in order; None for those in `<root>/classes.txt`, else those of this split, sorted.

    Raises:
        DataError: there is no image, an image has a class that is not in `classes`, or a split file lists a path
            outside the root.
    """

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None):
        if not root.is_dir():
            raise DataError(
                f'data.name="folder:{root}": folder not found. Set the path of the folder that contains {split}/.'
            )
        listing = root / f"{split}.txt"
        pairs, ignored = (_read_split_file(root, listing), []) if listing.is_file() else _scan_folders(root, split)
        if ignored:
            message = f"Ignored in {root}, because they are not images in the folder of a class: {names.quote(ignored)}"
            warnings.warn(message, stacklevel=2)
        self.root, self._listed = str(root), listing.is_file()
        present = sorted({label for _, label in pairs})
        self.classes = list(classes or names.listed(root) or present)
        self.num_classes = len(self.classes)
        number = names.numbers(present, self.classes, f'data.name="folder:{root}", split "{split}"')
        # A byte array, since a million Python strings would be copied one by one into every worker.
        self._files = np.array([os.fsencode(file) for file, _ in pairs])
        self._labels = np.array([number[label] for _, label in pairs], np.int32)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": files.read_input(Path(self.name(index))), "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return str(Path(self.root) / os.fsdecode(self._files[index]))

    @property
    def files(self) -> list[bytes]:
        """File names as bytes, relative to the root, if a split file lists them; [] otherwise."""
        return self._files.tolist() if self._listed else []

    def fingerprint(self) -> dict[str, str]:
        """Return digests of file names, classes and file sizes by the keys "names", "classes" and "sizes of files"."""
        sizes = fingerprints.digest_sizes(self.name, len(self))
        return {
            "names": fingerprints.digest(self._files),
            "classes": fingerprints.digest(self._labels, "\n".join(self.classes).encode(errors="surrogateescape")),
            "sizes of files": sizes,
        }


def _scan_folders(root: Path, split: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the images in `<root>/<split>/<class>/`, sorted, as pairs (file relative to root, class); and the ignored
    entries: hidden files, such as `._x.jpg` beside `x.jpg`, files without the suffix of an image, pipes, devices, and
    files outside class folders.
    """
    entries = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    if not (root / split).is_dir():
        raise DataError(
            f'{root} has neither a folder "{split}" nor a split file "{split}.txt"; found {entries}. '
            "Set data.train_split and data.eval_split to one of these."
        )
    pairs, ignored, classes = [], [], []
    for label in sorted(entry.name for entry in os.scandir(root / split)):
        if not (root / split / label).is_dir() or label.startswith("."):
            ignored.append(f"{split}/{label}")
            continue
        classes.append(label)
        entries = sorted(os.scandir(root / split / label), key=lambda entry: entry.name)
        images = [entry.name for entry in entries if _is_image(entry)]
        pairs += [(f"{split}/{label}/{file}", label) for file in images]
        others = [f"{split}/{label}/{file}" for file in sorted({entry.name for entry in entries} - {*images})]
        ignored += others if images else [f"{split}/{label}", *others]  # a folder without images is not a class
    if not pairs:
        raise DataError(
            f"{root / split} has no images in class folders ({len(classes)} class folders found). "
            f"Expected {split}/<class>/<file> with one of {' '.join(IMAGE_SUFFIXES)}, or a split file {split}.txt."
        )
    return pairs, ignored


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a folder is an image by its name; False for folders, pipes and devices."""
    if entry.name.startswith(".") or not entry.name.lower().endswith(IMAGE_SUFFIXES):
        return False
    if entry.is_dir():
        return False
    return entry.is_file() or not files.is_special(Path(entry.path))  # a link without its file is an unreadable image


def _read_split_file(root: Path, listing: Path) -> list[tuple[str, str]]:
    """Return (file relative to root, class) per line of a split file.

    Raises:
        DataError: a path is outside the root, or an image has no class.
    """
    pairs = []
    for number, line in enumerate(names.read_lines(listing), 1):
        if not line.strip():
            continue
        file, label = _split_line(line.strip())
        path = Path(file)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{listing}, line {number}: {file!r} is outside {root}. Use paths relative to that folder.")
        if not (name := label.strip() or path.parent.name):
            raise DataError(
                f"{listing}, line {number}: {file!r} has no class, and is in no folder that would name one."
            )
        pairs.append((path.as_posix(), name))
    return pairs


def _split_line(line: str) -> tuple[str, str]:
    """Return the file and the class, "" if there is none, in a line of a split file."""
    if "\t" not in line and (match := PATH_WITH_SPACES.match(line)):
        return match[1], line[match.end(1) :]
    file, _, label = line.partition("\t" if "\t" in line else " ")
    return file, label


class Idx:
    """MNIST-format files, `<folder>/<split>-images-idx3-ubyte` and `-labels-idx1-ubyte`, plain or .gz, in memory.

    An example is {"image": uint8 array (height, width), "label": int}.

    Args:
        folder: folder of the files.
        split: beginning of the file names, such as "train".
        classes: class names by label; None for those in `<folder>/classes.txt`. Without either, classes have no names,
            and their number is the largest label plus 1.

    Raises:
        DataError: a file is missing or damaged, images and labels differ in number, or a label is not among the
            classes.
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
                f"{folder}, {split}: label {seen - 1} found, but there are only {len(self.classes)} classes, from 0."
            )
        self.num_classes = len(self.classes or range(seen))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._images[index], "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return f"{self.folder}, {self.split}, image {index}"

    def fingerprint(self) -> dict[str, str]:
        """Return {"images": digest, "labels": digest} of all images and of all labels, for `data.fingerprints`."""
        return {"images": fingerprints.digest(self._images), "labels": fingerprints.digest(self._labels)}


def _read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic 0, 0, 8, axes, then big-endian sizes, then data."""
    path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
    if path is None:
        present = ", ".join(sorted(p.name for p in folder.glob("*ubyte*"))) or "no IDX file"
        raise DataError(f"{folder} has no {stem} or {stem}.gz; found {present}. Set data.train_split, data.eval_split.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}). Download it again.") from error
    header = 4 + 4 * axes
    if len(raw) < header or raw[:4] != bytes((0, 0, 8, axes)):
        raise DataError(f"{path} is not an IDX file of unsigned bytes with {axes} axes: it starts {raw[:4]!r}.")
    shape = struct.unpack(f">{axes}I", raw[4:header])
    if len(raw) - header != np.prod(shape, dtype=np.int64):
        raise DataError(
            f"{path} should have shape {shape} but has {len(raw) - header} bytes. It is truncated: download it again."
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


class Tfds:
    """Prepared TensorFlow dataset in a random-access format, read without TensorFlow.

    An example is {"image": encoded bytes, "label": int}.

    Args:
        dataset: name in the catalogue of TensorFlow Datasets, such as "imagenet2012".
        split: split of the dataset, also a part such as "train[:90%]".
        dir: folder of prepared datasets; None for $TFDS_DATA_DIR, else ~/tensorflow_datasets.

    Raises:
        DataError: the dataset is unknown or not prepared, or lacks the split, random access, images or labels.
    """

    def __init__(self, dataset: str, split: str, dir: str | None):
        import tensorflow_datasets as tfds  # slow to import, and needed only by this source

        self.dataset, self.split = dataset, split
        looked = dir or os.environ.get("TFDS_DATA_DIR") or str(Path("~/tensorflow_datasets").expanduser())
        looked = epath.Path(looked).expanduser()
        prepare = f"python -m leanformer.prepare build --config=FILE --config.data.name=tfds:{dataset}"
        try:
            builder: Any = tfds.builder(dataset, data_dir=looked, file_format="array_record")
        except tfds.core.DatasetNotFoundError as error:
            raise DataError(
                f'data.name="tfds:{dataset}" is not a known TFDS dataset, and not prepared in {looked}. '
                "See the list at tensorflow.org/datasets/catalog, or use folder:<path>."
            ) from error
        if not epath.Path(builder.data_dir).exists() or not builder.info.splits:
            raise DataError(
                f'data.name="tfds:{dataset}" is not prepared. Looked in {builder.data_dir}. Prepare it once with\n'
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
            self._examples: Any = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        except NotImplementedError as error:
            raise DataError(
                f"{builder.data_dir} holds {builder.info.file_format.value} files, which have no random access. "
                f"Prepare it again as array_record:\n  {prepare}"
            ) from error
        label = builder.info.features["label"]
        self.num_classes, self.classes = label.num_classes, label.names
        self._version = builder.info.full_name

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._examples[index]
        return {"image": example["image"], "label": int(example["label"])}

    def name(self, index: int) -> str:
        return f"tfds:{self.dataset}, {self.split}, example {index}"

    def fingerprint(self) -> dict[str, str]:
        """Return the full name of the dataset with its version, {"version of the dataset": name}."""
        return {"version of the dataset": self._version}


def prepare_tfds(dataset: str, dir: str | None) -> bool:
    """Download a TensorFlow dataset and prepare it in a random-access format, which needs a network. Return True.

    Args:
        dataset: name in the catalogue of TensorFlow Datasets.
        dir: folder of prepared datasets; None for $TFDS_DATA_DIR, else ~/tensorflow_datasets.

    Raises:
        DataError: the dataset cannot be prepared; the message has the reason.
    """
    import tensorflow_datasets as tfds

    try:
        builder: Any = tfds.builder(dataset, data_dir=dir, file_format="array_record")
        builder.download_and_prepare()
    except ImportError as error:
        raise DataError(
            f"Preparing tfds:{dataset} needs a library that training does not need: {error}. "
            "Install it (usually: pip install tensorflow) in a separate environment and run this command there."
        ) from error
    except Exception as error:  # network, disk, manual downloads: whatever the dataset's own script raises
        raise DataError(f"tfds:{dataset} could not be prepared in {dir or 'the default folder'}: {error}") from error
    return True


class Synthetic:
    """Synthetic images: one random picture per class plus noise. They can be learned and need no files.

    An example is {"image": uint8 array (height, width, channels), "label": index modulo the number of classes}. From 65
    classes on, several share a picture.

    Args:
        split: "train", with 65,536 examples, or any other name, with 2,048.
        image_size: side of the images in pixels, or (height, width).
        channels: number of channels.
        num_classes: number of classes, at least 1.
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
