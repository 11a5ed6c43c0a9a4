"""Labelled sentences and sentence pairs, selected by `data.name`: GLUE's tasks, and .tsv tables."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer.data.sentences.encoded import Sentences
from leanformer.data.sentences.glue import TASKS
from leanformer.data.sentences.tables import Columns, Row, class_parser, read, score_parser
from leanformer.data.source import Kind, find, listed_classes, quote
from leanformer.data.tables import lines
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Requirements of a model on a table of labelled sentences.

    Attributes:
        dir: folder of GLUE's download; None for other data.
        numbers: True if labels are numbers, for a regression; False if they are classes.
        classes: class names in the order of the model's outputs; None for those of the table. GLUE's tasks have fixed
            classes.
    """

    dir: str | None = None
    numbers: bool = False
    classes: Sequence[str] | None = None


Table = tuple[list[Row], tuple[str, ...] | None]  # rows, and classes by name


def open_table(name: str, split: str, **requirements: Any) -> Table:
    """Read the labelled rows of one split of `data.name`.

    Returns (rows, classes): a list of `tables.Row`, and the class names in the order of the labels' numbers, or None if
    labels are numbers (regression).

    Args:
        name: name of a GLUE task, such as "sst2", or tsv:<folder>.
        split: stem of the file, such as "train" or "dev".
        requirements: keyword arguments of `SourceSpec`: `dir` (required for GLUE), `numbers`, `classes`.

    Raises:
        ConfigError: the name is unknown or incomplete.
        DataError: a file is missing or invalid, has no labels, or its labels are not of the type of `numbers`.
    """
    kind, what = find(name, KINDS)
    return kind.open(what, split, SourceSpec(**requirements))


def open_sentences(name: str, split: str, tokenizer: Tokenizer, **requirements: Any) -> Sentences:
    """Return the tokenised sentences of one split of a `data.name`. Like `open_table`, with a tokenizer."""
    rows, classes = open_table(name, split, **requirements)
    return Sentences(rows, tokenizer, classes)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Sentences of a split for training a tokenizer: an iterable of str, with both texts of a pair.

    The files are read at each iteration, which raises the errors of `open_table`.

    Attributes:
        name: value of `data.name`.
        split: name of the split.
        dir: folder of GLUE's download; None for other data.
        numbers: True if labels are numbers instead of classes.
    """

    name: str
    split: str
    dir: str | None
    numbers: bool

    def __iter__(self) -> Iterator[str]:
        rows, _ = open_table(self.name, self.split, dir=self.dir, numbers=self.numbers)
        return (text for row in rows for text in row.texts)

    def identity(self) -> dict[str, Any]:
        """Return {"texts": name and split, "sha256": SHA-256 sum of all texts}, which changes if the texts change."""
        digest = hashlib.sha256("\n".join(self).encode()).hexdigest()
        return {"texts": f"{self.name} {self.split}", "sha256": digest}


def _open_glue(task: str, _: str, split: str, spec: SourceSpec) -> Table:
    published = TASKS[task]
    if spec.dir is None:
        raise DataError(f'data.name="{task}": set --config.data.dir to the folder of GLUE\'s files.')
    if spec.numbers != (published.classes is None):
        wanted = "numbers as labels: set model.num_classes=1" if not spec.numbers else "classes: set model.num_classes"
        raise DataError(f'data.name="{task}" has {wanted}.')
    files, columns = published.find(Path(spec.dir).expanduser(), split)
    if published.classes is None:
        label: Any = score_parser(0.0, published.highest)
    else:
        label = class_parser({word: number for number, word in enumerate(published.classes)})
    rows = [row for file in files for row in read(file, columns, label, published.torn)]
    return rows, None if published.classes is None else tuple(published.classes.values())


def _open_tsv(path: str, split: str, spec: SourceSpec) -> Table:
    file = Path(path).expanduser() / f"{split}.tsv"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in file.parent.glob("*.tsv"))) or "none"
        raise DataError(f"{file} not found: each split needs a file. Found in the folder: {found}.")
    pair = b"sentence2" in next(lines(file), (1, b""))[1].split(b"\t")
    columns = Columns("sentence", "label", "sentence2" if pair else None)
    if spec.numbers:
        return read(file, columns, score_parser(-math.inf, math.inf)), None
    names = spec.classes or listed_classes(file.parent) or sorted({row.label for row in read(file, columns, str)})
    if len(names) < 2:
        raise DataError(f"{file}: found classes: {quote(names)}. At least 2 are needed. Check the column label.")
    return read(file, columns, class_parser({word: i for i, word in enumerate(names)})), tuple(names)


KINDS = {  # by the part of `data.name` before the colon
    word: Kind(word, functools.partial(_open_glue, word), f"GLUE's {task.folder}, in the folder data.dir")
    for word, task in TASKS.items()
} | {
    "tsv": Kind(
        "tsv:<folder>", _open_tsv, "with one .tsv file per split, with a header: sentence, optionally sentence2, label"
    )
}
