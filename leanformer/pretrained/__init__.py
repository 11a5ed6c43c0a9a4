"""Import and export of weights as safetensors files, in our names or in a layout of `leanformer.pretrained.layouts`.

Every tensor of the file and every parameter of the model must match; the error lists all that do not.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.errors import WeightsError
from leanformer.pretrained.layouts.entries import Entry, same
from leanformer.pretrained.storage import Tensors, read, write
from leanformer.runtime.mesh import flatten_names, leaf_names


__all__ = ["Allowed", "Tensors", "export", "load", "native_layout", "read", "resize_positions", "write"]
POSITIONS = "pos_embed"
SHOWN = 40  # maximum number of names in a message
# Old suffixes of names and their replacements.
OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def native_layout(like: Any) -> list[Entry]:
    """Return the layout of our own files, whose names and shapes are ours, for (parameters, statistics) of a model."""
    params, statistics = like
    return [Entry(name, (name,), same) for name in [*flatten_names(params), *flatten_names(statistics)]]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Permitted differences between a file of weights and a model; none by default."""

    new_head: bool = False  # classifiers keep their initial values, whatever the file has
    resize_positions: bool = False  # learned positions of another grid are resized as in timm
    grid: tuple[int, int] | None = None  # rows and columns of the model's patches; None for a square
    heads: tuple[str, ...] = ("head",)  # first parts of the names of classifiers' parameters
    source_grid: tuple[int, int] | None = None  # `grid` of the file's model; None if unknown, taken for a square

    def is_other_grid(self, name: str, table: np.ndarray) -> bool:
        """Return whether a parameter has flat positions (1 T D) of another grid, which may have an equal shape."""
        flat = name.endswith(POSITIONS) and table.ndim == 3
        return flat and None not in (self.grid, self.source_grid) and self.grid != self.source_grid


