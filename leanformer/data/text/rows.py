"""Rows of one length out of a corpus: windows of its stream of tokens, or whole documents packed side by side.

Every target is a token of the corpus, and its input the token before it; before a document stands the token that ends
one. IGNORE is where nothing is to be said.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leanformer.data.text.corpus import Corpus
from leanformer.errors import DataError


IGNORE = -1
Row = dict[str, np.ndarray]


def _row(corpus: Corpus, start: int, stop: int) -> Row:
    """Targets from `start` to `stop`, and their inputs."""
    found = corpus[start - 1 : stop]
    return {"tokens": found[:-1], "targets": found[1:]}


def _padded(row: Row, length: int, lengths: np.ndarray | None) -> dict[str, Any]:
    """Of that length; with the bytes of the targets' text, 0 where nobody can tell what a token stands for."""
    missing = length - len(row["tokens"])
    blank = {"targets": IGNORE}
    found = {name: np.pad(x, (0, missing), constant_values=blank.get(name, 0)) for name, x in row.items()}
    return found | {"bytes": np.int32(0 if lengths is None else lengths[row["targets"]].sum())}


class _Rows:
    """What all kinds share: the corpus, the length of a row, and what stands for tokens."""

    def __init__(self, corpus: Corpus, length: int):
        self.corpus, self.length = corpus, length

    def _check_length(self) -> None:
        if len(self.corpus) < self.length:
            raise DataError(
                f"{self.corpus.name} has {len(self.corpus):,} tokens, fewer than a row of model.max_length="
                f"{self.length}. Give more text, or lower model.max_length."
            )

    @property
    def tokenizer(self) -> Any:
        return self.corpus.tokenizer

    def _cut(self, start: int, stop: int) -> dict[str, Any]:
        return _padded(_row(self.corpus, start, stop), self.length, self.tokenizer.lengths)


class Stream(_Rows):
    """Row after row of the stream, every token a target once: for evaluation. Documents see what came before them."""

    def __len__(self) -> int:
        return -(-len(self.corpus) // self.length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        return self._cut(index * self.length, min((index + 1) * self.length, len(self.corpus)))

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, tokens from {index * self.length:,} on"


class Full(Stream):
    """Row after row of the stream, none of them padded: the last one is of the last tokens, of which `old` were in the
    row before.

    Raises:
        DataError: there is not one row's worth of tokens.
    """

    def __init__(self, corpus: Corpus, length: int):
        super().__init__(corpus, length)
        self._check_length()

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = range(len(self))[index] * self.length
        begin = min(start, len(self.corpus) - self.length)
        return self._cut(begin, begin + self.length) | {"old": np.int32(start - begin)}


class Windows(_Rows):
    """Rows from anywhere in the stream, without an end: for training.

    Raises:
        DataError: there is not one row's worth of tokens.
    """

    def __init__(self, corpus: Corpus, length: int):
        super().__init__(corpus, length)
        self._check_length()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"window": self.window}

    def window(self, draw: np.random.Generator) -> dict[str, Any]:
        start = int(draw.integers(len(self.corpus) - self.length + 1))
        return self._cut(start, start + self.length)

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, window {index}"


class Packed(_Rows):
    """Documents side by side in rows, as many as have room, in their order; none sees another.

    `segments` numbers those of a row from 1; 0 is padding. A document over the length is cut into pieces of it, each of
    which begins with the token before it.
    """

    @functools.cached_property
    def pieces(self) -> np.ndarray:
        """Targets of each piece of a document, from and to, int64 (pieces, 2)."""
        ends = self.corpus.ends
        starts = np.concatenate([[0], ends[:-1]])
        number = -(-(ends - starts) // self.length)
        first = np.repeat(np.cumsum(number) - number, number)
        begin = np.repeat(starts, number) + (np.arange(number.sum()) - first) * self.length
        return np.stack([begin, np.minimum(begin + self.length, np.repeat(ends, number))], axis=1)

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        """The first piece of each row, and one past the last of all."""
        total, rows = np.concatenate([[0], np.cumsum(self.pieces[:, 1] - self.pieces[:, 0])]), [0]
        while rows[-1] < len(self.pieces):
            rows.append(int(np.searchsorted(total, total[rows[-1]] + self.length, side="right")) - 1)
        return np.array(rows)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        parts = [_row(self.corpus, *piece) for piece in self.pieces[self._rows[index] : self._rows[index + 1]].tolist()]
        for number, part in enumerate(parts, 1):
            part["segments"] = np.full(len(part["tokens"]), number, np.int32)
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return _padded(joined, self.length, self.tokenizer.lengths)

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, row {index} of packed documents"


def prepare(index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator]) -> dict[str, Any]:
    """What a batch takes of an example of these sources: itself, or a window drawn by its position."""
    return example["window"](draws()) if "window" in example else dict(example)
