"""Labelled sentences and sentence pairs, selected by `data.name`: GLUE's tasks, and .tsv tables; as tokens for BERT."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.source import Kind, find, listed_classes
from leanformer.data.tables import Columns, Row, class_parser, lines, read_table, score_parser
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


CLS, SEP, PAD = "[CLS]", "[SEP]", "[PAD]"
Table = tuple[list[Row], tuple[str, ...] | None]  # rows, and class names by number, None if labels are numbers


@dataclasses.dataclass(frozen=True)
class Published:
    """Files of one of GLUE's tasks (Wang et al. 2019, Table 1, without WNLI, as is common) in its download."""

    folder: str
    columns: Columns
    classes: Mapping[str, str] | None  # {label in the files: class name}, in the order of the model's outputs
    torn: float = 0.0  # largest fraction of damaged lines that is skipped, see `tables.parse_rows`

    def find(self, root: Path, split: str) -> Path:
        """Return the file of a split, in the whole download or in the folder of this task."""
        files = (root / self.folder / f"{split}.tsv", root / f"{split}.tsv")
        for file in files:
            if file.is_file():
                return file
        raise DataError(
            f'The split "{split}" of {self.folder} was not found: looked for {files[0]}, {files[1]}. Set '
            "--config.data.dir to the folder of GLUE's download."
        )


def _by_number(*names: str) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


