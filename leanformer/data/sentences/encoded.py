"""Sentences and sentence pairs as tokens in BERT's format: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.data.sentences.tables import Row
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


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
