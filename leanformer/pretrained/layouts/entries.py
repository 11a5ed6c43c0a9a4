"""Building blocks of layouts: a published tensor, our parameters in it, and the conversion between their shapes."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """Conversion between a published tensor and our parameter of another shape, such as (D, N·H) and (D, N, H)."""

    rows: Callable[[Shape], int]  # from our shape, the length of the axis `cut` of the published tensor
    load: Callable[[np.ndarray, Shape], np.ndarray]  # from a published tensor and our shape, our array
    save: Callable[[np.ndarray], np.ndarray]  # from our array, the published tensor
    cut: int = 0  # axis of the published tensor along which several of our parameters are concatenated


# Tokens, positions, norms, scalars: equal shapes.
same = Form(lambda shape: shape[0] if shape else 1, lambda x, shape: x, lambda x: x)
# Biases, which are published flat: (N·H,) to (N, H).
flat = Form(math.prod, lambda x, shape: x.reshape(shape), np.ravel)


def matrix(inputs: int = 1) -> Form:
    """Form of a torch Linear's weight (out, in).

    `inputs` is the number of leading axes of our kernel that are inputs: 1 for (D, N, H), 2 for (N, H, D).
    """

    def save(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:inputs]), -1).T

    return Form(lambda shape: math.prod(shape[inputs:]), lambda x, shape: x.T.reshape(shape), save)


def axis(inputs: int) -> Form:
    """Form of a matrix (in, out), as in GPT-2; `inputs` as for `matrix`."""

    def save(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:inputs]), -1)

    return Form(lambda shape: math.prod(shape[inputs:]), lambda x, shape: x.reshape(shape), save, cut=1)


def conv(size: int, *, channels: int | None = None) -> Form:
    """Form of a convolution (out, in, size, size); ours is (size, size, in, out), or flat (size · size · in, out).

    `channels` are the inputs per group where our shape does not tell: 1 for a depthwise kernel (size, size, C).
    """

    def load(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x.transpose(2, 3, 1, 0).reshape(shape)

    def save(x: np.ndarray) -> np.ndarray:
        inputs = channels or math.prod(x.shape[:-1]) // size**2
        return x.reshape(size, size, inputs, -1).transpose(3, 2, 0, 1)

    return Form(lambda shape: shape[-1], load, save)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Entry of a layout: one published tensor, or one per layer, and our parameters that it contains.

    An entry without our parameters describes a published tensor that loading ignores, and that may be missing.
    `refused`, `copy_of` and `value` apply only to such entries.
    """

    theirs: str  # published name, with {i} for the number of the layer if `layers` is given
    ours: tuple[str, ...]  # dotted names of parameters or statistics, which `theirs` concatenates along `Form.cut`
    form: Form  # of all of `ours`
    layers: int | None = None  # L if ours have a leading layer axis and L tensors are published; None for one tensor
    refused: str | None = None  # why files that contain the tensor cannot be loaded; None if they can
    copy_of: str | None = None  # published tensor that this one must equal: `refused` then applies only if they differ
    value: np.ndarray | None = None  # what export writes; None to write no such tensor

    def names(self) -> list[str]:
        """Return the names of the published tensors, one per layer, or one if `layers` is None."""
        return [self.theirs] if self.layers is None else [self.theirs.format(i=i) for i in range(self.layers)]


def linear(
    theirs: str, ours: str, form: Form | None = None, *, bias: bool = True, layers: int | None = None
) -> list[Entry]:
    """Entries of a linear layer or convolution, whose `weight` is our `kernel`, in the form `matrix()` by default."""
    entries = [Entry(f"{theirs}.weight", (f"{ours}.kernel",), form or matrix(), layers)]
    return entries + ([Entry(f"{theirs}.bias", (f"{ours}.bias",), flat, layers)] if bias else [])


def norm(theirs: str, ours: str, *, layers: int | None = None) -> list[Entry]:
    """Entries of a layer norm: `weight`, our `scale`, and `bias`."""
    names = {"weight": "scale", "bias": "bias"}
    return [Entry(f"{theirs}.{a}", (f"{ours}.{b}",), same, layers) for a, b in names.items()]


def batch_norm(theirs: str, ours: str, *, layers: int | None = None) -> list[Entry]:
    """Return the entries of `norm`, of the running mean and variance, and of num_batches_tracked."""
    names = {"running_mean": "mean", "running_var": "var"}
    statistics = [Entry(f"{theirs}.{a}", (f"{ours}.{b}",), same, layers) for a, b in names.items()]
    # The number of batches is used only by PyTorch's cumulative average, which no model here uses.
    seen = Entry(f"{theirs}.num_batches_tracked", (), same, layers, value=np.zeros((), np.int64))
    return [*norm(theirs, ours, layers=layers), *statistics, seen]