NLI = {name: name for name in ("entailment", "not_entailment")}
MNLI = {name: name for name in ("entailment", "neutral", "contradiction")}
HIGHEST_SCORE = 5.0  # of STS-B
TASKS = {
    "cola": Published("CoLA", Columns(3, 1, number=4), _by_number("unacceptable", "acceptable")),
    "sst2": Published("SST-2", Columns("sentence", "label"), _by_number("negative", "positive")),
    "mrpc": Published("MRPC", Columns("#1 String", "Quality", "#2 String"), _by_number("not_equivalent", "equivalent")),
    "qqp": Published(  # some lines are damaged; other loaders skip them as well
        "QQP", Columns("question1", "is_duplicate", "question2"), _by_number("not_duplicate", "duplicate"), torn=1e-3
    ),
    "stsb": Published("STS-B", Columns("sentence1", "score", "sentence2"), None),
    "mnli": Published("MNLI", Columns("sentence1", "gold_label", "sentence2"), MNLI),
    "qnli": Published("QNLI", Columns("question", "label", "sentence"), NLI),
    "rte": Published("RTE", Columns("sentence1", "label", "sentence2"), NLI),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Requirements of a model on a table of labelled sentences."""

    dir: str | None = None  # folder of GLUE's download
    numbers: bool = False  # True if labels are numbers, for a regression
    classes: Sequence[str] | None = None  # names in the order of the model's outputs; None: the table's


def open_table(name: str, split: str, **requirements: Any) -> Table:
    """Read one split of a `data.name`, a GLUE task or tsv:<folder>; keyword arguments are fields of `SourceSpec`."""
    kind, what = find(name, KINDS)
    return kind.open(what, split, SourceSpec(**requirements))


def _open_glue(task: str, _: str, split: str, spec: SourceSpec) -> Table:
    published = TASKS[task]
    if spec.numbers != (published.classes is None):
        wanted = "numbers as labels: set model.num_classes=1" if not spec.numbers else "classes: set model.num_classes"
        raise DataError(f'data.name="{task}" has {wanted}.')
    file = published.find(Path(spec.dir or "").expanduser(), split)
    if published.classes is None:
        return read_table(file, published.columns, score_parser(0.0, HIGHEST_SCORE)), None
    label = class_parser({word: number for number, word in enumerate(published.classes)})
    return read_table(file, published.columns, label, published.torn), tuple(published.classes.values())


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
    return read_table(file, columns, class_parser({word: i for i, word in enumerate(names)})), tuple(names)


KINDS = {  # by the part of `data.name` before the colon
    word: Kind(word, functools.partial(_open_glue, word), f"GLUE's {task.folder}, in the folder data.dir")
    for word, task in TASKS.items()
} | {
    "tsv": Kind(
        "tsv:<folder>", _open_tsv, "with one .tsv file per split, with a header: sentence, optionally sentence2, label"
    )
}


@dataclasses.dataclass(frozen=True)
class Texts:
    """Sentences of a split for training a tokenizer: an iterable of str, with both texts of a pair."""

    name: str
    split: str
    dir: str | None
    numbers: bool

    def __iter__(self) -> Iterator[str]:
        rows, _ = open_table(self.name, self.split, dir=self.dir, numbers=self.numbers)
        return (text for row in rows for text in row.texts)

    def identity(self) -> dict[str, Any]:
        """Return a dict, ready for JSON, that changes if the texts change."""
        digest = hashlib.sha256("\n".join(self).encode()).hexdigest()
        return {"texts": f"{self.name} {self.split}", "sha256": digest}


def open_sentences(name: str, split: str, tokenizer: Tokenizer, **requirements: Any) -> "Sentences":
    """Return the tokenised sentences of one split of a `data.name`; other arguments as for `open_table`."""
    rows, classes = open_table(name, split, **requirements)
    return Sentences(rows, tokenizer, classes)


class Sentences:
    """Rows of a table with random access, tokenised once and stored in memory.

    An example has `tokens`, for a pair also `tokens2`, both int32 (n,) without special tokens, and `label`: the number
    of a class, or a float. `num_classes` and `classes` are None if labels are numbers.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, classes: Sequence[str] | None):
        self.classes = None if classes is None else tuple(classes)
        self.num_classes = None if classes is None else len(classes)
        self.vocabulary, self.tokenizer = tokenizer.vocabulary, tokenizer
        encoded = (tokenizer.encode(texts) for texts in zip(*(row.texts for row in rows), strict=True))
        self._tokens = [(np.concatenate(texts), np.cumsum([0, *map(len, texts)])) for texts in encoded]
        self._labels = np.array([row.label for row in rows])
        self._path, self._lines = rows[0].path, np.array([row.line for row in rows])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"tokenizer": None}  # which cannot be pickled, and which workers do not need

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        example = {"label": self._labels[index].item()}
        for name, (tokens, ends) in zip(("tokens", "tokens2"), self._tokens, strict=False):
            example[name] = tokens[ends[index] : ends[index + 1]]
        return example

    def name(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"


def special_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the numbers of [CLS], [SEP] and [PAD] in a vocabulary; 0 for padding if it has no [PAD]."""
    numbers: dict[str, Any] = {token: tokenizer.number(token) for token in (CLS, SEP, PAD)}
    if missing := [token for token in (CLS, SEP) if numbers[token] is None]:
        raise DataError(
            f"The tokenizer has no {' and no '.join(missing)}, which mark sentences. Use the tokenizer that the "
            'model was pre-trained with, or --config.data.tokenizer="wordpiece:4096", which has them.'
        )
    return numbers[CLS], numbers[SEP], numbers[PAD] or 0


def truncated_lengths(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return the lengths of two texts in `limit` tokens: the longer, else the second, loses its last tokens."""
    over = max(first + second - limit, 0)
    more = min(over, abs(first - second))  # tokens that only the longer one loses
    first, second = (first - more, second) if first > second else (first, second - more)
    left = over - more
    return first - left // 2, second - (left + 1) // 2


def join_pair(example: Mapping[str, Any], marks: tuple[int, int, int], length: int) -> dict[str, Any]:
    """Return an example, truncated to `length` tokens T, in BERT's format: [CLS] a [SEP], or [CLS] a [SEP] b [SEP].

    The result has `tokens` and `types`, 1 for the second text, int32 (T,), and `lengths`, the number of tokens.
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
