"""Labelled sentences and sentence pairs, selected by `data.name`: GLUE's tasks, and .tsv tables."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer.data import delimited
from leanformer.data.sentences import glue, tables
from leanformer.data.sentences.encoded import Sentences
from leanformer.data.sentences.tables import Columns, Row
from leanformer.data.source import Kind, find, listed, quote
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
    """Return the tokenised sentences of one split of a `data.name`.

    The errors are those of `open_table`.

    Args:
        name: name of a GLUE task, such as "sst2", or tsv:<folder>.
        split: stem of the file, such as "train" or "dev".
        tokenizer: tokenizer of the texts.
        requirements: keyword arguments of `SourceSpec`.
    """
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
        """Return {"texts": name and split, "sha256": SHA-256 sum of all texts}, which changes if the texts change.

        The files are read for it.
        """
        digest = hashlib.sha256("\n".join(self).encode()).hexdigest()
        return {"texts": f"{self.name} {self.split}", "sha256": digest}


def _open_glue(task: str, _: str, split: str, w: SourceSpec) -> Table:
    published, about = glue.TASKS[task], f'data.name="{task}"'
    if w.dir is None:
        raise DataError(f"{about}: the folder of GLUE's files is missing. Set --config.data.dir=FOLDER.")
    numbers = published.classes is None
    if w.numbers != numbers:
        labels, setting = ("numbers", "model.num_classes=1") if numbers else ("classes", "as many model.num_classes")
        raise DataError(f"{about} has {labels} as labels: set {setting}.")
    files, columns = published.find(Path(w.dir).expanduser(), split)
    if numbers:
        label: Any = tables.score_parser(0.0, published.highest)
    else:
        label = tables.class_parser({word: number for number, word in enumerate(published.classes)}, published.folder)
    rows = [row for file in files for row in tables.read(file, columns, tables.refuse_hidden(label), published.torn)]
    return rows, None if published.classes is None else tuple(published.classes.values())


def _open_tsv(path: str, split: str, w: SourceSpec) -> Table:
    file = Path(path).expanduser() / f"{split}.tsv"
    if not file.is_file():
        names = ", ".join(sorted(path.name for path in file.parent.glob("*.tsv"))) or "none"
        raise DataError(f"{file} not found: each split needs a file. Found in the folder: {names}.")
    header = delimited.split_header(next(delimited.lines(file), (1, b""))[1])
    if "sentence" in header and "label" not in header:
        raise DataError(f"{file}, line 1 has no column label. Found: {quote(header)}. Add the column, or rename it.")
    columns = Columns("sentence", "label", "sentence2" if "sentence2" in header else None)
    if w.numbers:
        return tables.read(file, columns, tables.score_parser(-math.inf, math.inf)), None
    names = w.classes or listed(file.parent) or sorted({row.label for row in tables.read(file, columns, str)})
    if len(names) < 2:
        raise DataError(f"{file}: found classes: {quote(names)}. At least 2 are needed. Check the column label.")
    label = tables.class_parser({word: i for i, word in enumerate(names)}, "training")
    return tables.read(file, columns, label), tuple(names)


KINDS = {  # by the part of `data.name` before the colon
    word: Kind(word, functools.partial(_open_glue, word), f"GLUE's {task.folder}, in the folder data.dir")
    for word, task in glue.TASKS.items()
} | {
    "tsv": Kind(
        "tsv:<folder>", _open_tsv, "with one .tsv file per split, with a header: sentence, optionally sentence2, label"
    )
}
