"""Texts as sequences of bytes: the Long Range Arena's text and retrieval tasks (Tay et al. 2021, 2.2.2 and 2.2.3).

Byte b is token b + 1. Id 0 is padding, which the batch adds.
"""

import csv
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.source import number_classes
from leanformer.data.tables import find_columns, json_lines, line_error, parse_rows, shorten, split
from leanformer.errors import DataError


BYTES = 257  # ids: padding, then a byte each; LRA's models have a table of 512
COLUMNS = ("text", "label")  # of a table of labelled texts
DOCUMENT = 10_000  # bytes of a paper that LRA's retrieval task encodes before it cuts to the model's length


def encode(text: bytes) -> np.ndarray:
    """Return the tokens of a text, int32 (n,): one per byte, the byte plus 1."""
    return np.frombuffer(text, np.uint8).astype(np.int32) + 1


class Imdb:
    """Reviews in files, `<folder>/<split>/{neg,pos}/*.txt`, the layout of `aclImdb`, cut to `max_length` bytes.

    LRA's text task uses `test` both to select a checkpoint and to score it.
    """

    num_classes, classes, vocabulary = 2, ("neg", "pos"), BYTES

    def __init__(self, folder: str | Path, split: str, max_length: int = 4_000):
        root = Path(folder).expanduser() / split
        self.root, self.max_length = str(root), max_length
        files, labels = [], []
        for label, kind in enumerate(self.classes):
            texts = sorted((root / kind).glob("[!.]*.txt"))  # without ._1_2.txt of macOS
            if not texts:
                raise DataError(f"{root / kind} has no reviews. Unpack aclImdb again.")
            files += [os.fsencode(f"{kind}/{path.name}") for path in texts]
            labels += [label] * len(texts)
        self._files, self._labels = np.array(files), np.array(labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Path(self.name(index)).open("rb") as file:
            return {"tokens": encode(file.read(self.max_length)), "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return str(Path(self.root) / os.fsdecode(self._files[index]))


class LabelledText:
    """Texts with labels from a .tsv, .csv or .jsonl file, in memory, cut to `max_length` bytes.

    .tsv and .csv have a header; .csv quotes with ", .tsv has no quotes. .jsonl has one object per line. The columns or
    keys are `text` and `label`, a word or an integer. Classes are by default the labels of this file, sorted, as
    numbers if all are.
    """

    vocabulary = BYTES

    def __init__(self, path: str | Path, *, max_length: int = 4_000, classes: Sequence[str] | None = None):
        self.path = Path(path).expanduser()
        parsed = parse_rows(self.path, READERS[self.path.suffix](self.path), _labelled)
        lines, rows = zip(*parsed, strict=True)
        texts, labels = zip(*((text[:max_length], label) for text, label in rows), strict=True)
        self.classes = sorted_labels(set(labels)) if classes is None else list(classes)
        self.num_classes = len(self.classes)
        number = number_classes(labels, self.classes, str(self.path))
        self._bytes = np.frombuffer(b"".join(texts), np.uint8)
        self._offsets, self._lines = np.cumsum([0, *map(len, texts)]), np.array(lines)
        self._labels = np.array([number[name] for name in labels])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        text = self._bytes[self._offsets[index] : self._offsets[index + 1]]
        return {"tokens": text.astype(np.int32) + 1, "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}"


def _labelled(row: Sequence[Any]) -> tuple[bytes, str]:
    text, label = (value.encode() if isinstance(value, str) else value for value in row)
    label = str(label).encode() if isinstance(label, int) else label
    if not (isinstance(text, bytes) and isinstance(label, bytes) and text and label.strip()):
        raise ValueError("needs a text and a label, a word or a whole number, neither of them empty")
    return text, label.decode("utf-8", "backslashreplace").strip()


def sorted_labels(labels: set[str]) -> list[str]:
    """Return labels sorted by number if all are integers, else alphabetically; ties such as 1 and 01 alphabetically."""
    try:
        return sorted(labels, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(labels)


def _csv(path: Path) -> Iterator[tuple[int, tuple[Any, Any]]]:
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    csv.field_size_limit(2**31 - 1)  # a text may be longer than 128 KiB
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True, **form)
        header = next(rows, [])
        text, label = find_columns(path, header, COLUMNS)
        for row in filter(None, rows):
            if len(row) != len(header):
                raise line_error(path, rows.line_num, f"has {len(row)} columns, the header {len(header)}")
            cells = [row[place].encode("utf-8", "surrogateescape") for place in (text, label)]
            yield rows.line_num, (cells[0], cells[1])


READERS = {".tsv": _csv, ".csv": _csv, ".jsonl": functools.partial(json_lines, keys=COLUMNS)}


class Pairs:
    """Pairs of papers, label 1 if one cites the other: LRA's `new_aan_pairs.{train,eval,test}.tsv`.

    A line has five columns and no header: label (0 or 1, also as 0.0 or 1.0), two ids, two texts, cut to `max_length`
    bytes. At the first use, the whole file is read and checked. Later only the requested lines are read.
    """

    num_classes, classes, vocabulary = 2, None, BYTES

    def __init__(self, path: str | Path, max_length: int = 4_000):
        self.path, self.max_length = Path(path).expanduser(), min(max_length, DOCUMENT)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        starts = [0]
        with self.path.open("rb") as file:
            for line, row in enumerate(file, 1):
                try:
                    _pair(row)
                except ValueError as error:
                    raise line_error(self.path, line, str(error)) from error
                starts.append(starts[-1] + len(row))
        return np.array(starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            label, *texts = _pair(file.readline())
        first, second = (encode(text[: self.max_length]) for text in texts)
        return {"tokens": first, "tokens2": second, "label": label}

    def name(self, index: int) -> str:
        return f"{self.path}, line {index + 1}"


def _pair(row: bytes) -> tuple[int, bytes, bytes]:
    """Return label and both texts of a line."""
    label, _, _, first, second = split(row.rstrip(b"\r\n"), 5)
    if label not in (b"0", b"1", b"0.0", b"1.0"):
        raise ValueError(f"has the label {shorten(label)} instead of 0 or 1")
    if not (first and second):
        raise ValueError("has an empty text")
    return int(label[:1]), first, second
