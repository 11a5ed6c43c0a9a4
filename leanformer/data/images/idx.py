"""Source of images in MNIST's IDX format, including the bundled Fashion-MNIST."""

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data import source as names
from leanformer.errors import DataError


BUNDLED = Path(__file__).parents[1] / "bundled"
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


class Idx:
    """MNIST-format files, `<folder>/<split>-images-idx3-ubyte` and `-labels-idx1-ubyte`, plain or .gz, in memory.

    Args:
        folder: folder of the files.
        split: prefix of the file names.
        classes: class names in order; by default those in `<folder>/classes.txt`, if there is one.
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


def _read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic 0, 0, 8, axes, then big-endian sizes, then data."""
    path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
    if path is None:
        present = ", ".join(sorted(p.name for p in folder.glob("*ubyte*"))) or "no IDX file"
        raise DataError(f"{folder} has no {stem} or {stem}.gz; found {present}. Set data.train_split, data.eval_split.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, ValueError) as error:
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
