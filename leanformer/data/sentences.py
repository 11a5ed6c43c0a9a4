"""Labelled sentences and sentence pairs, selected by `data.name`: GLUE's tasks, and .tsv tables."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.source import Kind, find, listed_classes, quote
from leanformer.data.tables import Columns, Row, class_parser, lines, read_table, score_parser
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


Layout = tuple[tuple[Path, ...], Columns]  # files of one split, and their columns


@dataclasses.dataclass(frozen=True)
class Published:
    """Names, columns and classes of the published files of one GLUE task; `find` looks for the files.

    Attributes:
        folder: name of the task's folder in the download.
        columns: `Columns` of the files.
        classes: {label in the files: class name}, in the order of the model's outputs; None if labels are numbers.
        splits: names of the splits that have labels, such as "train"; only error messages use them.
        highest: largest label if labels are numbers; the smallest is 0.
        loose: another published form of the task, a pair ({split: names of its files}, their `Columns`); None if there
            is none.
        torn: largest fraction of lines with too few or too many columns that is skipped; see `read_table`.
    """

    folder: str
    columns: Columns
    classes: Mapping[str, str] | None
    splits: tuple[str, ...] = ("train", "dev")
    highest: float = 5.0
    loose: tuple[Mapping[str, tuple[str, ...]], Columns] | None = None
    torn: float = 0.0  # above 0 for QQP, some of whose lines are damaged: other loaders skip them as well

    def find(self, root: Path, split: str) -> Layout:
        """Return the pair (paths of the files of a split, their columns).

        Args:
            root: folder with the whole download, or only the files of this task.
            split: name of the split, such as "train".

        Raises:
            DataError: there are no such files.
        """
        tried = [(root / self.folder / f"{split}.tsv",), (root / f"{split}.tsv",)]
        for files in tried:
            if files[0].is_file():
                return files, self.columns
        names, columns = self.loose or ({}, self.columns)
        for files in ([root / f"{prefix}{name}" for name in names.get(split, ())] for prefix in ("", "cola_")):
            if files and all(file.is_file() for file in files):
                return tuple(files), columns
        looked = ", ".join([*(str(files[0]) for files in tried), *names.get(split, ())])
        raise DataError(
            f'The split "{split}" of {self.folder} was not found: looked for {looked}. Set --config.data.dir to the '
            f"folder of GLUE's download; it has the splits {', '.join(self.splits)}."
        )


def _by_number(*names: str) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


NLI = {name: name for name in ("entailment", "not_entailment")}
COLA = Columns(3, 1, number=4)  # source, label, the author's mark, sentence
RAW_COLA = {
    "train": ("in_domain_train.tsv",),
    "dev": ("in_domain_dev.tsv", "out_of_domain_dev.tsv"),
    "in_domain_dev": ("in_domain_dev.tsv",),
    "out_of_domain_dev": ("out_of_domain_dev.tsv",),
}
SENTENCES = {split: (f"sst2_{split}.tsv",) for split in ("train", "dev", "test")}

TASKS = {
    "cola": Published("CoLA", COLA, _by_number("unacceptable", "acceptable"), loose=(RAW_COLA, COLA)),
    "sst2": Published(
        "SST-2",
        Columns("sentence", "label"),
        _by_number("negative", "positive"),
        loose=(SENTENCES, Columns(0, 1, number=2)),
    ),
    "mrpc": Published("MRPC", Columns("#1 String", "Quality", "#2 String"), _by_number("not_equivalent", "equivalent")),
    "qqp": Published(
        "QQP", Columns("question1", "is_duplicate", "question2"), _by_number("not_duplicate", "duplicate"), torn=1e-3
    ),
    "stsb": Published("STS-B", Columns("sentence1", "score", "sentence2"), None),
    "mnli": Published(
        "MNLI",
        Columns("sentence1", "gold_label", "sentence2"),
        {name: name for name in ("entailment", "neutral", "contradiction")},
        ("train", "dev_matched", "dev_mismatched"),
    ),
    "qnli": Published("QNLI", Columns("question", "label", "sentence"), NLI),
    "rte": Published("RTE", Columns("sentence1", "label", "sentence2"), NLI),
}


CLS, SEP, PAD = "[CLS]", "[SEP]", "[PAD]"


class Sentences:
    """Rows of a table with random access, tokenised once and stored in memory.

    An example has `tokens`, for a pair also `tokens2`, both int32 (n,) without special tokens, and `label`: the number
    of a class, or a float. Attributes of the source are `num_classes` and `classes` (None if labels are numbers),
    `vocabulary`, `pair` (True for two texts) and `tokenizer` (None in worker processes).

    Args:
        rows: at least one row; all have one text, or all have two.
        tokenizer: tokenizer of the texts.
        classes: class names by number; None if labels are numbers.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, classes: Sequence[str] | None):
        self.classes = None if classes is None else tuple(classes)
        self.num_classes = None if classes is None else len(classes)
        self.vocabulary, self.pair = tokenizer.vocabulary, len(rows[0].texts) == 2
        self.tokenizer = tokenizer
        encoded = (tokenizer.encode(texts) for texts in zip(*(row.texts for row in rows), strict=True))
        self._tokens = [(np.concatenate(texts), np.cumsum([0, *map(len, texts)])) for texts in encoded]
        self._labels = np.array([row.label for row in rows])
        self._files = [*dict.fromkeys(row.path for row in rows)]
        self._lines = np.array([(self._files.index(row.path), row.line) for row in rows])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the tokenizer, which cannot be pickled and which workers do not need."""
        return vars(self) | {"tokenizer": None}

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        example = {"label": self._labels[index].item()}
        for name, (tokens, ends) in zip(("tokens", "tokens2"), self._tokens, strict=False):
            example[name] = tokens[ends[index] : ends[index + 1]]
        return example

    def name(self, index: int) -> str:
        file, line = self._lines[index]
        return f"{self._files[file]}, line {line}"


def special_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the numbers of [CLS], [SEP] and [PAD] in a vocabulary; 0 for padding if it has no [PAD].

    Raises:
        DataError: there is no [CLS] or no [SEP].
    """
    numbers: dict[str, Any] = {token: tokenizer.number(token) for token in (CLS, SEP, PAD)}
    if missing := [token for token in (CLS, SEP) if numbers[token] is None]:
        raise DataError(
            f"The tokenizer has no {' and no '.join(missing)}, which mark sentences. Use the tokenizer that the "
            'model was pre-trained with, or --config.data.tokenizer="wordpiece:4096", which has them.'
        )
    return numbers[CLS], numbers[SEP], numbers[PAD] or 0


