"""Datasets of Pathfinder images: generated in blocks, written once, memory-mapped; or unpacked from LRA's release."""

import functools
import io
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from leanformer.data import generated
from leanformer.data.images.decoding import CorruptImage, explain
from leanformer.data.pool import map_ordered
from leanformer.data.sequences.pathfinder.paddles import SIZE
from leanformer.data.sequences.pathfinder.snakes import Random, Snakes, distractors, pairs, render
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files


CONTOURS = (6, 9, 14)  # paddles of a target snake; the Long Range Arena uses 14
SPLITS = ("train", "val", "test")
BLOCK = 1000  # images per stream of random numbers
SHUFFLE = 2**64 - 1  # stream of the split assignment
IMAGES, LABELS = "images.npy", "labels.npy"
FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
NUMBER = r"(0|[1-9]\d{0,8})"
END = b"IEND\xaeB`\x82"
IMAGE = re.compile(rf"imgs/{NUMBER}/sample_{NUMBER}\.png", re.ASCII)
KIND = "Pathfinder"
VERSION = 1  # version of the files and of the meaning of a seed


class Block(NamedTuple):
    """Block of BLOCK (1,000) Pathfinder images with the snakes (chains of dashes, the paddles) they were drawn from.

    Attributes:
        images: uint8 (BLOCK, 32, 32).
        labels: uint8 (BLOCK,): 1 if both discs are on one target snake, else 0.
        targets: `Snakes` of (BLOCK, 2, paddles): the two long snakes of each image, which have the discs.
        distractors: `Snakes` of (BLOCK, distractors, paddles): short snakes, a third as long; -1 if it found no place.
        marks: (BLOCK, 2), numbers 0 or 1 of target snakes: the one with a disc at its start, and the one with a disc at
            its end.
        tried: number of candidate pairs of target snakes that were drawn.
        accepted: number of these pairs in which both snakes could be completed, at least BLOCK; the first are used.
    """

    images: np.ndarray
    labels: np.ndarray
    targets: Snakes
    distractors: Snakes
    marks: np.ndarray
    tried: int
    accepted: int


def sample(contour: int, seed: int, block: int) -> Block:
    """Draw block number `block` of a seed's endless sequence of images (half a second on one core at contour 14).

    Args:
        contour: number of paddles (dashes) of a target snake, one of CONTOURS.
        seed: seed of the sequence, 0 <= seed < 2^64.
        block: number of the block, from 0.
    """
    random = Random(seed, contour << 32 | block)
    made = pairs(contour, BLOCK, random)
    short = distractors(made.grid, contour, random)
    labels, start = random.below(2, BLOCK), random.below(2, BLOCK)
    end = np.where(labels, start, 1 - start)
    rows = np.arange(BLOCK)
    images = render(made.snakes, short, made.snakes.at[rows, start, 0], made.snakes.at[rows, end, -1])
    marks = np.stack([start, end], 1)
    return Block(images, labels.astype(np.uint8), made.snakes, short, marks, made.tried, made.accepted)


def write(folder: str | Path, contour: int = 14, seed: int = 0, examples: int = 200_000, workers: int = 1) -> Path:
    """Build a Pathfinder dataset if the folder is missing or empty, in minutes at the published size.

    The folder appears when complete (see `generated.make`): `images.npy` (examples, 32, 32) and `labels.npy`
    (examples,), both uint8. The images are the first ones of the seed's sequence, whatever the number of workers.
    Returns the absolute folder.

    Args:
        folder: folder of the dataset.
        contour: number of paddles (dashes) of a target snake: 6, 9 or 14, from easy to hard.
        seed: seed of the images, 0 <= seed < 2^64.
        examples: number of images, of which 80 % are train, 10 % val and 10 % test.
        workers: number of processes; 1 uses this one. More need an `if __name__ == "__main__"` in a script.

    Raises:
        ConfigError: an argument is out of range.
        DataError: the folder has other content or a dataset of another recipe, or cannot be written.
    """
    if contour not in CONTOURS or not 0 <= seed < 2**64 or examples < 1 or workers < 1:
        raise ConfigError(
            f"Pathfinder with {contour=}, {seed=}, {examples=}, {workers=} is invalid: expected contour 6, "
            "9 or 14, 0 <= seed < 2^64, and at least one example and one worker."
        )
    recipe = {"contour": contour, "seed": seed, "examples": examples}
    return generated.make(folder, KIND, VERSION, recipe, lambda partial: _fill(partial, **recipe, workers=workers))


