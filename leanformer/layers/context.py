"""Per-call context (random keys, mask, positions, cache, tap) passed down a stack of blocks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from leanformer.layers.masks import ALL, Lengths, Mask


STATIC = {"static": True}

# Maps a block's named arrays to a small pytree, inside the block (see `blocks.Block`).
Tap = Callable[[dict[str, Any]], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Context of a call of a stack, from which the stack derives the context of each block.

    Callers set `key`, `mask`, `positions`, `cache` and `tap`; the stack sets the others for its blocks.

    Attributes:
        key: random keys, one per example (B). In a stack they switch training on; in a block they draw dropout. None
            for evaluation.
        mask: keys visible to each query.
        positions: int T or B T, positions of the tokens; consecutive from the mask's offset if None.
        cache: keys and values of earlier tokens, as returned by `Stack.empty_cache`; in a block those of its layer.
            None without a cache.
        lengths: result of `attention.full_lengths` for the tokens of the stack.
        tap: function that receives the arrays of every block (see `blocks.Block`); None for none.
        scales: stochastic-depth factors of the residual branches, (branches, B); None for none.
        train: True if the stack was given a key, so that batch statistics are used and updated.
    """

    key: Any = None
    mask: Mask = ALL
    positions: Any = None
    cache: Any = None
    lengths: Mapping[tuple[int, int], Lengths] = dataclasses.field(default_factory=dict)
    tap: Tap | None = dataclasses.field(default=None, metadata=STATIC)
    scales: Any = None
    train: bool = dataclasses.field(default=False, metadata=STATIC)


PLAIN = Context()  # evaluation, all keys visible, no tap
