"""Images in folders, one a class, or listed in split files."""

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
    """Image files in a folder per class, `<root>/<split>/<class>/<file>`, or named by a split file.

    A split file `<root>/<split>.txt` has one file a line, relative to the root, then optionally a space and the
    class; without one the class is the name of the file's folder.

    Args:
        classes: by name, number 0 first; by default what `<root>/classes.txt` lists, else those of this split, sorted.

    Raises:
        DataError: no image is there, or one of a class that is none of `classes`.
    """

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None):
        if not root.is_dir():
            raise DataError(f'data.name="folder:{root}": there is no such folder. Give the path that holds {split}/.')
        listing = root / f"{split}.txt"
        pairs, aside = (_listed(root, listing), []) if listing.is_file() else _scanned(root, split)
        if aside:
            said = f"Left aside in {root}, for they are no images in a folder of a class: {names.shown(aside)}"
            warnings.warn(said, stacklevel=2)
        self.root = str(root)
        found = sorted({label for _, label in pairs})
        self.classes = list(classes or names.listed(root) or found)
        self.num_classes = len(self.classes)
        number = names.numbers(found, self.classes, f'data.name="folder:{root}", split "{split}"')
        # Byte arrays: a million Python strings would be copied, object by object, into every worker.
        self._files = np.array([os.fsencode(file) for file, _ in pairs])
        self._labels = np.array([number[label] for _, label in pairs], np.int32)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Path(self.name(index)).read_bytes(), "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return str(Path(self.root) / os.fsdecode(self._files[index]))


def _scanned(root: Path, split: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(file relative to root, class) for every image in `<root>/<split>/<class>/`, sorted; and what was left aside:
    hidden files, such as `._x.jpg` beside `x.jpg`, and what has no image's suffix or stands elsewhere."""
    found = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    if not (root / split).is_dir():
        raise DataError(
            f'{root} has neither a folder "{split}" nor a split file "{split}.txt"; found {found}. '
            "Set data.train_split and data.eval_split to what is there."
        )
    pairs, aside, classes = [], [], []
    for label, is_folder in sorted((entry.name, _is_folder(entry)) for entry in os.scandir(root / split)):
        if not is_folder or label.startswith("."):
            aside.append(f"{split}/{label}")
            continue
        classes.append(label)
        found = sorted(entry.name for entry in os.scandir(root / split / label))
        images = [file for file in found if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith(".")]
        pairs += [(f"{split}/{label}/{file}", label) for file in images]
        others = [f"{split}/{label}/{file}" for file in sorted(set(found) - set(images))]
        aside += others if images else [f"{split}/{label}", *others]  # a class without an image is none
    if not pairs:
        raise DataError(
            f"{root / split} holds no image in a folder of its class ({len(classes)} class folders found). "
            f"Wanted {split}/<class>/<file> with one of {' '.join(IMAGE_SUFFIXES)}, or a split file {split}.txt."
        )
    return pairs, aside


def _is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder; False for a symbolic link that leads to itself, as for one to nowhere."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _listed(root: Path, listing: Path) -> list[tuple[str, str]]:
    """(file relative to root, class) for every line of a split file; refuses paths that leave the root."""
    pairs = []
    for number, line in enumerate(names.read_lines(listing), 1):
        if not line.strip():
            continue
        file, _, label = line.strip().partition("\t") if "\t" in line else line.strip().partition(" ")
        path = Path(file)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{listing}, line {number}: {file!r} leaves {root}. Paths are relative to that folder.")
        pairs.append((file, label.strip() or path.parent.name))
    return pairs
