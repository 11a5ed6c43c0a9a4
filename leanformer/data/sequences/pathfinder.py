"""Pathfinder of the Long Range Arena (Tay et al. 2021, section 2.2.5), read from its published images.

Two long chains of dashes, some short ones, and two discs, in a grey image of 32 x 32 pixels: is one chain marked at
both its ends (label 1), or are both chains marked once (label 0)? Pixels are tokens, 0 to 255, in reading order.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.images.decoding import decode_whole
from leanformer.errors import ConfigError, DataError


FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}  # by dashes per chain
SPLITS = ("train", "val", "test")
SIZE = 32
LINE = re.compile(r"imgs/(\d+) sample_(\d+)\.png \d+ ([01])( .*)?", re.ASCII)  # folder, file, label


class Pathfinder:
    """Split of the images in `<root>/pathfinder32/`, a folder of the Long Range Arena's lra_release.gz.

    An example has `tokens`, int32 (1024,), the grey values 0 to 255 in reading order, and `label`, 0 or 1. Empty image
    files, of which the release has a few, are left out. Of a seeded shuffle, the first 80 % are train, the next 10 %
    val, and the rest test; published code shuffles without a seed, so its splits cannot be reproduced.

    Args:
        root: folder that contains pathfinder32.
        split: "train", "val" or "test".
        contour: number of dashes of a long chain: 6, 9 or 14, from easy to hard.
        seed: seed of the shuffle.

    Raises:
        ConfigError: the contour was not published.
        DataError: files are missing or not as published.
        CorruptImage: from `[]`, an image cannot be decoded.
    """

    num_classes, classes = 2, None
    vocabulary = 256

    def __init__(self, root: str | Path, split: str, contour: int = 14, seed: int = 0):
        if contour not in FOLDERS:
            raise ConfigError(f"data.recipe.contour={contour}: the published images have 6, 9 or 14.")
        if split not in SPLITS:
            raise DataError(f'Pathfinder has no split "{split}". Found: {", ".join(SPLITS)}.')
        self.folder = Path(root).expanduser().resolve() / "pathfinder32" / FOLDERS[contour]
        lists = sorted((self.folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))
        if not lists:
            raise DataError(f"{self.folder}/metadata not found. Unpack lra_release.gz of the Long Range Arena.")
        rows = [row for path in lists for row in _read_list(path) if self._path(*row[:2]).stat().st_size]
        order = np.random.Generator(np.random.Philox(seed)).permutation(len(rows))
        ends = [len(rows) * 8 // 10, len(rows) * 9 // 10]
        self._rows = np.array(rows)[np.split(order, ends)[SPLITS.index(split)]]

    def _path(self, folder: int, file: int) -> Path:
        return self.folder / "imgs" / str(folder) / f"sample_{file}.png"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = decode_whole(Path(self.name(index)).read_bytes(), channels=1)
        if pixels.shape != (SIZE, SIZE):
            raise DataError(f"{self.name(index)} has the shape {pixels.shape} instead of 32 x 32.")
        return {"tokens": pixels.reshape(-1).astype(np.int32), "label": int(self._rows[index, 2])}

    def name(self, index: int) -> str:
        return str(self._path(*self._rows[index, :2].tolist()))


def _read_list(path: Path) -> list[tuple[int, int, int]]:
    """Return folder, file and label of each image in a list, which is text in spite of its suffix .npy."""
    matches = [LINE.fullmatch(line) for line in path.read_text("ascii", errors="replace").splitlines()]
    if not all(matches):
        raise DataError(f'{path} has other lines than "imgs/0 sample_0.png 0 1 ...". Unpack lra_release.gz again.')
    return [(int(match[1]), int(match[2]), int(match[3])) for match in matches if match]
