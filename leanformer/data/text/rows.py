"""Rows of fixed length from a corpus: windows of its token stream, or packed documents, and their masking."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leanformer.data.text.corpus import Corpus
from leanformer.errors import DataError


IGNORE = -1
Row = dict[str, np.ndarray]


def _row(corpus: Corpus, start: int, stop: int) -> Row:
    """Return the targets from `start` to `stop`, and their inputs."""
    values = corpus[start - 1 : stop]
    return {"tokens": values[:-1], "targets": values[1:]}


def _pad(row: Row, length: int, lengths: np.ndarray | None) -> dict[str, Any]:
    """Pad a row, and add the number of text bytes of its targets: 0 if `lengths`, the bytes per token, is None."""
    missing = length - len(row["tokens"])
    padded = {n: np.pad(x, (0, missing), constant_values=IGNORE if n == "targets" else 0) for n, x in row.items()}
    return padded | {"bytes": np.int32(0 if lengths is None else lengths[row["targets"]].sum())}


class _Rows:
    """Base class of sources of rows. Raises DataError if `fills_rows` and the corpus has fewer tokens than a row."""

    fills_rows = False

    def __init__(self, corpus: Corpus, length: int):
        self.corpus, self.length = corpus, length
        if self.fills_rows and len(corpus) < length:
            raise DataError(
                f"{corpus.name} has {len(corpus):,} tokens, fewer than a row of model.max_length={length}. "
                "Give more text, or lower model.max_length."
            )

    @property
    def tokenizer(self) -> Any:
        return self.corpus.tokenizer

    def _cut(self, start: int, stop: int) -> dict[str, Any]:
        """Return the padded row with targets from `start` to `stop`."""
        return _pad(_row(self.corpus, start, stop), self.length, self.tokenizer.lengths)


class Stream(_Rows):
    """Consecutive rows of a corpus's token stream, for evaluation: every token is a target once.

    Rows are dicts of `tokens` and `targets`, int32 (T,), and `bytes`, the number of text bytes of the targets, 0 if
    unknown. A row may contain the ends of documents, across which attention is not masked. The last row is padded, with
    0 in `tokens` and IGNORE in `targets`.

    Args:
        corpus: tokens of the split.
        length: row length T.
    """

    def __len__(self) -> int:
        return -(-len(self.corpus) // self.length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        return self._cut(index * self.length, min((index + 1) * self.length, len(self.corpus)))

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, tokens from {index * self.length:,} on"


class OverlappingLastWindow(Stream):
    """Consecutive rows of a corpus's token stream without padding, for evaluation.

    Rows have the entries of `Stream`, and `old`: the number of first tokens that the previous row has too. It is 0 for
    all rows but the last.

    Args:
        corpus: tokens of the split.
        length: row length T.

    Raises:
        DataError: the corpus has fewer tokens than a row.
    """

    fills_rows = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = range(len(self))[index] * self.length
        begin = min(start, len(self.corpus) - self.length)
        return self._cut(begin, begin + self.length) | {"old": np.int32(start - begin)}


class Windows(_Rows):
    """Rows from random positions of a corpus's token stream, for training.

    It has no length, and the index of an example is ignored. Each example is {"window": function that draws a row}, the
    method `window`.

    Args:
        corpus: tokens of the split.
        length: row length T.

    Raises:
        DataError: the corpus has fewer tokens than a row.
    """

    fills_rows = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"window": self.window}

    def window(self, draw: np.random.Generator) -> dict[str, Any]:
        """Return the row at a random position: `tokens` and `targets`, int32 (T,), and `bytes`, as in `Stream`."""
        start = int(draw.integers(len(self.corpus) - self.length + 1))
        return self._cut(start, start + self.length)

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, window {index}"


class Packed(_Rows):
    """Rows of packed documents, in order, as many per row as fit; documents do not attend to one another.

    Rows are dicts of `tokens`, `targets` and `segments`, int32 (T,), and `bytes`, the number of text bytes of the
    targets, 0 if unknown. `segments` numbers the documents of a row from 1, and 0 is padding. A document longer than a
    row is split into pieces, each of which begins with the token before it.

    Args:
        corpus: tokens of the split.
        length: row length T.
    """

    @functools.cached_property
    def pieces(self) -> np.ndarray:
        """Range [start, stop) in the corpus of the targets of each piece of a document, int64 (pieces, 2)."""
        ends = self.corpus.ends
        starts = np.concatenate([[0], ends[:-1]])
        number = -(-(ends - starts) // self.length)
        first = np.repeat(np.cumsum(number) - number, number)
        begin = np.repeat(starts, number) + (np.arange(number.sum()) - first) * self.length
        return np.stack([begin, np.minimum(begin + self.length, np.repeat(ends, number))], axis=1)

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        """Index of the first piece of each row, and the number of pieces at the end."""
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
        return _pad(joined, self.length, self.tokenizer.lengths)

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, row {index} of packed documents"


def prepare(index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator]) -> dict[str, Any]:
    """Return the arrays of a row, by name.

    They are those of an example of `Stream`, `OverlappingLastWindow` or `Packed`, or of a row drawn from `Windows`. A
    row of `Windows` is drawn with `draws()`, so it depends on the position in training.

    Args:
        index: index of the example; not used.
        example: example of one of these sources.
        draws: function that returns the random generator of the position.
    """
    return example["window"](draws()) if "window" in example else dict(example)


@dataclasses.dataclass(frozen=True)
class Masking:
    """Masking of rows of tokens, a function: `masking(text, old, draw)` returns a masked row and its targets.

    The result is a dict of `tokens`, `places` and `targets`, see `__call__`.

    Attributes:
        share: fraction of a row's tokens that are targets, above 0 and below 1.
        mask: mask token.
        vocabulary: vocabulary size V, from which random tokens are drawn.
        length: row length T.
    """

    share: float
    mask: int
    vocabulary: int
    length: int

    def __call__(self, text: np.ndarray, old: int, draw: np.random.Generator) -> Row:
        """Return a masked row and its targets.

        Args:
            text: tokens before masking, int32 (T,), padded with IGNORE (-1) at the end.
            old: number of first tokens that cannot be targets, since they were in the previous row.
            draw: random generator.

        Returns:
            A dict of int32 arrays: `tokens` (T,), the model's input, 0 for padding; `places` (K,), the positions of the
            targets in the row; and `targets` (K,), the tokens before masking at these positions. K is the number of
            targets in a full row. A row with fewer has padding at the end, 0 in `places` and IGNORE in `targets`.
        """
        real = np.flatnonzero(text[old:] != IGNORE) + old
        number = num_masked(self.share, len(real))
        places = draw.permutation(real)[:number]
        others = number // 10  # number of random tokens, and of unchanged ones
        tokens = np.where(text == IGNORE, 0, text).astype(np.int32)
        tokens[places[2 * others :]] = self.mask
        tokens[places[:others]] = draw.integers(self.vocabulary, size=others)
        spare = (0, num_masked(self.share, self.length) - number)
        return {
            "tokens": tokens,
            "places": np.pad(places, spare).astype(np.int32),
            "targets": np.pad(text[places], spare, constant_values=IGNORE).astype(np.int32),
        }


def num_masked(share: float, tokens: int) -> int:
    """Return the number of targets among `tokens` tokens: the fraction `share` of them, rounded down, at least 1."""
    return max(1, math.floor(share * tokens + 1e-6))  # 0.29 x 100 is 28.999999999999996


def prepare_masked(
    index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator], *, how: Masking, train: bool
) -> dict[str, Any]:
    """Return the masked row of an example: `tokens` (T,), `places` (K,) and `targets` (K,), see `Masking.__call__`.

    Rows of packed documents also have their `segments` (T,). In training, masks depend on seed and position (step and
    place in the batch). In evaluation they depend only on the index, so that every evaluation has the same targets.

    Args:
        index: index of the example.
        example: example of one of the sources in `data.text.rows`.
        draws: function that returns the random generator of the position; used in training.
        how: masking to apply.
        train: True for training.
    """
    draw = draws() if train else np.random.Generator(np.random.Philox(key=(0, index)))
    row = example["window"](draw) if "window" in example else example
    masked = how(row["targets"], int(row.get("old", 0)), draw)
    return masked | ({"segments": row["segments"]} if "segments" in row else {})
