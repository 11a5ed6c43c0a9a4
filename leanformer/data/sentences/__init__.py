"""Sentences, and pairs of them, with a label, by the config's words: GLUE's tasks, and any table of such."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer.data.sentences import glue, tables
from leanformer.data.sentences.encoded import Sentences
from leanformer.data.sentences.tables import Columns, Row
from leanformer.data.source import Kind, find, listed, shown
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


ANY = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a model wants of a table.

    Attributes:
        dir: the folder of GLUE's download.
        numbers: whether labels are numbers, and not classes.
        classes: by name, in the order of the model's outputs; those of the table if not given.
    """

    dir: str | None = None
    numbers: bool = False
    classes: Sequence[str] | None = None


Table = tuple[list[Row], tuple[str, ...] | None]  # rows, and classes by name


def open_table(name: str, split: str, **wanted: Any) -> Table:
    """The rows of a split of a `data.name`, one of KINDS, and its classes by name, None where labels are numbers.

    Args:
        wanted: the attributes of `Wanted`.

    Raises:
        ConfigError: a name of no known kind.
        DataError: it is not there, not whole, has no labels, or labels of another kind than is wanted.
    """
    kind, what = find(name, KINDS)
    return kind.open(what, split, Wanted(**wanted))


def open_sentences(name: str, split: str, tokenizer: Tokenizer, **wanted: Any) -> Sentences:
    """The same as a source of tokens. Raises as `open_table`."""
    rows, classes = open_table(name, split, **wanted)
    return Sentences(rows, tokenizer, classes)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of a split, to train a tokenizer on; read when they are asked for. Raises as `open_table`."""

    name: str
    split: str
    dir: str | None
    numbers: bool

    def __iter__(self) -> Iterator[str]:
        rows, _ = open_table(self.name, self.split, dir=self.dir, numbers=self.numbers)
        return (text for row in rows for text in row.texts)

    def identity(self) -> dict[str, Any]:
        """A sum over all of them."""
        digest = hashlib.sha256("\n".join(self).encode()).hexdigest()
        return {"texts": f"{self.name} {self.split}", "sha256": digest}


def _published(task: str, _: str, split: str, w: Wanted) -> Table:
    known, about = glue.TASKS[task], f'data.name="{task}"'
    if w.dir is None:
        raise DataError(f"{about}: say where GLUE's files are, --config.data.dir=FOLDER.")
    _check_kind(about, w, numbers=known.classes is None)
    files, columns = known.find(Path(w.dir).expanduser(), split)
    if known.classes is None:
        label: Any = tables.scores(0.0, known.highest)
    else:
        label = tables.classes({word: number for number, word in enumerate(known.classes)}, known.folder)
    rows = [row for file in files for row in tables.read(file, columns, label, known.torn)]
    return rows, known.classes and tuple(known.classes.values())


def _tsv(path: str, split: str, w: Wanted) -> Table:
    file = Path(path).expanduser() / f"{split}.tsv"
    if not file.is_file():
        names = ", ".join(sorted(found.name for found in file.parent.glob("*.tsv"))) or "none"
        raise DataError(f"There is no {file}: a split is a file. Found there: {names}.")
    with file.open("rb") as opened:
        header = opened.readline().rstrip(b"\r\n").split(b"\t")
    columns = Columns("sentence", "label", "sentence2" if b"sentence2" in header else None)
    if w.numbers:
        return tables.read(file, columns, tables.scores(-ANY, ANY)), None
    names = w.classes or listed(file.parent) or sorted({*tables.words(file, columns)})
    if len(names) < 2:
        raise DataError(f"{file} has the classes {shown(names)}: there is nothing to choose between.")
    return tables.read(file, columns, tables.classes({word: i for i, word in enumerate(names)}, "training")), tuple(
        names
    )


def _check_kind(about: str, w: Wanted, *, numbers: bool) -> None:
    if w.numbers != numbers:
        found, wanted = ("numbers", "model.num_classes=1") if numbers else ("classes", "as many model.num_classes")
        raise DataError(f"{about} has {found} for labels: set {wanted}.")


KINDS = {  # by the word before the colon of `data.name`
    word: Kind(word, functools.partial(_published, word), f"GLUE's {task.folder}, in the folder data.dir")
    for word, task in glue.TASKS.items()
} | {
    "tsv": Kind(
        "tsv:<folder>", _tsv, "of files named by split, .tsv, with a header: sentence, perhaps sentence2, label"
    )
}