def truncated_lengths(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return the lengths of two texts after truncation.

    The longer text loses its last token, the second one if they are equal, until both fit into `limit` tokens.

    Args:
        first, second: lengths of the texts in tokens.
        limit: largest sum of the results.
    """
    over = max(first + second - limit, 0)
    more = min(over, abs(first - second))  # tokens that only the longer one loses
    first, second = (first - more, second) if first > second else (first, second - more)
    left = over - more
    return first - left // 2, second - (left + 1) // 2


def join_pair(example: Mapping[str, Any], marks: tuple[int, int, int], length: int) -> dict[str, Any]:
    """Return an example in BERT's format, as a dict of `tokens` and `types`, int32 (T,), and `lengths`, an int32.

    `types` is 0 for the first text and padding, 1 for the second text. `lengths` is the number of tokens, special ones
    included. Texts that are too long are truncated, see `truncated_lengths`.

    Args:
        example: example of `Sentences`, with `tokens` and, for a pair, `tokens2`.
        marks: result of `special_tokens`.
        length: row length T.
    """
    begin, end, padding = marks
    texts = [example[name] for name in ("tokens", "tokens2") if name in example]
    sizes = truncated_lengths(*map(len, texts), length - 3) if len(texts) == 2 else (min(len(texts[0]), length - 2),)
    pieces = [np.append(text[:size], end) for text, size in zip(texts, sizes, strict=True)]
    pieces[0] = np.concatenate([[begin], pieces[0]])
    tokens = np.concatenate(pieces).astype(np.int32)
    types = np.repeat(np.arange(len(pieces)), [*map(len, pieces)]).astype(np.int32)
    short = (0, length - len(tokens))
    return {
        "tokens": np.pad(tokens, short, constant_values=padding),
        "types": np.pad(types, short),
        "lengths": np.int32(len(tokens)),
    }


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
    rows = [row for file in files for row in read_table(file, columns, label, published.torn)]
    return rows, None if published.classes is None else tuple(published.classes.values())


def _open_tsv(path: str, split: str, spec: SourceSpec) -> Table:
    file = Path(path).expanduser() / f"{split}.tsv"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in file.parent.glob("*.tsv"))) or "none"
        raise DataError(f"{file} not found: each split needs a file. Found in the folder: {found}.")
    pair = b"sentence2" in next(lines(file), (1, b""))[1].split(b"\t")
    columns = Columns("sentence", "label", "sentence2" if pair else None)
    if spec.numbers:
        return read_table(file, columns, score_parser(-math.inf, math.inf)), None
    names = spec.classes or listed_classes(file.parent) or sorted({row.label for row in read_table(file, columns, str)})
    if len(names) < 2:
        raise DataError(f"{file}: found classes: {quote(names)}. At least 2 are needed. Check the column label.")
    return read_table(file, columns, class_parser({word: i for i, word in enumerate(names)})), tuple(names)


KINDS = {  # by the part of `data.name` before the colon
    word: Kind(word, functools.partial(_open_glue, word), f"GLUE's {task.folder}, in the folder data.dir")
    for word, task in TASKS.items()
} | {
    "tsv": Kind(
        "tsv:<folder>", _open_tsv, "with one .tsv file per split, with a header: sentence, optionally sentence2, label"
    )
}
