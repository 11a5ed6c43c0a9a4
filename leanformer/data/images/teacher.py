"""A teacher's answers about the training examples, worked out beforehand and read as data.

A folder holds `teacher.json`, {"source": data.name, "split": data.train_split, "examples": n}, and either

- `logits.npy`, n V, float16 or float32: logits of whole pictures, for distillation; or
- `classes.npy`, int16, and `scores.npy`, float16 or float32, n rows columns K, as published label maps are: the K best
  classes and their logits in each cell of a grid over the whole picture, for token labelling.

Row i speaks of example i of the training source. Files are memory-mapped and never unpickled. Label maps travel to the
device as they are, K classes a cell, with what the augmented image shows of the picture, and become targets of tokens
there (`distillation.label_tokens`): for 18 x 18 cells and K = 5 that is 6 kB an image, not the 400 kB of its targets.
As in the published way, a view is the random crop and flip; RandAugment's rotations and shifts are not followed.
"""

import functools
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from leanformer.config.rules import sides
from leanformer.data.images.transforms import random_view
from leanformer.data.source import Source
from leanformer.errors import ConfigError, DataError


FLOATS = (np.float16, np.float32)
SAMPLED = 128  # examples whose labels are compared with the teacher's


class _Rows:
    """A memory-mapped array, opened where it is read: copies sent to worker processes hold its path alone."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return _Rows, (self.path,)

    @functools.cached_property
    def array(self) -> np.ndarray:
        try:
            return np.lib.format.open_memmap(self.path, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is not a whole .npy file of numbers ({error}). Make it again.") from error

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array(self.array[index])


class Teacher:
    """What one folder says. `head` names the model's head that learns from it, `agreement` how often it is right.

    Raises:
        DataError: the files do not fit together, the source or the number of classes.
    """

    head: str
    files: tuple[str, ...]

    def __init__(self, folder: Path, source: Source, num_classes: int):
        self.folder, self.num_classes = folder, num_classes
        self.rows = {name: _Rows(folder / f"{name}.npy") for name in self.files}
        shapes = {name: rows.array.shape for name, rows in self.rows.items()}
        kinds = {name: rows.array.dtype for name, rows in self.rows.items()}
        if problem := self._misfit(shapes, kinds):
            found = ", ".join(f"{name}.npy is {kinds[name]} {shape}" for name, shape in shapes.items())
            raise DataError(f"teacher.path={folder}: {found}; {problem}")
        if wrong := [name for name, shape in shapes.items() if shape[0] != len(source)]:
            raise DataError(
                f"{folder / wrong[0]}.npy has {shapes[wrong[0]][0]} rows, the training split {len(source)} examples. "
                "Row i speaks of example i: make the file for the split named by data.train_split."
            )
        self.agreement = self._agreement(source)

    def _misfit(self, shapes: dict[str, tuple[int, ...]], kinds: dict[str, np.dtype]) -> str | None:
        raise NotImplementedError

    def check(self, heads: dict[str, tuple[int, ...]], image_size: int | Sequence[int], patch_size: int) -> None:
        """Raises ConfigError for a model that cannot learn from this; `heads` are its heads' logits of one image."""
        if self.head not in heads:
            raise ConfigError(
                f"teacher.path={self.folder} is for a {self.head} head; the model's are {', '.join(heads) or 'one'}. "
                "logits.npy is for the distilled head of a vit with model.distilled=True, label maps for the tokens "
                "head of a volo with model.token_head=True. Change the model, or unset teacher.path."
            )

    def leaves(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape, without the batch, and dtype of everything that `answer` gives."""
        return {f"teacher_{name}": (rows.array.shape[1:], rows.array.dtype) for name, rows in self.rows.items()}

    def answer(
        self, index: int, picture: bytes | np.ndarray, rng: np.random.Generator, **augment: Any
    ) -> dict[str, np.ndarray]:
        """The leaves of example `index`: its row of each file.

        Args:
            picture: as the source gives it.
            rng: in the state in which `transforms.train_transform` is given its own.
            augment: crop_scale, crop_ratio and flip, as given to it.

        Raises:
            DataError: the row holds what is no logit or no class.
        """
        return {f"teacher_{name}": row for name, row in self._row(index).items()}

    def _row(self, index: int) -> dict[str, np.ndarray]:
        found = {name: rows[index] for name, rows in self.rows.items()}
        if not np.isfinite(found[self.files[-1]]).all():
            raise DataError(f"{self.folder / self.files[-1]}.npy, row {index}, is not finite. Make it again.")
        return found

    def best(self, index: int) -> int:
        """The teacher's class of example `index`."""
        raise NotImplementedError

    def _agreement(self, source: Source) -> float | None:
        hits = []
        for index in np.unique(np.linspace(0, len(source) - 1, SAMPLED).astype(int)).tolist():
            try:
                hits.append(self.best(index) == source[index]["label"])
            except OSError:  # unreadable; the loader counts and names it when its turn comes
                continue
        return float(np.mean(hits)) if hits else None

    def __str__(self) -> str:
        files = " and ".join(f"{name}.npy" for name in self.files)
        if self.agreement is None:
            return f"{files} in {self.folder}; of a sample of its examples none can be read"
        return f"{files} in {self.folder}, right on {100 * self.agreement:.0f} % of a sample of its examples"


class Logits(Teacher):
    """Logits of whole pictures."""

    head, files = "distilled", ("logits",)

    def _misfit(self, shapes: dict[str, tuple[int, ...]], kinds: dict[str, np.dtype]) -> str | None:
        if len(shapes["logits"]) != 2 or kinds["logits"] not in FLOATS:
            return "wanted float16 or float32 (examples, classes)."
        return None if shapes["logits"][1] == self.num_classes else f"model.num_classes={self.num_classes}."

    def best(self, index: int) -> int:
        """The class with the largest logit."""
        return int(self._row(index)["logits"].argmax())


class LabelMaps(Teacher):
    """The best classes of every cell of a grid over the picture."""

    head, files = "tokens", ("classes", "scores")

    def _misfit(self, shapes: dict[str, tuple[int, ...]], kinds: dict[str, np.dtype]) -> str | None:
        ours = kinds["classes"] == np.int16 and kinds["scores"] in FLOATS and len(shapes["classes"]) == 4
        if not ours or shapes["classes"] != shapes["scores"]:
            return "wanted int16 and float16 or float32, both (examples, rows, columns, K)."
        return None

    def check(self, heads: dict[str, tuple[int, ...]], image_size: int | Sequence[int], patch_size: int) -> None:
        """And for tokens that do not tile the image."""
        super().check(heads, image_size, patch_size)
        tokens, (height, width) = heads[self.head][0], sides(image_size)
        side = math.isqrt(height * width // tokens)
        if height % side or width % side or side % patch_size or height * width != tokens * side**2:
            raise ConfigError(
                f"teacher.path={self.folder}: {tokens} square tokens of whole patches of {patch_size} pixels do not "
                f"tile model.image_size={image_size}. Take an image size that is a multiple of {2 * patch_size}."
            )

    def leaves(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """And what the image shows of the picture, `teacher_view`."""
        return super().leaves() | {"teacher_view": ((4,), np.dtype(np.float32))}

    def answer(
        self, index: int, picture: bytes | np.ndarray, rng: np.random.Generator, **augment: Any
    ) -> dict[str, np.ndarray]:
        """And `teacher_view`: top, left, bottom, right in shares of the picture, left beyond right if flipped."""
        width, height = _size(picture)
        scale, ratio, flip = (augment[name] for name in ("crop_scale", "crop_ratio", "flip"))
        (left, top, right, bottom), flipped = random_view(width, height, rng, scale, ratio, flip)
        left, right = (right, left) if flipped else (left, right)
        view = np.array([top / height, left / width, bottom / height, right / width], np.float32)
        return super().answer(index, picture, rng) | {"teacher_view": view}

    def _row(self, index: int) -> dict[str, np.ndarray]:
        found = super()._row(index)
        least, most = found["classes"].min(), found["classes"].max()
        if least < 0 or most >= self.num_classes:
            raise DataError(
                f"{self.folder / 'classes.npy'}, row {index}, has classes {least} to {most}; "
                f"model.num_classes={self.num_classes}."
            )
        return found

    def best(self, index: int) -> int:
        """The class with the largest sum of logits over the cells."""
        row = self._row(index)
        return int(np.bincount(row["classes"].ravel(), row["scores"].ravel()).argmax())


def _size(picture: bytes | np.ndarray) -> tuple[int, int]:
    """Width and height, for bytes from their header."""
    return picture.shape[1::-1] if isinstance(picture, np.ndarray) else Image.open(io.BytesIO(picture)).size


def open_teacher(path: str, source: Source, *, name: str, split: str, num_classes: int) -> Teacher:
    """Opens a folder of answers about a training source.

    Args:
        name, split: of the source, as in data.name and data.train_split.
        num_classes: of the model.

    Raises:
        DataError: it is not there, not whole, or speaks of something else.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(f"teacher.path={path}: there is no such folder. Without one, train on plain labels: unset it.")
    there = sorted(file.name for file in folder.iterdir())
    kinds = [kind for kind in (Logits, LabelMaps) if all(f"{stem}.npy" in there for stem in kind.files)]
    if len(kinds) != 1 or "teacher.json" not in there:
        raise DataError(
            f"teacher.path={path} holds {', '.join(there) or 'nothing'}. Wanted teacher.json and either logits.npy or "
            "classes.npy with scores.npy."
        )
    wanted = {"source": name, "split": split, "examples": len(source)}
    try:
        about = json.loads((folder / "teacher.json").read_text())
        found = {key: about[key] for key in wanted}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'teacher.json'} must be like {json.dumps(wanted)} ({error!r}).") from error
    if found != wanted:
        raise DataError(
            f"{folder / 'teacher.json'} is about {json.dumps(found)}; this run trains on {json.dumps(wanted)}. "
            "Give the teacher of that source; change the file only if examples and order are the same."
        )
    return kinds[0](folder, source, num_classes)
