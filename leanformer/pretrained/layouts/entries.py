"""Building blocks of layouts: a published tensor, our parameters in it, and the conversion between their shapes.

A layout is a list of `Entry`, which `leanformer.pretrained` applies in both directions.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """Conversion between a published tensor and our parameter of another shape, such as (D, N·H) and (D, N, H).

    Attributes:
        rows: function from our shape to the length of the axis `cut` of the published tensor.
        load: function from a published tensor and our shape to our array.
        save: function from our array to the published tensor.
        cut: axis of the published tensor along which several of our parameters are concatenated.
    """

    rows: Callable[[Shape], int]
    load: Callable[[np.ndarray, Shape], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]
    cut: int = 0


# Tokens, positions, norms, scalars: equal shapes.
same = Form(lambda shape: shape[0] if shape else 1, lambda x, shape: x, lambda x: x)
# Biases, which are published flat: (N·H,) to (N, H).
flat = Form(math.prod, lambda x, shape: x.reshape(shape), np.ravel)


def matrix(inputs: int = 1) -> Form:
    """Return the `Form` that converts a torch Linear's weight (out, in) from and to our kernel.

    Args:
        inputs: number of leading axes of our kernel that are inputs: 1 for (D, N, H), 2 for (N, H, D).
    """

    def load(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x.T.reshape(shape)

    def save(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:inputs]), -1).T

    return Form(lambda shape: math.prod(shape[inputs:]), load, save)


def axis(inputs: int) -> Form:
    """Return the `Form` of a published matrix (in, out), as in GPT-2.

    Args:
        inputs: number of leading axes of our kernel that are inputs: 1 for (D, N, H), 2 for (N, H, D).
    """

    def save(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:inputs]), -1)

    return Form(lambda shape: math.prod(shape[inputs:]), lambda x, shape: x.reshape(shape), save, cut=1)


def conv(size: int, *, channels: int | None = None) -> Form:
    """Return the `Form` of a convolution: (out, in, size, size) in torch, and ours.

    Ours is (size, size, in, out), or flattened to (size · size · in, out).

    Args:
        size: height and width of the kernel.
        channels: input channels per group. Needed only if our shape does not imply it: a depthwise kernel
            (size, size, C) has 1.
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

    An entry without our parameters (`ours` is ()) describes a published tensor that loading ignores, and that may be
    missing. `refused`, `copy_of` and `value` apply only to such entries.

    Attributes:
        theirs: name of the published tensor, with {i} for the number of the layer if `layers` is given.
        ours: dotted names of our parameters or statistics, which the published tensor concatenates along the axis `cut`
            of their `Form`; () for a tensor that loading ignores.
        form: `Form` that converts between the published shape and ours: one for all of `ours`, or one for each, with
            the same `cut`.
        layers: L if our parameters have a leading layer axis and L tensors are published; None for one tensor.
        refused: reason why files that contain the ignored tensor cannot be loaded, for the error; None if they can.
        copy_of: name of another published tensor: `refused` then applies only if the two differ. None if it always
            does.
        value: array that export writes for the ignored tensor; None to write no such tensor.
    """

    theirs: str
    ours: tuple[str, ...]
    form: Form | tuple[Form, ...]
    layers: int | None = None
    refused: str | None = None
    copy_of: str | None = None
    value: np.ndarray | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """`Form` of each of our parameters, in the order of `ours`; () without our parameters."""
        return self.form if isinstance(self.form, tuple) else (self.form,) * len(self.ours)

    def names(self) -> list[str]:
        """Return the names of the published tensors, one per layer, or one if `layers` is None."""
        if self.layers is None:
            return [self.theirs]
        return [self.theirs.format(i=i) for i in range(self.layers)]

    def split(self, x: np.ndarray, rows: Sequence[int]) -> list[np.ndarray]:
        """Split a published tensor into one part per parameter of ours, still in the published form.

        Args:
            x: published tensor, of one layer.
            rows: length of each part along the axis `cut`, in the order of `ours`.
        """
        return np.split(x, np.cumsum(rows)[:-1], self.forms[0].cut)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the published tensor that consists of the given parts; the inverse of `split`.

        Args:
            parts: part of each of our parameters in the published form, in the order of `ours`.
        """
        return np.concatenate(parts, self.forms[0].cut)


def linear(
    theirs: str, ours: str, form: Form | None = None, *, bias: bool = True, layers: int | None = None
) -> list[Entry]:
    """Return the layout entries of a linear layer or convolution: one of its weight and, with `bias`, one of its bias.

    They pair `{theirs}.weight` with `{ours}.kernel`, and `{theirs}.bias` with `{ours}.bias`.

    Args:
        theirs, ours: published name and our name of the layer, without the last part.
        form: conversion of the weight; None for `matrix()`, a torch Linear with one input axis in our kernel.
        bias: False if the layer has no bias.
        layers: L if `theirs` contains {i} and our parameters have a leading layer axis L; None for a single layer.
    """
    entries = [Entry(f"{theirs}.weight", (f"{ours}.kernel",), form or matrix(), layers)]
    return entries + ([Entry(f"{theirs}.bias", (f"{ours}.bias",), flat, layers)] if bias else [])


def norm(theirs: str, ours: str, *, layers: int | None = None) -> list[Entry]:
    """Return the entries of a layer norm: `weight`, our `scale`, and `bias`. Arguments are those of `linear`."""
    names = {"weight": "scale", "bias": "bias"}
    return [Entry(f"{theirs}.{a}", (f"{ours}.{b}",), same, layers) for a, b in names.items()]


def batch_norm(theirs: str, ours: str, *, layers: int | None = None) -> list[Entry]:
    """Return the entries of a batch norm: weight, bias, running_mean and running_var, ours scale, bias, mean and var.

    A published `num_batches_tracked` is ignored, and exported as 0. Arguments are those of `linear`.
    """
    names = {"running_mean": "mean", "running_var": "var"}
    statistics = [Entry(f"{theirs}.{a}", (f"{ours}.{b}",), same, layers) for a, b in names.items()]
    # The number of batches is used only by PyTorch's cumulative average, which no model here uses.
    seen = Entry(f"{theirs}.num_batches_tracked", (), same, layers, value=np.zeros((), np.int64))
    return [*norm(theirs, ours, layers=layers), *statistics, seen]


def attention(theirs: str, ours: str, *, bias: bool = True, layers: int | None) -> list[Entry]:
    """Return the entries of timm's self-attention: `qkv`, a fused Linear of query, key and value, and `proj`.

    Args:
        theirs, ours: published name and our name of the attention, to which the names of its tensors are added.
        bias: False if `qkv` has no bias; `proj` always has one.
        layers: number of layers L, for published names with {i}; None for a single layer.
    """
    names = ("query", "key", "value")
    entries = [Entry(f"{theirs}.qkv.weight", tuple(f"{ours}.{n}.kernel" for n in names), matrix(), layers)]
    if bias:
        entries.append(Entry(f"{theirs}.qkv.bias", tuple(f"{ours}.{n}.bias" for n in names), flat, layers))
    return entries + linear(f"{theirs}.proj", f"{ours}.out", matrix(2), layers=layers)


def mlp(theirs: str, ours: str, *, layers: int | None = None) -> list[Entry]:
    """Return the entries of timm's MLP: `fc1`, our `up`, and `fc2`, our `down`. Arguments are those of `linear`."""
    return linear(f"{theirs}.fc1", f"{ours}.up", layers=layers) + linear(f"{theirs}.fc2", f"{ours}.down", layers=layers)
