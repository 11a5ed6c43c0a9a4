"""Tensor-parallel axes of parameters, which layers declare as metadata and `mesh` reads.

Examples: `nnx.Linear(..., kernel_metadata=sharing.hidden(-1))`, `nnx.Param(x, **sharing.REPLICATED)`. nnx's
`out_sharding` is not used, because it names axes of a mesh and requires that mesh while the model is created.
Axes are counted from the end, because stacks add an axis of layers in front.
"""

import dataclasses
from typing import Any


KEY = "shared"  # key of the metadata
REPLICATED = {KEY: None}  # every device holds the whole parameter and repeats the computation with it


@dataclasses.dataclass(frozen=True)
class TensorParallelAxis:
    """Axis of a parameter whose slices are independent of each other, so that different devices can compute with them.

    Attributes:
        axis: index of the axis, from the end.
        what: name of the slices for messages, such as "heads".
        few: True if there may be fewer slices than devices; every device then holds all of them.
    """

    axis: int
    what: str
    few: bool = False


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a parameter or statistic, for its sharding.

    Attributes:
        shape: shape of the array.
        stacked: True if the first axis is the axis of layers.
        over: declared tensor-parallel axis; None for `REPLICATED` and without a declaration.
        declared: True if the layer declares `over` or `REPLICATED`.
    """

    shape: tuple[int, ...]
    stacked: bool
    over: TensorParallelAxis | None
    declared: bool


def heads(axis: int) -> dict[str, Any]:
    """Return {KEY: `TensorParallelAxis`}, the metadata of a parameter split over heads along `axis`, such as -2."""
    return {KEY: TensorParallelAxis(axis, "heads")}


def key_heads(axis: int) -> dict[str, Any]:
    """Return {KEY: `TensorParallelAxis`}, the metadata of a parameter split over key and value heads along `axis`.

    The index `axis` is negative. Query heads may share these heads, so there may be fewer of them than devices.
    """
    return {KEY: TensorParallelAxis(axis, "heads of keys", few=True)}


def hidden(axis: int) -> dict[str, Any]:
    """Return {KEY: `TensorParallelAxis`}, the metadata of a parameter split over hidden channels of an MLP.

    Args:
        axis: index of their axis from the end, such as -1.
    """
    return {KEY: TensorParallelAxis(axis, "hidden channels")}
