"""Images as sequences of grey values: the image task and Pathfinder of the Long Range Arena (Tay et al. 2021)."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.images.decoding import decode_whole
from leanformer.data.images.transforms import eval_transform
from leanformer.errors import DataError


def grey(picture: bytes | np.ndarray, size: int) -> np.ndarray:
    """Return the grey values, 0 to 255, of an image's `size`² pixels in raster order, int32.

    The image is resized and centre-cropped as for evaluation. Grey is TensorFlow's, as in LRA: 255.5 / 255 (0.2989 R +
    0.5870 G + 0.1140 B), rounded down. 0 is black: no token stands for padding alone.
    """
    pixels = eval_transform(picture, size=size, channels=3, crop_fraction=1.0)
    # Integer arithmetic, so that the result is the same everywhere: 255.5 / 255 = 511 / 510.
    return (pixels.reshape(-1, 3) @ np.array([2989, 5870, 1140]) * 511 // 5_100_000).astype(np.int32)


class Pixels:
    """Source of the grey values of any source of images, see `grey`."""

    vocabulary = 256

    def __init__(self, source: Any, size: int = 32):
        self.source, self.size = source, size
        self.num_classes, self.classes = source.num_classes, source.classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.source[index]
        return {"tokens": grey(example["image"], self.size), "label": example["label"]}

    def name(self, index: int) -> str:
        return self.source.name(index)


FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}  # by dashes per chain
SPLITS = ("train", "val", "test")
LINE = re.compile(r"imgs/(\d+) sample_(\d+)\.png \d+ ([01])( .*)?", re.ASCII)  # folder, file, label


class Pathfinder:
    """Split of the images in `<root>/pathfinder32/`, a folder of the Long Range Arena's lra_release.gz.

    Two long chains of dashes, some short ones, and two discs, in a grey image of 32 x 32 pixels: is one chain marked at
    both its ends (label 1), or are both chains marked once (label 0)? `contour` is the number of dashes of a chain.

    Empty image files, of which the release has a few, are left out. Of a seeded shuffle, the first 80 % are train, the
    next 10 % val, and the rest test; published code shuffles without a seed, so its splits cannot be reproduced.
    """

    num_classes, classes = 2, None
    vocabulary = 256

    def __init__(self, root: str | Path, split: str, contour: int = 14, seed: int = 0):
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
        return {"tokens": pixels.reshape(-1).astype(np.int32), "label": int(self._rows[index, 2])}

    def name(self, index: int) -> str:
        return str(self._path(*self._rows[index, :2].tolist()))


def _read_list(path: Path) -> list[tuple[int, int, int]]:
    """Return folder, file and label of each image in a list, which is text in spite of its suffix .npy."""
    matches = [LINE.fullmatch(line) for line in path.read_text("ascii", errors="replace").splitlines()]
    if not all(matches):
        raise DataError(f'{path} has other lines than "imgs/0 sample_0.png 0 1 ...". Unpack lra_release.gz again.')
    return [(int(match[1]), int(match[2]), int(match[3])) for match in matches if match]