def load(tensors: Tensors, layout: Sequence[Entry], weights: Any, allowed: Allowed = Allowed()) -> Any:
    """Return the weights of a model, (parameters, statistics), with the values of a file.

    Args:
        tensors: tensors of the file by name.
        layout: entries that map names of the file to ours.
        weights: initialised (parameters, statistics) of the model, for the shapes and for values that the file lacks.
        allowed: permitted differences between file and model.

    Raises:
        WeightsError: names are missing or unmatched on either side, shapes differ, or tensors are not of floating-point
            numbers; the message lists all of them. Or the file has a tensor that the layout refuses.
    """
    initial, tensors = {**flatten_names(weights[0]), **flatten_names(weights[1])}, _normalise_names(tensors, layout)
    _check_refused(tensors, layout)
    values, wrong = dict(initial), []
    for entry in layout:
        names = entry.names()
        missing = [name for name in names if name not in tensors]
        ours = ", ".join(entry.ours)
        if not entry.ours or (allowed.new_head and _is_head(entry, allowed)):
            continue
        if missing:
            where = missing[0] if len(missing) == 1 else f"{entry.theirs}, {len(missing)} of {len(names)} layers"
            wrong.append(f"{where}: missing in the file (for {ours}){_hint(entry, allowed)}")
        elif integers := [name for name in names if not np.issubdtype(tensors[name].dtype, np.floating)]:
            found = f"{integers[0]}: {tensors[integers[0]].dtype} in the file"
            wrong.append(f"{found}, but {ours} has floating-point numbers")
        else:
            loaded, misfits = _load_entry(entry, [tensors[n] for n in names], initial, allowed)
            values |= loaded
            wrong += misfits
    covered = {name for entry in layout for name in entry.ours}
    wrong += [f"{name}: in the model, not in the layout" for name in initial if name not in covered]
    used = {name for entry in layout for name in entry.names()}
    used |= {name for name in tensors if allowed.new_head and name.split(".")[0] in allowed.heads}
    wrong += [f"{name} {tensors[name].shape}: in the file, not in this model" for name in tensors if name not in used]
    if wrong:
        more = [f"... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise WeightsError("\n  ".join(["The weights do not fit the model:", *wrong[:SHOWN], *more]))
    trees = ([values[name] for name in leaf_names(tree)] for tree in weights)
    return tuple(
        jax.tree.unflatten(jax.tree.structure(tree), leaves) for tree, leaves in zip(weights, trees, strict=True)
    )


def _check_refused(tensors: Tensors, layout: Sequence[Entry]) -> None:
    """Raise WeightsError if the file has a tensor that an entry refuses, or one that differs from its copy."""
    for entry in layout:
        present = [name for name in entry.names() if name in tensors]
        if entry.copy_of is not None:
            original: Any = tensors.get(entry.copy_of)  # nothing equals None
            present = [name for name in present if not np.array_equal(tensors[name], original)]
        if entry.refused and present:
            raise WeightsError(f"The file has {present[0]} {entry.refused}")


def _normalise_names(tensors: Tensors, layout: Sequence[Entry]) -> Tensors:
    """Return the tensors with missing prefixes, as of a model without its head, and old suffixes of names corrected."""
    names = {name for entry in layout for name in entry.names()}
    for old, new in OLDER:
        tensors = {name.removesuffix(old) + new if name.endswith(old) else name: x for name, x in tensors.items()}
    for prefix in sorted({name.partition(".")[0] for name in names}):
        full = {f"{prefix}.{name}" if f"{prefix}.{name}" in names else name: x for name, x in tensors.items()}
        if not any(name in names for name in tensors) and any(name in names for name in full):
            return full
    return tensors


def _is_head(entry: Entry, allowed: Allowed) -> bool:
    """Return True if an entry holds only parameters of classifiers."""
    return all(name.split(".")[0] in allowed.heads for name in entry.ours)


def _load_entry(
    entry: Entry, theirs: list[np.ndarray], initial: Mapping[str, Any], allowed: Allowed
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return our arrays of one entry by name, and a message for each that does not fit."""
    stacked, result, wrong = entry.layers is not None, {}, []
    shapes = [initial[name].shape[stacked:] for name in entry.ours]
    parts = _split_layers(entry, theirs, [entry.form.rows(shape) for shape in shapes])
    for name, shape, pieces in zip(entry.ours, shapes, parts, strict=True):
        layers = [_to_our_format(entry, x, shape) for x in pieces]
        if misfits := [i for i, x in enumerate(layers) if x.shape != shape or allowed.is_other_grid(name, x)]:
            if not (allowed.resize_positions and name.endswith(POSITIONS)):
                first = misfits[0]
                where = entry.theirs if len(misfits) == len(theirs) else entry.names()[first]
                here, there = f"{theirs[first].shape} in the file", f"{tuple(shape)} in the model"
                if allowed.is_other_grid(name, layers[first]):
                    here, there = f"{here} for patches {allowed.source_grid}", f"{there} for patches {allowed.grid}"
                wrong.append(f"{where}: {here}, {name} has {there}{_hint(entry, allowed)}")
                continue
            layers = [resize_positions(x, shape, allowed.grid, allowed.source_grid) for x in layers]
        result[name] = (np.stack(layers) if stacked else layers[0]).astype(initial[name].dtype)
    return result, wrong


def _to_our_format(entry: Entry, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor in our shape, or unchanged if its size does not match `shape`."""
    try:
        return entry.form.load(tensor, shape)
    except ValueError:
        return tensor


def _split_layers(entry: Entry, theirs: list[np.ndarray], rows: list[int]) -> list[list[np.ndarray]]:
    """Split each layer's tensor into one part per parameter; return whole tensors if the rows do not add up."""
    axis = entry.form.cut
    if any(x.ndim <= axis or x.shape[axis] != sum(rows) for x in theirs) or len(rows) == 1:
        return [theirs] * len(rows)
    pieces = [np.split(x, np.cumsum(rows)[:-1], axis) for x in theirs]
    return [list(part) for part in zip(*pieces, strict=True)]


def _hint(entry: Entry, allowed: Allowed) -> str:
    """Return the end of a message that names the option to permit a difference."""
    if _is_head(entry, allowed):
        return "; set init_from.new_head=True to start from a new head"
    if entry.ours[0].endswith(POSITIONS):
        return "; set init_from.resize_positions=True to resize positions"
    return ""


def resize_positions(
    table: np.ndarray,
    shape: Sequence[int],
    grid: tuple[int, int] | None = None,
    source_grid: tuple[int, int] | None = None,
) -> np.ndarray:
    """Resize learned positions (1 T D) or (1 height width D) to another grid: bicubic with antialiasing, float32.

    The tokens of a flat table (1 T D) that are not patches come first and keep their values. Its new and its old grid
    are rows and columns, square if None.
    """
    if table.ndim == 2:
        raise WeightsError(f"Positions {table.shape} of texts have one length. Set model.max_length={len(table)}.")
    if table.ndim == 4:
        return np.asarray(jax.image.resize(jnp.asarray(table), tuple(shape), "cubic"))
    side, side_to = math.isqrt(table.shape[1]), math.isqrt(shape[1])
    rows, columns = source_grid or (side, side)
    grid = grid or (side_to, side_to)
    prefix = table.shape[1] - rows * columns
    if shape[1] - math.prod(grid) != prefix or table.shape[-1] != shape[-1]:
        kind = "square grid" if source_grid is None else f"grid of {rows} x {columns}"
        raise WeightsError(
            f"Positions {table.shape} cannot be resized to {tuple(shape)} with {grid[0]} x {grid[1]} patches: they are "
            f"not a {kind} with the same number of other tokens."
        )
    patches = table[:, prefix:].reshape(1, rows, columns, -1)
    resized = jax.image.resize(jnp.asarray(patches), (1, *grid, shape[-1]), "cubic")
    return np.concatenate([table[:, :prefix], np.asarray(resized).reshape(1, math.prod(grid), -1)], axis=1)


def export(weights: Any, layout: Sequence[Entry]) -> Tensors:
    """Return weights under the names and in the shapes of a layout; `load` restores them bit for bit.

    Args:
        weights: (parameters, statistics) of a model.
        layout: entries that map names of the file to ours.

    Raises:
        WeightsError: the layout has no tensor for some weights.
    """
    values = {**flatten_names(weights[0]), **flatten_names(weights[1])}
    if unmatched := sorted(values.keys() - {name for entry in layout for name in entry.ours}):
        raise WeightsError(f"The layout has no parameter for {', '.join(unmatched[:SHOWN])}.")
    tensors: Tensors = {}
    for entry in layout:
        names = entry.names()
        if not entry.ours:
            tensors |= {} if entry.value is None else dict.fromkeys(names, entry.value)
            continue
        ours = [np.asarray(values[name]) for name in entry.ours]
        for i, name in enumerate(names):
            parts = [x[i] if entry.layers is not None else x for x in ours]
            parts = [entry.form.save(x) for x in parts]
            tensors[name] = np.concatenate(parts, entry.form.cut) if len(parts) > 1 else parts[0]
    return tensors
