"""Labelled token sequences, selected by `data.name`: generated datasets, published files, texts, pixels of images.

A source of sequences has examples of `tokens` (and `tokens2` in pairs), int32 (n,), and `label`, int; and attributes
`num_classes`, `classes` and `vocabulary`, one more than the largest id.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data import generated, images, pool
from leanformer.data.sequences import listops, pathfinder, texts
from leanformer.data.sequences.pixels import Cifar10, Pixels, grey
from leanformer.data.sequences.texts import Imdb, LabelledText, Pairs
from leanformer.data.source import Kind, Source, build, find, listed
from leanformer.errors import ConfigError, CorruptExample, DataError


BUILD = "python -m leanformer.prepare build --config=FILE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Requirements of a model on a source of sequences.

    Attributes:
        vocabulary: largest allowed vocabulary size, that of the model.
        num_classes: largest allowed number of classes, that of the model.
        towers: 1, or 2 for pairs of sequences.
        max_length: maximum number of tokens of an example; sources of texts truncate longer ones.
        length: number of tokens that all examples must have; None if they may differ.
        recipe: settings of a generated dataset: arguments of `listops.Recipe` or `pathfinder.write`.
        classes: class names in the order of the model's outputs; None for those of the split.
        dir: folder of TFDS data; None for the default of `images.SourceSpec`.
    """

    vocabulary: int
    num_classes: int
    towers: int
    max_length: int
    length: Any
    recipe: Mapping[str, Any]
    classes: Sequence[str] | None = None
    dir: str | None = None


def open_sequences(name: str, split: str, **requirements: Any) -> Source:
    """Return the source of sequences of one split of a `data.name`.

    Args:
        name: value of `data.name`, `<type>:<what>` with a type of KINDS.
        split: name of the split, such as "train".
        requirements: attributes of `SourceSpec` as keyword arguments.

    Raises:
        ConfigError: the type or a key of the recipe is unknown, the name is incomplete, a value of the recipe is
            invalid, or the length of `pixels:` is not a square.
        DataError: the data are missing or incomplete, have another recipe, or do not fit the model.
    """
    (kind, what), w = find(name, KINDS), SourceSpec(**requirements)
    source = kind.open(what, split, w)
    about = f'data.name="{name}", split "{split}"'
    if len(source) == 0:
        raise DataError(f"{about} has no examples.")
    if source.vocabulary > w.vocabulary:
        raise DataError(
            f"{about} has tokens up to {source.vocabulary - 1}, model.vocabulary={w.vocabulary} only up to "
            f"{w.vocabulary - 1}. Set --config.model.vocabulary={source.vocabulary} or more."
        )
    if source.num_classes is not None and source.num_classes > w.num_classes:
        raise DataError(
            f"{about} has {source.num_classes} classes, model.num_classes={w.num_classes}. "
            f"Set --config.model.num_classes={source.num_classes}."
        )
    if (w.towers == 2) != isinstance(source, Pairs):
        raise DataError(f"{about} with model.towers={w.towers}: pairs need 2, other data 1.")
    return source


def encode(name: str, raw: bytes | np.ndarray, length: int) -> np.ndarray:
    """Return the tokens of one example in a file, int32 or uint8 (n,).

    Args:
        name: value of `data.name`, which determines the type of example: a text, an expression, or an image.
        raw: content of the file; for an image, also its pixels as uint8 array.
        length: number of tokens to which an image is resized, a square; not used for texts and expressions.

    Raises:
        ConfigError: the type of `name` is unknown, or `length` is not a square.
        DataError: files cannot be examples of this type of source, or this one is not a valid expression.
        CorruptImage: the bytes are not an image.
    """
    kind, _ = find(name, KINDS)
    if kind.encode is None:
        types = ", ".join(word for word, kind in KINDS.items() if kind.encode)
        raise DataError(f'data.name="{name}": a file cannot be an example. Use one of {types}.')
    try:
        return kind.encode(raw, length)
    except CorruptExample:
        raise
    except ValueError as error:
        raise DataError(f"It {error}.") from error


def _has_published_listops(folder: Path) -> bool:
    return any(folder.glob("basic_*.tsv"))


def _has_published_pathfinder(folder: Path) -> bool:
    return (folder / "pathfinder32").is_dir()


def _open_listops(path: str, split: str, w: SourceSpec) -> Source:
    folder = Path(path).expanduser()
    if _has_published_listops(folder):
        return listops.Published(folder, split)
    _check_generated(folder, listops.KIND)
    return listops.ListOps(folder, split, _parse_recipe(w.recipe))


