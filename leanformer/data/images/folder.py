"""Source of image files, in one folder per class or listed in split files."""

import errno
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data import source as names
from leanformer.errors import DataError


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")


class Folder:
    """Image files in one folder per class, `<root>/<split>/<class>/<file>`, or listed in a split file.

    A split file `<root>/<split>.txt` has one file per line, relative to the root, optionally followed by a space and
    the class. The default class is the name of the file's folder.

    Args:
        root: root folder.
        split: name of the split.
        classes: class names in order; by default those in `<root>/classes.txt`, else those of this split, sorted.

    Raises:
        DataError: there is no image, or an image has a class that is not in `classes`.
    """

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None):
        if not root.is_dir():
            raise DataError(
                f'data.name="folder:{root}": folder not found. Set the path of the folder that contains {split}/.'
            )
        listing = root / f"{split}.txt"
        pairs, ignored = (_read_split_file(root, listing), []) if listing.is_file() else _scan_folders(root, split)
        if ignored:
            message = f"Ignored in {root}, since not an image in the folder of a class: {names.quote(ignored)}"
            warnings.warn(message, stacklevel=2)
        self.root = str(root)
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
        return {"image": Path(self.name(index)).read_bytes(), "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return str(Path(self.root) / os.fsdecode(self._files[index]))


def _scan_folders(root: Path, split: str) -> tuple[list[tuple[str, str]], list[str]]:
    """List the images in `<root>/<split>/<class>/`, sorted.

    Returns:
        Pairs (file relative to root, class), and the ignored entries: hidden files, such as `._x.jpg` beside `x.jpg`,
        files without the suffix of an image, and files outside class folders.
    """
    entries = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    if not (root / split).is_dir():
        raise DataError(
            f'{root} has neither a folder "{split}" nor a split file "{split}.txt"; found {entries}. '
            "Set data.train_split and data.eval_split to one of these."
        )
    pairs, ignored, classes = [], [], []
    for label, is_folder in sorted((entry.name, _is_folder(entry)) for entry in os.scandir(root / split)):
        if not is_folder or label.startswith("."):
            ignored.append(f"{split}/{label}")
            continue
        classes.append(label)
        entries = sorted(entry.name for entry in os.scandir(root / split / label))
        images = [file for file in entries if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith(".")]
        pairs += [(f"{split}/{label}/{file}", label) for file in images]
        others = [f"{split}/{label}/{file}" for file in sorted(set(entries) - set(images))]
        ignored += others if images else [f"{split}/{label}", *others]  # a folder without images is not a class
    if not pairs:
        raise DataError(
            f"{root / split} has no images in class folders ({len(classes)} class folders found). "
            f"Expected {split}/<class>/<file> with one of {' '.join(IMAGE_SUFFIXES)}, or a split file {split}.txt."
        )
    return pairs, ignored


def _is_folder(entry: os.DirEntry) -> bool:
    """Return True if an entry is a folder; False for symbolic links that are circular or broken."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _read_split_file(root: Path, listing: Path) -> list[tuple[str, str]]:
    """Return (file relative to root, class) per line of a split file. Raise DataError for paths outside the root."""
    pairs = []
    for number, line in enumerate(names.read_lines(listing), 1):
        if not line.strip():
            continue
        file, _, label = line.strip().partition("\t") if "\t" in line else line.strip().partition(" ")
        path = Path(file)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{listing}, line {number}: {file!r} is outside {root}. Use paths relative to that folder.")
        pairs.append((file, label.strip() or path.parent.name))
    return pairs