def _fill(folder: Path, contour: int, seed: int, examples: int, workers: int) -> dict[str, int]:
    left, tried, accepted, blocks = examples, 0, 0, -(-examples // BLOCK)
    draw = functools.partial(_sample_arrays, contour, seed)
    with (folder / IMAGES).open("wb") as images, (folder / LABELS).open("wb") as labels:
        _write_header(images, (left, SIZE, SIZE))
        _write_header(labels, (left,))
        processes = min(workers, blocks) if workers > 1 else 0
        for pictures, answers, drawn, good in map_ordered(draw, range(blocks), processes):
            images.write(pictures[:left].tobytes())
            labels.write(answers[:left].tobytes())
            left -= min(left, BLOCK)
            tried, accepted = tried + drawn, accepted + good
    return {"pairs_tried": tried, "pairs_accepted": accepted}


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _sample_arrays(contour: int, seed: int, block: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Draw a block and return only what is written, so that processes send less."""
    sampled = sample(contour, seed, block)
    return sampled.images, sampled.labels, sampled.tried, sampled.accepted


def split_rows(count: int, split: str, seed: int) -> np.ndarray:
    """Return the indices, int64 (n,), of the examples of a split, in shuffled order.

    Of a seeded shuffle, the first 80 % are train, the next 10 % val, and the rest test.

    Args:
        count: number of examples of all splits together.
        split: "train", "val" or "test".
        seed: seed of the shuffle.

    Raises:
        DataError: the split has another name.
    """
    if split not in SPLITS:
        raise DataError(f'Pathfinder has no split "{split}". Found: {", ".join(SPLITS)}.')
    order = np.argsort(Random(seed, SHUFFLE).below(2**32, count), kind="stable")
    return np.split(order, [count * 8 // 10, count * 9 // 10])[SPLITS.index(split)]


class Pathfinder:
    """Memory-mapped split of a Pathfinder dataset that `write` built.

    An example has `tokens`, int32 (1024,), the grey values 0 to 255 in reading order, and `label`, 0 or 1.

    Args:
        folder: folder of the dataset.
        split: "train", "val" or "test".
        recipe: required values of contour, seed and examples by name; those that it lacks may be any.

    Raises:
        DataError: the dataset or split is missing, has another recipe, or a file was modified.
    """

    num_classes, classes = 2, None
    vocabulary = 256

    def __init__(self, folder: str | Path, split: str, recipe: Mapping[str, int] = MappingProxyType({})):
        self.folder, self.split = Path(folder).expanduser().resolve(), split
        record = generated.read(self.folder, KIND, VERSION, recipe)
        for name in (IMAGES, LABELS):
            generated.check_file(self.folder / name, record)
        self._rows = split_rows(record["recipe"]["examples"], split, record["recipe"]["seed"])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `tokens`, int32 (1024,), and `label`, 0 or 1."""
        row = self._rows[index]
        images, labels = self._data
        return {"tokens": images[row].reshape(-1).astype(np.int32), "label": int(labels[row])}

    @functools.cached_property
    def _data(self) -> tuple[np.ndarray, np.ndarray]:
        return np.load(self.folder / IMAGES, mmap_mode="r"), np.load(self.folder / LABELS, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # A pickled map is a copy of its file: worker processes map it themselves.
        return {key: value for key, value in self.__dict__.items() if key != "_data"}

    def name(self, index: int) -> str:
        return f"{self.folder}, {self.split}, image {self._rows[index]}"


class PublishedPathfinder:
    """Split of the Long Range Arena's published Pathfinder images of 32 x 32 pixels.

    An example has `tokens`, int32 (1024,), the grey values 0 to 255 in reading order, and `label`, 0 or 1.

    The files are `<root>/pathfinder32/<contour's folder>/{metadata/<k>.npy, imgs/<k>/sample_<i>.png}`. In spite of
    their names the metadata are lines of text: folder, file, number, label, and the generator's parameters. They are
    read as that or as arrays of strings, which the generator writes; never unpickled. Paths of any other form than the
    above are refused. Empty image files, of which the release has a few, are left out, and counted in `skipped`.
    Published code shuffles without a seed, so its splits cannot be reproduced; here `seed` determines them.

    Args:
        root: folder that contains pathfinder32.
        split: "train", "val" or "test".
        contour: number of paddles (dashes) of a target snake: 6, 9 or 14.
        seed: seed of the shuffle, see `split_rows`.

    Raises:
        ConfigError: the contour was not published.
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
    data = files.read_input(path)
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
    data = files.read_input(path)
    if END not in data:  # Pillow accepts a file without it
        raise CorruptImage(f"{path} ({len(data)} bytes) is truncated: it has no PNG end chunk")
    try:
        picture = Image.open(io.BytesIO(data), formats=("PNG",))
        shape, pixels = (picture.mode, picture.size), None
        if shape == ("L", (SIZE, SIZE)):
            pixels = np.asarray(picture)
    except Exception as error:  # malformed bytes make Pillow's parser raise almost anything
        raise CorruptImage(f"Pillow cannot decode {path} ({len(data)} bytes): {explain(error)}") from error
    if pixels is None:
        raise DataError(f"{path} has mode and size {shape}; published images have ('L', (32, 32)), 8-bit grey.")
    return pixels
