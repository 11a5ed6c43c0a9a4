"""Labelled token sequences, selected by `data.name`: generated datasets, published files, texts, pixels of images.

A source of sequences has examples of `tokens` (and `tokens2` in pairs), int32 (n,), and `label`, int; and attributes
`num_classes`, `classes` and `vocabulary`, one more than the largest id.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data import images
from leanformer.data.sequences import listops, texts
from leanformer.data.sequences.pixels import Pathfinder, Pixels, grey
from leanformer.data.sequences.texts import Imdb, LabelledText, Pairs
from leanformer.data.source import Kind, Source, find, listed_classes
from leanformer.errors import ConfigError, CorruptExample, DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Requirements of a model on a source of sequences."""

    vocabulary: int
    num_classes: int
    towers: int  # 1, or 2 for pairs of sequences
    max_length: int  # most tokens of an example; sources of texts truncate longer ones
    length: Any  # number of tokens that all examples must have; None if they may differ
    recipe: Mapping[str, Any]  # arguments of `listops.Recipe`, or `contour` and `seed` of `Pathfinder`
    classes: Sequence[str] | None = None  # names in the order of the model's outputs; None: the split's
    dir: str | None = None  # folder of TFDS data


def open_sequences(name: str, split: str, **requirements: Any) -> Source:
    """Return the source of one split of a `data.name`; keyword arguments are fields of `SourceSpec`."""
    (kind, what), spec = find(name, KINDS), SourceSpec(**requirements)
    source = kind.open(what, split, spec)
    about = f'data.name="{name}", split "{split}"'
    for key, found, allowed in (
        ("vocabulary", source.vocabulary, spec.vocabulary),
        ("num_classes", source.num_classes or 0, spec.num_classes),
    ):
        if found > allowed:
            raise DataError(f"{about} needs --config.model.{key}={found} or more; model.{key}={allowed}.")
    if (spec.towers == 2) != isinstance(source, Pairs):
        raise DataError(f"{about} with model.towers={spec.towers}: pairs need 2, other data 1.")
    return source


def encode(name: str, raw: bytes | np.ndarray, length: int) -> np.ndarray:
    """Return the tokens (n,) of a file, or of an image's pixels, which are resized to a square of `length` pixels."""
    word = name.partition(":")[0]
    if word not in ENCODERS:
        raise DataError(f'data.name="{name}": a file cannot be an example. Use one of {", ".join(ENCODERS)}.')
    try:
        return ENCODERS[word](raw, length)
    except CorruptExample:
        raise
    except ValueError as error:
        raise DataError(f"It {error}.") from error


def build_sequences(name: str, dir: str | None, recipe: Mapping[str, Any]) -> bool:
    """Generate ListOps expressions, or download the TFDS images of a `data.name`; return False if nothing is to do."""
    kind, _, what = name.partition(":")
    if kind == "listops" and not listops.is_published(Path(what).expanduser()):
        listops.write(what, listops.Recipe(**recipe))
        return True
    return kind == "pixels" and images.build_images(what, dir)


def _open_listops(path: str, split: str, spec: SourceSpec) -> Source:
    folder = Path(path).expanduser()
    if listops.is_published(folder):
        return listops.Published(folder, split)
    return listops.ListOps(folder, split, listops.Recipe(**spec.recipe))


def _open_text(path: str, split: str, spec: SourceSpec) -> LabelledText:
    folder = Path(path).expanduser()
    files = [folder / f"{split}{suffix}" for suffix in texts.READERS]
    found = [file for file in files if file.is_file()]
    if len(found) != 1:
        raise DataError(f"{folder} must contain exactly one of {', '.join(file.name for file in files)}.")
    return LabelledText(found[0], max_length=spec.max_length, classes=spec.classes or listed_classes(folder))


def _open_pixels(name: str, split: str, spec: SourceSpec) -> Pixels:
    size = _side(spec.length)
    options = {"image_size": size, "channels": 3, "num_classes": spec.num_classes, "classes": spec.classes}
    return Pixels(images.open_images(name, split, dir=spec.dir, **options), size)


def _side(length: int) -> int:
    """Return the side of the square of pixels."""
    size = round(length**0.5)
    if size * size != length:
        raise ConfigError(f"model.max_length={length}: must be a square for pixels:, such as 1024 for 32 x 32.")
    return size


KINDS = {  # by the part of `data.name` before the colon
    "listops": Kind(
        "listops:<path>",
        _open_listops,
        "a dataset of `prepare build`, or the folder of the published basic_{train,val,test}.tsv",
    ),
    "pathfinder": Kind(
        "pathfinder:<path>",
        lambda path, split, spec: Pathfinder(path, split, **spec.recipe),
        "the folder that contains the published pathfinder32/",
    ),
    "imdb": Kind(
        "imdb:<path>",
        lambda path, split, spec: Imdb(path, split, spec.max_length),
        "the folder of aclImdb, with train/{neg,pos} and test/{neg,pos}",
    ),
    "text": Kind(
        "text:<path>", _open_text, "a folder of files named by split, .tsv, .csv or .jsonl, with columns text and label"
    ),
    "pairs": Kind(
        "pairs:<path>",
        lambda path, split, spec: Pairs(Path(path).expanduser() / f"new_aan_pairs.{split}.tsv", spec.max_length),
        "the folder of the published new_aan_pairs.{train,eval,test}.tsv",
    ),
    "pixels": Kind("pixels:<source>", _open_pixels, "any image source, such as pixels:tfds:cifar10"),
}
ENCODERS: Mapping[str, Callable[[Any, int], np.ndarray]] = {  # from the content of a file, and a number of tokens
    "listops": lambda raw, _: listops.encode(raw),
    "imdb": lambda raw, _: texts.encode(raw),
    "text": lambda raw, _: texts.encode(raw.rstrip(b"\r\n")),  # a row of a table has no line break
    "pixels": lambda raw, length: grey(raw, _side(length)),
}
