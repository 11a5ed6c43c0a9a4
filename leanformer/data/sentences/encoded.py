"""Sentences and pairs of them as tokens: [CLS] a [SEP], or [CLS] a [SEP] b [SEP], as BERT reads them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from leanformer.data.sentences.tables import Row
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


CLS, SEP, PAD = "[CLS]", "[SEP]", "[PAD]"


class Sentences:
    """Rows of a table with random access, tokenised once and held in memory.

    An example is `tokens`, and of a pair `tokens2`, int32 (n,) without special ones, and `label`: the number of a
    class, or a float.

    Args:
        rows: all of one or all of two texts.
        tokenizer: that its model reads texts with.
        classes: by name, number 0 first; None where labels are numbers.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, classes: Sequence[str] | None):
        self.classes = None if classes is None else tuple(classes)
        self.num_classes = None if classes is None else len(classes)
        self.vocabulary, self.pair = tokenizer.vocabulary, len(rows[0].texts) == 2
        self._json, self._tokenizer = tokenizer.json(), tokenizer
        self._tokens = [_flat(tokenizer.encode(texts)) for texts in zip(*(row.texts for row in rows), strict=True)]
        self._labels = np.array([row.label for row in rows])
        self._files = [*dict.fromkeys(row.path for row in rows)]
        self._lines = np.array([(self._files.index(row.path), row.line) for row in rows])

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        """Without what workers do not need, since it cannot be sent to them."""
        return vars(self) | {"_tokenizer": None}

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        found = {"label": self._labels[index].item()}
        for name, (tokens, ends) in zip(("tokens", "tokens2"), self._tokens, strict=False):
            found[name] = tokens[ends[index] : ends[index + 1]]
        return found

    def name(self, index: int) -> str:
        file, line = self._lines[index]
        return f"{self._files[file]}, line {line}"


def _flat(several: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens one after the other, and where each text's begin and end."""
    return np.concatenate(several), np.cumsum([0, *map(len, several)])


def special(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """The numbers of [CLS], [SEP] and of padding, 0 where there is none. Raises DataError without the first two."""
    found = {token: tokenizer.number(token) for token in (CLS, SEP, PAD)}
    if missing := [token for token in (CLS, SEP) if found[token] is None]:
        raise DataError(
            f"The tokenizer has no {' and no '.join(missing)}, which stand before and behind sentences. Take the one "
            'that the model was pre-trained with, or --config.data.tokenizer="wordpiece:4096", which has them.'
        )
    return found[CLS], found[SEP], found[PAD] or 0


def kept(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens stay of two texts: the longer one loses its last, of equals the second, until both fit."""
    over = max(first + second - room, 0)
    more = min(over, abs(first - second))  # what only the longer one loses
    first, second = (first - more, second) if first > second else (first, second - more)
    left = over - more
    return first - left // 2, second - (left + 1) // 2


def joined(example: dict[str, Any], marks: tuple[int, int, int], length: int) -> dict[str, np.ndarray]:
    """`tokens` and `types` (T,) of a row, padded, and how many are real, `lengths`.

    Args:
        marks: the tokens of `special`.
        length: T.
    """
    begin, end, padding = marks
    texts = [example[name] for name in ("tokens", "tokens2") if name in example]
    sizes = kept(*map(len, texts), length - 3) if len(texts) == 2 else (min(len(texts[0]), length - 2),)
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
