"""Published Pathfinder images of the Long Range Arena, unpacked from `lra_release.gz`."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from leanformer.data.images.decoding import CorruptImage
from leanformer.data.sequences.pathfinder.dataset import split_rows
from leanformer.data.sequences.pathfinder.paddles import SIZE
from leanformer.errors import ConfigError, DataError


FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
NUMBER = r"(0|[1-9]\d{0,8})"
END = b"IEND\xaeB`\x82"
IMAGE = re.compile(rf"imgs/{NUMBER}/sample_{NUMBER}\.png", re.ASCII)


class PublishedPathfinder:
    """Split of `<root>/pathfinder32/<contour's folder>/{metadata/<k>.npy, imgs/<k>/sample_<i>.png}`.

    In spite of their names the metadata are lines of text: folder, file, number, label, and the generator's parameters.
    They are read as that or as arrays of strings, which the generator writes; never unpickled. Paths of any other form
    than the above are refused. Empty image files, of which the release has a few, are left out, and counted in
    `skipped`. Published code shuffles without a seed, so its splits cannot be reproduced; here `seed` sets them.

    Raises:
        DataError: files are missing or not as published; from `[]`, an image is not 32 x 32 pixels of 8-bit grey.
        CorruptImage: from `[]`, an image cannot be decoded.
    """

    num_classes, classes = 2, None
    vocabulary = 256

    def __init__(self, root: str | Path, split: str, contour: int = 14, seed: int = 0):
        if contour not in FOLDERS:
            raise ConfigError(f"{contour=} was not published for 32 pixels; found: {', '.join(map(str, FOLDERS))}.")
        self.folder, self.split = Path(root).expanduser().resolve() / "pathfinder32" / FOLDERS[contour], split
        lists = sorted((self.folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))
        if not lists:
            raise DataError(
                f"{self.folder}/metadata has no .npy file. Unpack the Long Range Arena's lra_release.gz and give the "
                "folder that holds pathfinder32/."
            )
        rows = np.concatenate([_listed(path) for path in lists])
        filled = np.array([self._size(*place) > 0 for place in rows[:, :2].tolist()], bool)
        self.skipped = int(len(rows) - filled.sum())
        rows = rows[filled]
        self._rows = rows[split_rows(len(rows), split, seed)]  # rows of folder, file, label

    def _size(self, folder: int, file: int) -> int:
        path = self._path(folder, file)
        try:
            return path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{path} is in the metadata but cannot be found ({error}). Unpack the release anew."
            ) from error

    def _path(self, folder: int, file: int) -> Path:
        return self.folder / "imgs" / str(folder) / f"sample_{file}.png"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `tokens`, int32 (1024,), and `label`, 0 or 1."""
        folder, file, label = self._rows[index].tolist()
        return {"tokens": _pixels(self._path(folder, file)).reshape(-1).astype(np.int32), "label": label}

    def name(self, index: int) -> str:
        return str(self._path(*self._rows[index, :2].tolist()))


def _listed(path: Path) -> np.ndarray:
    """Return an array (rows, 3) of the folder, number and label of each image."""
    data = path.read_bytes()
    try:
        if data.startswith(b"\x93NUMPY"):
            rows = np.load(io.BytesIO(data), allow_pickle=False).astype(str).tolist()
        else:
            rows = [line.split() for line in data.decode("ascii").splitlines()]
        return np.array([_place(row) for row in rows], np.int64).reshape(-1, 3)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not published Pathfinder metadata ({error}). Expected lines such as "
            '"imgs/0 sample_0.png 0 1 ..." or an array of such strings; pickled objects are never read.'
        ) from error


def _place(row: list[str]) -> tuple[int, int, int]:
    match = IMAGE.fullmatch(f"{row[0]}/{row[1]}")
    if not match or row[3] not in ("0", "1"):
        raise ValueError(f"it has the line {' '.join(row)[:99]!r}")
    return int(match[1]), int(match[2]), int(row[3])


def _pixels(path: Path) -> np.ndarray:
    data = path.read_bytes()
    if END not in data:  # Pillow accepts a file without it
        raise CorruptImage(f"{path} ({len(data)} bytes) is truncated: it has no PNG end chunk.")
    try:
        picture = Image.open(io.BytesIO(data), formats=("PNG",))
        shape, pixels = (picture.mode, picture.size), None
        if shape == ("L", (SIZE, SIZE)):
            pixels = np.asarray(picture)
    except Exception as error:  # malformed bytes make Pillow's parser raise almost anything
        raise CorruptImage(f"Pillow cannot decode {path} ({len(data)} bytes): {error}") from error
    if pixels is None:
        raise DataError(f"{path} has mode and size {shape}; published images have ('L', (32, 32)), 8-bit grey.")
    return pixels
