"""What a layout is written in: each of their tensors, ours that it holds, and how the numbers are turned around.

A layout is a list of `Entry`, read in both directions by `leanformer.pretrained`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """How one tensor is laid out there and here.

    rows: length of their axis `cut`, given our shape; tensors that hold several of ours are cut there.
    load: their numbers in our shape. save: ours in theirs.
    """

    rows: Callable[[Shape], int]
    load: Callable[[np.ndarray, Shape], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]
    cut: int = 0


# Tokens, positions, norms, single numbers: the same shape here and there.
same = Form(lambda shape: shape[0] if shape else 1, lambda x, shape: x, lambda x: x)
# Biases, which are flat there: (N·H,) to (N, H).
flat = Form(math.prod, lambda x, shape: x.reshape(shape), np.ravel)


def matrix(inputs: int = 1) -> Form:
    """A torch Linear (out, in); the first `inputs` axes of our kernel are inputs: 1 for (D, N, H), 2 for (N, H, D)."""

    def load(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x.T.reshape(shape)

    def save(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:inputs]), -1).T

    return Form(lambda shape: math.prod(shape[inputs:]), load, save)


def axis(inputs: int) -> Form:
    """A matrix (in, out), as GPT-2's; the first `inputs` axes of our kernel are inputs."""

    def save(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:inputs]), -1)

    return Form(lambda shape: math.prod(shape[inputs:]), lambda x, shape: x.reshape(shape), save, cut=1)


def conv(size: int, *, channels: int | None = None) -> Form:
    """A torch convolution (out, in, size, size) to (size, size, in, out), or to that flattened to rows x out.

    Args:
        channels: of the input, per group; needed where our shape does not say it: a flattened one says it too, but a
            depthwise kernel (size, size, C) has 1.
    """

    def load(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x.transpose(2, 3, 1, 0).reshape(shape)

    def save(x: np.ndarray) -> np.ndarray:
        inputs = channels or math.prod(x.shape[:-1]) // size**2
        return x.reshape(size, size, inputs, -1).transpose(3, 2, 0, 1)

    return Form(lambda shape: shape[-1], load, save)


def neighbours(form: Form, width: int) -> Form:
    """Of a form whose last channels, `width` of each of our heads, turn with their positions: there neighbours are
    pairs, here halves (`layers.positions.rotate`). Queries and keys in another order have the same products."""

    def load(x: np.ndarray, shape: Shape) -> np.ndarray:
        rest, pairs = np.split(form.load(x, shape), [shape[-1] - width], axis=-1)
        return np.concatenate([rest, pairs[..., 0::2], pairs[..., 1::2]], axis=-1)

    def save(x: np.ndarray) -> np.ndarray:
        rest, halves = np.split(x, [x.shape[-1] - width], axis=-1)
        pairs = np.stack(np.split(halves, 2, axis=-1), axis=-1).reshape(halves.shape)
        return form.save(np.concatenate([rest, pairs], axis=-1))

    return dataclasses.replace(form, load=load, save=save)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of their tensors, or one a layer.

    theirs: its name, with {i} for the layer where `layers` is given.
    ours: dotted names of the parameters or statistics it holds, joined there along the form's axis. None of them: the
        tensor is known and not read; on export it is `value`, or left out if that is None.
    form: of all of ours, or one each, which are cut along the same axis.
    layers: L, where ours have a leading axis of layers and theirs are L tensors, numbered from `first`.
    optional: of a tensor that is not read: it is not always there.
    refused: of a tensor that is not read: why no file that has it can be.
    blocks: how often a share of each of ours follows the other along that axis: once, or once a head.
    """

    theirs: str
    ours: tuple[str, ...]
    form: Form | tuple[Form, ...]
    layers: int | None = None
    first: int = 0
    optional: bool = False
    refused: str | None = None
    value: np.ndarray | None = None
    blocks: int = 1

    @property
    def forms(self) -> tuple[Form, ...]:
        """One for each of ours."""
        return self.form if isinstance(self.form, tuple) else (self.form,) * len(self.ours)

    def names(self) -> list[str]:
        """Their names, one a layer."""
        if self.layers is None:
            return [self.theirs]
        return [self.theirs.format(i=i + self.first) for i in range(self.layers)]

    def split(self, x: np.ndarray, rows: Sequence[int]) -> list[np.ndarray]:
        """What their tensor holds of each of ours, which are so long along the axis that joins them."""
        axis, cuts = self.forms[0].cut, np.cumsum(rows)[:-1] // self.blocks
        pieces = np.split(_folded(x, axis, self.blocks), cuts, axis + 1)
        return [piece.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :]) for piece in pieces]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Their tensor of such pieces."""
        axis = self.forms[0].cut
        whole = np.concatenate([_folded(x, axis, self.blocks) for x in parts], axis + 1)
        return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])


def _folded(x: np.ndarray, axis: int, blocks: int) -> np.ndarray:
    return x.reshape(*x.shape[:axis], blocks, -1, *x.shape[axis + 1 :])


def linear(
    theirs: str, ours: str, form: Form | None = None, *, bias: bool = True, layers: int | None = None, first: int = 0
) -> list[Entry]:
    """The entries of a layer with weight and bias: `matrix()` unless another form is given."""
    entries = [Entry(f"{theirs}.weight", (f"{ours}.kernel",), form or matrix(), layers, first)]
    return entries + ([Entry(f"{theirs}.bias", (f"{ours}.bias",), flat, layers, first)] if bias else [])


def norm(theirs: str, ours: str, *, layers: int | None = None, first: int = 0) -> list[Entry]:
    """The entries of a layer norm."""
    return [
        Entry(f"{theirs}.weight", (f"{ours}.scale",), same, layers, first),
        Entry(f"{theirs}.bias", (f"{ours}.bias",), same, layers, first),
    ]


def batch_norm(theirs: str, ours: str, *, layers: int | None = None, first: int = 0) -> list[Entry]:
    """The entries of a batch norm, its running statistics among them."""
    names = {"running_mean": "mean", "running_var": "var"}
    statistics = [Entry(f"{theirs}.{a}", (f"{ours}.{b}",), same, layers, first) for a, b in names.items()]
    # Batches seen: only PyTorch's cumulative average, which nobody here uses, would read it.
    seen = Entry(f"{theirs}.num_batches_tracked", (), same, layers, first, optional=True, value=np.zeros((), np.int64))
    return [*norm(theirs, ours, layers=layers, first=first), *statistics, seen]


def attention(
    theirs: str,
    ours: str,
    *,
    fused: str = "qkv",
    out: str = "proj",
    bias: bool = True,
    layers: int | None,
    first: int = 0,
) -> list[Entry]:
    """timm's self-attention: one fused Linear for q, k, v (in that order, then heads, then head width), and one out."""
    names = ("query", "key", "value")
    entries = [Entry(f"{theirs}.qkv.weight", tuple(f"{ours}.{n}.kernel" for n in names), matrix(), layers, first)]
    if bias:
        entries.append(Entry(f"{theirs}.qkv.bias", tuple(f"{ours}.{n}.bias" for n in names), flat, layers, first))
    return entries + linear(f"{theirs}.proj", f"{ours}.out", matrix(2), layers=layers, first=first)


def mlp(theirs: str, ours: str, *, layers: int | None = None, first: int = 0) -> list[Entry]:
    """timm's MLP."""
    return [
        *linear(f"{theirs}.fc1", f"{ours}.up", layers=layers, first=first),
        *linear(f"{theirs}.fc2", f"{ours}.down", layers=layers, first=first),
    ]
