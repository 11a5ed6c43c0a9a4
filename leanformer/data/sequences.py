"""Sources of token sequences by the config's words: made sets, published files, texts, images as pixels."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data import listops, listops_tsv, made, pathfinder, tokens
from leanformer.data.classes import listed
from leanformer.data.listops_tsv import Published
from leanformer.data.pixels import Cifar10, Pixels, grey
from leanformer.data.source import open_source
from leanformer.data.tokens import Imdb, LabelledText, Pairs, TokenSource
from leanformer.errors import ConfigError, DataError


KINDS = {
    "listops": "a set that `prepare build` made, or the folder of the published basic_{train,val,test}.tsv",
    "pathfinder": "a set that `prepare build` made, or the folder that holds the published pathfinder32/",
    "imdb": "the folder of aclImdb, with train/{neg,pos} and test/{neg,pos}",
    "text": "a folder of files named by split, .tsv, .csv or .jsonl, with columns text and label",
    "pairs": "the folder of the published new_aan_pairs.{train,eval,test}.tsv",
    "pixels": "cifar10:<folder of the binary version>, or any image source, such as pixels:tfds:cifar10",
}
ENCODERS = {"imdb": tokens.encode, "text": tokens.encode, "listops": listops_tsv.encode}  # of files with one example
BUILD = "python -m leanformer.prepare build --config=FILE"


def unknown(name: str) -> str | None:
    """What is wrong with a `data.name` that is no `<kind>:<path>` of a kind in KINDS; None if it is."""
    kind, _, path = name.partition(":")
    known = "\n".join(f"  {kind}:<path>, {what}" for kind, what in KINDS.items())
    return None if kind in KINDS and path else f'data.name="{name}" is no source of sequences. Known:\n{known}'


def open_sequences(
    name: str,
    split: str,
    *,
    dir: str | None,
    recipe: Mapping[str, Any],
    vocabulary: int,
    num_classes: int,
    towers: int,
    max_length: int,
    length: int | None,
    classes: Sequence[str] | None = None,
) -> TokenSource:
    """Opens `<kind>:<path>`, a kind of KINDS.

    Args:
        dir: where TFDS data are, as for `open_source`.
        recipe: what a made set was made of: arguments of `listops.Recipe` or `pathfinder.write`.
        vocabulary, num_classes, towers: of the model, which the source must fit.
        max_length: tokens that are kept of an example.
        length: that every example must have, if they must.
        classes: by name, in the order of the model's outputs; those of this split if not given.

    Raises:
        DataError: it is not there, not whole, made by another recipe, or does not fit the model.
    """
    kind, _, rest = name.partition(":")
    folder = Path(rest).expanduser()
    if kind == "listops":
        source = _listops(folder, split, recipe)
    elif kind == "pathfinder":
        source = _pathfinder(folder, split, recipe)
    elif kind == "imdb":
        source = Imdb(folder, split, max_length)
    elif kind == "text":
        source = _text(folder, split, max_length, classes)
    elif kind == "pairs":
        source = Pairs(folder / f"new_aan_pairs.{split}.tsv", max_length)
    elif kind == "pixels":
        source = _pixels(rest, split, dir, length, num_classes, classes)
    else:
        raise DataError(unknown(name))
    _check_fit(name, split, source, vocabulary, num_classes, towers)
    return source


def encode(name: str, raw: bytes | np.ndarray, length: int) -> np.ndarray:
    """The tokens of one example out of a file: a text, an expression, or for `pixels:` an image of any size.

    Args:
        name: of the source that has such examples.
        length: tokens of an example of `pixels:`.

    Raises:
        DataError: a file holds no example of such a source, or this one holds none.
    """
    kind = name.partition(":")[0]
    try:
        if kind == "pixels":
            return grey(raw, _side(length))
        return ENCODERS[kind](raw)
    except KeyError as error:
        known = ", ".join([*ENCODERS, "pixels"])
        raise DataError(f'A file is no example of data.name="{name}"; it is one of {known}.') from error
    except ValueError as error:
        raise DataError(f"It {error}.") from error


def _check_fit(name: str, split: str, source: TokenSource, vocabulary: int, num_classes: int, towers: int) -> None:
    about = f'data.name="{name}", split "{split}"'
    if len(source) == 0:
        raise DataError(f"{about} holds no example at all.")
    if source.vocabulary > vocabulary:
        raise DataError(
            f"{about} has tokens up to {source.vocabulary - 1}, model.vocabulary={vocabulary} only up to "
            f"{vocabulary - 1}. Set --config.model.vocabulary={source.vocabulary} or more."
        )
    if source.num_classes is not None and source.num_classes > num_classes:
        raise DataError(
            f"{about} has {source.num_classes} classes, model.num_classes={num_classes}. "
            f"Set --config.model.num_classes={source.num_classes}."
        )
    if (towers == 2) != isinstance(source, Pairs):
        raise DataError(f"{about} with model.towers={towers}: pairs need 2, all else 1.")


def _published_listops(folder: Path) -> bool:
    return any(folder.glob("basic_*.tsv"))


def _published_pathfinder(folder: Path) -> bool:
    return (folder / "pathfinder32").is_dir()


def _listops(folder: Path, split: str, recipe: Mapping[str, Any]) -> TokenSource:
    if _published_listops(folder):
        return Published(folder, split)
    _require_made(folder, listops.KIND)
    return listops.ListOps(folder, split, _recipe(recipe))


def _pathfinder(folder: Path, split: str, recipe: Mapping[str, Any]) -> TokenSource:
    if _published_pathfinder(folder):
        chosen = {name: recipe[name] for name in ("contour", "seed") if name in recipe}
        return pathfinder.PublishedPathfinder(folder, split, **chosen)
    _require_made(folder, pathfinder.KIND)
    return pathfinder.Pathfinder(folder, split, recipe)


def _require_made(folder: Path, kind: str) -> None:
    record, kind = made.record_path(folder, kind), kind.lower()
    if not record.is_file():
        raise DataError(
            f"data.name={kind}:{folder} is not there: looked for {record}. Make it, once, with\n  {BUILD}\n"
            f"or name {KINDS[kind]}."
        )


def _recipe(recipe: Mapping[str, Any]) -> listops.Recipe:
    _check_recipe(recipe, listops.KIND, [field.name for field in dataclasses.fields(listops.Recipe)])
    return listops.Recipe(**recipe)


def _check_recipe(recipe: Mapping[str, Any], kind: str, known: Sequence[str]) -> None:
    for name, value in recipe.items():
        if name not in known:
            raise ConfigError(f"data.recipe.{name} is not known; a {kind} set has {', '.join(known)}.")
        if not isinstance(value, int):
            raise ConfigError(f"data.recipe.{name}={value!r} must be a whole number.")


def _text(folder: Path, split: str, max_length: int, classes: Sequence[str] | None) -> LabelledText:
    files = sorted(path for path in folder.glob("*") if path.suffix in (".tsv", ".csv", ".jsonl"))
    chosen = [path for path in files if path.stem == split]
    if len(chosen) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise DataError(f"{folder} should hold one of {split}.tsv, {split}.csv and {split}.jsonl; found {names}.")
    return LabelledText(chosen[0], max_length=max_length, classes=classes or listed(folder))


def _pixels(
    name: str, split: str, dir: str | None, length: int, num_classes: int, classes: Sequence[str] | None
) -> Pixels:
    size = _side(length)
    kind, _, rest = name.partition(":")
    if kind == "cifar10":
        return Pixels(Cifar10(Path(rest).expanduser(), split), size)
    wanted = {"image_size": size, "channels": 3, "num_classes": num_classes, "classes": classes}
    return Pixels(open_source(name, split, dir=dir, **wanted), size)


def _side(length: int) -> int:
    size = round(length**0.5)
    if size * size != length:
        raise ConfigError(f"pixels: needs model.max_length to be a square, such as 1024 for 32 x 32; found {length}.")
    return size


def cores() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(name: str, recipe: Mapping[str, Any]) -> bool:
    """Makes a `listops:` or `pathfinder:` set if it is not there; False for a source that is not made here, and for
    published files.

    Raises:
        ConfigError: a recipe that no set can have.
        DataError: the folder holds something else, or cannot be written.
    """
    kind, _, rest = name.partition(":")
    if kind == "listops" and not _published_listops(Path(rest).expanduser()):
        listops.write(rest, _recipe(recipe))
    elif kind == "pathfinder" and not _published_pathfinder(Path(rest).expanduser()):
        _check_recipe(recipe, pathfinder.KIND, ("contour", "seed", "examples"))
        pathfinder.write(rest, **recipe, workers=cores())
    else:
        return False
    return True
