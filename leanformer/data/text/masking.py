"""Tokens of a row that a model is to tell, without seeing them (Devlin et al. 2019): which, and what stands there.

Of n tokens exactly ⌊share · n⌋ are to be told, at least one: any of them alike, ends of documents too. In place of a
tenth of those, rounded down, stands a token drawn from the vocabulary; as many stay as they are; the mask stands for
the rest. Of 128 and a quarter these are 32: 3, 3 and 26, as in Cramming (Geiping & Goldstein 2023).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leanformer.data.text.rows import IGNORE, Row


@dataclasses.dataclass(frozen=True)
class Masking:
    """How a row is masked.

    Attributes:
        share: of its tokens that are to be told.
        mask: the token in their place.
        vocabulary: V, of tokens that are drawn.
        length: T.
    """

    share: float
    mask: int
    vocabulary: int
    length: int

    def __call__(self, text: np.ndarray, old: int, draw: np.random.Generator) -> Row:
        """`tokens` as the model sees them, int32 T; `places` that are to be told, int32 K of the first `told`; and
        their `targets`, IGNORE where a row has fewer.

        Args:
            text: int32 T, IGNORE where there is none, at the end.
            old: of its tokens, the first, that are not to be told: they were in the row before.
        """
        real = np.flatnonzero(text[old:] != IGNORE) + old
        number = num_masked(self.share, len(real))
        places = draw.permutation(real)[:number]
        others = number // 10  # of each kind: drawn anew, and left as they are
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
    """Return how many of `tokens` tokens are targets: a share of them, at least one."""
    return max(1, math.floor(share * tokens + 1e-6))  # 0.29 x 100 is 28.999999999999996


def prepare(
    index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator], *, how: Masking, train: bool
) -> dict[str, Any]:
    """What a batch takes of a row. Its masks are drawn by its position in training; in evaluation by its index alone,
    so that every evaluation asks for the same tokens."""
    draw = draws() if train else np.random.Generator(np.random.Philox(key=(0, index)))
    row = example["window"](draw) if "window" in example else example
    found = how(row["targets"], int(row.get("old", 0)), draw)
    return found | ({"segments": row["segments"]} if "segments" in row else {})
