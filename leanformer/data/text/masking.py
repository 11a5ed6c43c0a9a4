"""Masking for masked language modelling (Devlin et al. 2019): choice of targets, and their replacement.

Of n tokens exactly ⌊share · n⌋ are targets, at least one, chosen uniformly, including ends of documents. A tenth of
them, rounded down, is replaced by random tokens, as many are unchanged, and the mask replaces the rest. For 128 tokens
and a share of a quarter these are 32 targets: 3 random, 3 unchanged, 26 masked, as in Cramming (Geiping & Goldstein
2023).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leanformer.data.text.rows import IGNORE, Row


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


def prepare(
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
