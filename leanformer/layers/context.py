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
    """Context of a stack, from which the stack derives that of each block; axes as in `layers.attention`."""

    key: Any = None  # random keys, B: in a stack they switch training on, in a block they are for dropout
    mask: Mask = ALL  # visible keys of each query
    positions: Any = None  # int T or B T: positions of tokens; consecutive from the mask's offset if None
    cache: Any = None  # keys and values of earlier tokens, as in `Stack.empty_cache`; of one layer in a block
    # Set by the stack: `attention.full_lengths` of its tokens.
    lengths: Mapping[tuple[int, int], Lengths] = dataclasses.field(default_factory=dict)
    tap: Tap | None = dataclasses.field(default=None, metadata=STATIC)  # receives the arrays of every block
    scales: Any = None  # set by the stack, branches B: stochastic-depth factors of the residual branches
    train: bool = dataclasses.field(default=False, metadata=STATIC)  # set by the stack: True if it had a key


PLAIN = Context()  # evaluation, all keys visible, no tap