def _open_pathfinder(path: str, split: str, w: SourceSpec) -> Source:
    folder, recipe = Path(path).expanduser(), w.recipe
    if _has_published_pathfinder(folder):
        chosen = {name: recipe[name] for name in ("contour", "seed") if name in recipe}
        return pathfinder.PublishedPathfinder(folder, split, **chosen)
    _check_generated(folder, pathfinder.KIND)
    return pathfinder.Pathfinder(folder, split, recipe)


def _check_generated(folder: Path, kind: str) -> None:
    record, kind = generated.record_path(folder, kind), kind.lower()
    if not record.is_file():
        raise DataError(
            f"data.name={kind}:{folder}: {record} not found. Build the dataset once with\n  {BUILD}\n"
            f"or use {KINDS[kind].about}."
        )


def _parse_recipe(recipe: Mapping[str, Any]) -> listops.Recipe:
    _check_recipe(recipe, listops.KIND, [field.name for field in dataclasses.fields(listops.Recipe)])
    return listops.Recipe(**recipe)


def _check_recipe(recipe: Mapping[str, Any], kind: str, names: Sequence[str]) -> None:
    for name, value in recipe.items():
        if name not in names:
            raise ConfigError(f"data.recipe.{name} is unknown. A {kind} dataset has {', '.join(names)}.")
        if not isinstance(value, int):
            raise ConfigError(f"data.recipe.{name}={value!r} must be a whole number.")


def _open_text(path: str, split: str, w: SourceSpec) -> LabelledText:
    folder = Path(path).expanduser()
    files = sorted(path for path in folder.glob("*") if path.suffix in (".tsv", ".csv", ".jsonl"))
    chosen = [path for path in files if path.stem == split]
    if len(chosen) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise DataError(
            f"{folder} must contain exactly one of {split}.tsv, {split}.csv and {split}.jsonl; found {names}."
        )
    return LabelledText(chosen[0], max_length=w.max_length, classes=w.classes or listed(folder))


def _open_pixels(name: str, split: str, w: SourceSpec) -> Pixels:
    size = _side(w.length)
    if name.startswith("cifar10:"):
        return Pixels(Cifar10(name.removeprefix("cifar10:"), split), size)
    options = {"image_size": size, "channels": 3, "num_classes": w.num_classes, "classes": w.classes}
    return Pixels(images.open_images(name, split, dir=w.dir, **options), size)


def _side(length: int) -> int:
    size = round(length**0.5)
    if size * size != length:
        raise ConfigError(f"model.max_length={length}: must be a square for pixels:, such as 1024 for 32 x 32.")
    return size


def _build_listops(path: str, _: str | None, recipe: Mapping[str, Any]) -> bool:
    if missing := not _has_published_listops(Path(path).expanduser()):
        listops.write(path, _parse_recipe(recipe))
    return missing


def _build_pathfinder(path: str, _: str | None, recipe: Mapping[str, Any]) -> bool:
    if missing := not _has_published_pathfinder(Path(path).expanduser()):
        _check_recipe(recipe, pathfinder.KIND, ("contour", "seed", "examples"))
        pathfinder.write(path, **recipe, workers=pool.count_cores())
    return missing


def _build_pixels(name: str, dir: str | None, recipe: Mapping[str, Any]) -> bool:
    return not name.startswith("cifar10:") and build(name, images.KINDS, dir)


KINDS = {  # by the part of `data.name` before the colon
    "listops": Kind(
        "listops:<path>",
        _open_listops,
        about="a dataset of `prepare build`, or the folder of the published basic_{train,val,test}.tsv",
        build=_build_listops,
        encode=lambda raw, _: listops.encode(raw),
    ),
    "pathfinder": Kind(
        "pathfinder:<path>",
        _open_pathfinder,
        about="a dataset of `prepare build`, or the folder that contains the published pathfinder32/",
        build=_build_pathfinder,
    ),
    "imdb": Kind(
        "imdb:<path>",
        lambda path, split, w: Imdb(path, split, w.max_length),
        about="the folder of aclImdb, with train/{neg,pos} and test/{neg,pos}",
        encode=lambda raw, _: texts.encode(raw),
    ),
    "text": Kind(
        "text:<path>",
        _open_text,
        about="a folder of files named by split, .tsv, .csv or .jsonl, with columns text and label",
        encode=lambda raw, _: texts.encode(raw),
    ),
    "pairs": Kind(
        "pairs:<path>",
        lambda path, split, w: Pairs(Path(path).expanduser() / f"new_aan_pairs.{split}.tsv", w.max_length),
        about="the folder of the published new_aan_pairs.{train,eval,test}.tsv",
    ),
    "pixels": Kind(
        "pixels:<source>",
        _open_pixels,
        about="cifar10:<folder of the binary version>, or any image source, such as pixels:tfds:cifar10",
        build=_build_pixels,
        encode=lambda raw, length: grey(raw, _side(length)),
    ),
}
