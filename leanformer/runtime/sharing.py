"""Tensor-parallel axes of parameters, which layers declare as metadata and `mesh` reads.

Examples: `nnx.Linear(..., kernel_metadata=sharing.hidden(-1))`, `nnx.Param(x, **sharing.WHOLE)`. nnx's `out_sharding`
is not used, because it names axes of a mesh and requires that mesh while the model is created.
Axes are counted from the end, because stacks add an axis of layers in front.
"""

import dataclasses
from typing import Any


KEY = "shared"  # key of the metadata
REPLICATED = {KEY: None}  # every device holds the whole parameter and repeats the computation with it


@dataclasses.dataclass(frozen=True)
class TensorParallelAxis:
    """Axis of a parameter whose slices are computed with independently."""

    axis: int  # index of the axis, from the end
    what: str  # name of the slices for messages, such as "heads"
    few: bool = False  # True if there may be fewer slices than devices; every device then holds all of them


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a parameter or statistic."""

    shape: tuple[int, ...]
    stacked: bool  # True if the first axis is the axis of layers
    over: TensorParallelAxis | None  # declared tensor-parallel axis; None for `REPLICATED` and without a declaration
    declared: bool  # True if the layer declares `over` or `REPLICATED`


def heads(axis: int) -> dict[str, Any]:
    """Return the metadata of a parameter that is split over heads along `axis`."""
    return {KEY: TensorParallelAxis(axis, "heads")}


def key_heads(axis: int) -> dict[str, Any]:
    """Return the metadata of a parameter that is split over key and value heads, which query heads may share."""
    return {KEY: TensorParallelAxis(axis, "heads of keys", few=True)}


def hidden(axis: int) -> dict[str, Any]:
    """Return the metadata of a parameter that is split over the hidden channels of an MLP."""
    return {KEY: TensorParallelAxis(axis, "hidden channels")}
