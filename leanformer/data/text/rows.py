"""Rows of fixed length from a corpus: windows of its token stream, or packed documents; and their masking.

Every target is a token of the corpus, and its input is the token before it. The token before a document is the end
token. IGNORE marks positions excluded from the loss.
"""

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
    """Base class of sources of rows of `length` tokens T, of which `fills_rows` says whether none is padded."""

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
    unknown. Attention is not masked across the ends of documents. The last row is padded.
    """

    def __len__(self) -> int:
        return -(-len(self.corpus) // self.length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        return self._cut(index * self.length, min((index + 1) * self.length, len(self.corpus)))

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, tokens from {index * self.length:,} on"


class OverlappingLastWindow(Stream):
    """Rows of `Stream` without padding: the last has `old` first tokens of the previous row."""

    fills_rows = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = range(len(self))[index] * self.length
        begin = min(start, len(self.corpus) - self.length)
        return self._cut(begin, begin + self.length) | {"old": np.int32(start - begin)}


class Windows(_Rows):
    """Endless rows from random positions of a token stream: {"window": function that draws a row of `Stream`}."""

    fills_rows = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"window": self.window}

    def window(self, draw: np.random.Generator) -> dict[str, Any]:
        start = int(draw.integers(len(self.corpus) - self.length + 1))
        return self._cut(start, start + self.length)

    def name(self, index: int) -> str:
        return f"{self.corpus.name}, window {index}"


class Packed(_Rows):
    """Rows of packed documents, in order, as many per row as fit; documents do not attend to one another.

    Rows have the entries of `Stream` and `segments`, int32 (T,), which numbers the documents of a row from 1; 0 is
    padding. A document longer than a row is split into pieces, each of which begins with the token before it.
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
    """Return the arrays of a row by name; a row of `Windows` depends on the position in training."""
    return example["window"](draws()) if "window" in example else dict(example)


@dataclasses.dataclass(frozen=True)
class Masking:
    """Choice of the targets of masked language modelling (Devlin et al. 2019), and their replacement.

    Of n tokens exactly ⌊share · n⌋ are targets, at least one, chosen uniformly, including ends of documents. A tenth of
    them, rounded down, is replaced by random tokens, as many are unchanged, and the mask replaces the rest. For 128
    tokens and a share of a quarter these are 32 targets: 3 random, 3 unchanged, 26 masked, as in Cramming (Geiping &
    Goldstein 2023).
    """

    share: float  # above 0 and below 1
    mask: int  # mask token
    vocabulary: int  # from which random tokens are drawn
    length: int  # row length T

    def __call__(self, text: np.ndarray, old: int, draw: np.random.Generator) -> Row:
        """Return a masked row: `tokens` (T,), 0 for padding, and the `places` and `targets` (K,), padded with IGNORE.

        `text` is int32 (T,), padded with IGNORE; its `old` first tokens were in the previous row and cannot be targets.
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
    """Return the number of targets among `tokens` tokens."""
    return max(1, math.floor(share * tokens + 1e-6))  # 0.29 x 100 is 28.999999999999996


def prepare_masked(
    index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator], *, how: Masking, train: bool
) -> dict[str, Any]:
    """Return the masked row of an example; masks depend on the position in training, and on the index in evaluation."""
    draw = draws() if train else np.random.Generator(np.random.Philox(key=(0, index)))
    row = example["window"](draw) if "window" in example else example
    masked = how(row["targets"], int(row.get("old", 0)), draw)
    return masked | ({"segments": row["segments"]} if "segments" in row else {})
