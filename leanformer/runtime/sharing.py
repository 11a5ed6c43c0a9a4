"""What a layer says of a parameter where it makes it: over which axis devices can share it out. `mesh` reads it.

Said as metadata: `nnx.Linear(..., kernel_metadata=sharing.hidden(-1))`, `nnx.Param(x, **sharing.WHOLE)`. Not as nnx's
own `out_sharding`, which names axes of a mesh and wants that mesh while the model is made.
Axes are counted from the end, since stacks put one of layers in front.
"""

import dataclasses
from typing import Any


KEY = "shared"  # of the metadata
WHOLE = {KEY: None}  # every device holds all of it, and repeats what is computed with it


@dataclasses.dataclass(frozen=True)
class Over:
    """An axis, from the end, along which each piece is computed with by itself; and in words what it is of.

    few: whether it may be shorter than the devices are many, which then hold all of it.
    """

    axis: int
    what: str
    few: bool = False


@dataclasses.dataclass(frozen=True)
class Axes:
    """Of a parameter or a statistic: its shape, whether the first axis is of layers, and what is said of the others:
    None for `WHOLE`, and for nothing at all if `said` is False."""

    shape: tuple[int, ...]
    stacked: bool
    over: Over | None
    said: bool


def heads(axis: int) -> dict[str, Any]:
    """Metadata of what is shared out over heads."""
    return {KEY: Over(axis, "heads")}


def key_heads(axis: int) -> dict[str, Any]:
    """Likewise over heads of keys and values, each of which many queries may share."""
    return {KEY: Over(axis, "heads of keys", few=True)}


def hidden(axis: int) -> dict[str, Any]:
    """Likewise over the hidden channels of an MLP."""
    return {KEY: Over(axis, "hidden channels")}
