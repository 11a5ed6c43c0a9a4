"""What a stack tells its blocks, and a block its attention, beside the tokens."""

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
    """One for a whole stack, from which it makes one for each of its blocks; axes as in `layers.attention`."""

    key: Any = None  # of random numbers, B: to a stack it means training, to a block it is for dropout
    mask: Mask = ALL  # which keys each query sees
    positions: Any = None  # int T or B T: where tokens stand; one after another from the mask's offset if None
    cache: Any = None  # keys and values of earlier tokens, as `Stack.empty_cache` lays them out; to a block, its own
    # Set by the stack: `attention.full_lengths` of its tokens.
    lengths: Mapping[tuple[int, int], Lengths] = dataclasses.field(default_factory=dict)
    tap: Tap | None = dataclasses.field(default=None, metadata=STATIC)  # sees every block's arrays
    values: Any = None  # set by the stack, B T K H: those of its first layer, where attention mixes them in
    scales: Any = None  # set by the stack, branches B: what stochastic depth multiplies each residual branch by
    train: bool = dataclasses.field(default=False, metadata=STATIC)  # set by the stack: whether there was a key


PLAIN = Context()  # no training, every key seen, nothing tapped
