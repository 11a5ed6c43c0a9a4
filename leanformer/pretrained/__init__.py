"""Weights from and to safetensors files, in our own names or in a layout of `leanformer.pretrained.layouts`.

Nothing is guessed: every tensor there and every parameter here must be matched, or is listed in an error.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from leanformer.errors import WeightsError
from leanformer.pretrained import sharded
from leanformer.pretrained.checks import check_finite
from leanformer.pretrained.layouts.entries import Entry, Form, same
from leanformer.runtime import files
from leanformer.runtime.trees import leaf_names


Tensors = dict[str, np.ndarray]
POSITIONS = "pos_embed"
SHOWN = 40  # names in a message
OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))  # ends of names, and today's


def read(path: str | Path, *, finite: bool = True) -> Tensors:
    """The tensors of a safetensors file, of several by their index, or of a folder with one or the other; half
    precision becomes float32.

    Args:
        finite: whether to refuse a NaN or an infinity.

    Raises:
        WeightsError: no such file, a pickle (which is never opened), a damaged or truncated file, an index of what
            is not beside it, or numbers that are not finite.
    """
    path = Path(path).expanduser()
    path = sharded.found_in(path) if path.is_dir() else path
    several = path.name.endswith(sharded.INDEX)
    tensors: Tensors = {}
    for file, names in sharded.shards(path).items() if several else [(path, None)]:
        part = _read_file(file)
        if names is not None:
            sharded.check(file, part, names)
        if finite:
            check_finite(part, str(file))
        tensors |= part
    return tensors


def _read_file(path: Path) -> Tensors:
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise WeightsError(f"The weights {path} cannot be read: {error.strerror or error}.") from error
    # The length of a header comes first, which may begin as pickles do, and then the header, a JSON object.
    if head[8:] != b"{" and head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise WeightsError(
            f"{path} is a PyTorch pickle or an archive, which could run any program when opened, so it is not. "
            "Convert it where it came from, with safetensors.torch.save_file, and give that file."
        )
    try:
        tensors = safetensors.load_file(path)
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}. "
            "Was it truncated? Fetch it again."
        ) from error
    return {name: x.astype(np.float32) if x.dtype in (jnp.bfloat16, np.float16) else x for name, x in tensors.items()}


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as draft:
        whole = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        safetensors.save_file(whole, draft, dict(metadata or {}))


def write_sharded(stem: str | Path, tensors: Tensors, largest: int, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes <stem>-00001-of-<n>.safetensors and so on, each of at most `largest` bytes of tensors, or of one that is
    larger, and the index, which is there only with all of them. Returns its path."""
    stem = Path(stem)
    index = stem.with_name(stem.name + sharded.INDEX)
    index.unlink(missing_ok=True)  # of others, whose files have the same names perhaps
    parts = dict(sharded.named(stem, sharded.cut(tensors, largest)))
    for path, names in parts.items():
        write(path, {name: tensors[name] for name in names}, {"format": "pt"} | dict(metadata or {}))
    files.write_json(index, sharded.index_of(parts, tensors))
    return index


def named(tree: Any) -> dict[str, Any]:
    """A tree's leaves by dotted name."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def own_layout(like: Any) -> list[Entry]:
    """The layout of our own files: every parameter and statistic under its dotted name."""
    params, statistics = like
    return [Entry(name, (name,), same) for name in [*named(params), *named(statistics)]]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What may differ between file and model; by default nothing.

    new_head: a classifier of another size, or one that is missing there, starts from its initialisation; one of the
        file that the model has not is left there.
    resize_positions: learned positions of another grid are resized, bicubic with antialiasing, as timm does.
    grid: rows and columns of the model's patches; square if None. That of the file is square.
    heads: parameters of classifiers, by the first part of their names (`families.Family.classifiers`).
    """

    new_head: bool = False
    resize_positions: bool = False
    grid: tuple[int, int] | None = None
    heads: tuple[str, ...] = ("head",)


def load(tensors: Tensors, layout: Sequence[Entry], weights: Any, allowed: Allowed = Allowed()) -> Any:
    """Weights with the numbers of a file.

    Args:
        tensors: of the file.
        layout: their names and ours.
        weights: the model's (params, statistics), as initialised: shapes, and what stays where the file has nothing.
        allowed: what may differ.

    Raises:
        WeightsError: names that are missing or left over on either side, shapes that differ, all of them listed; or a
            tensor that is refused.
    """
    have, tensors = {**named(weights[0]), **named(weights[1])}, _full_names(tensors, layout)
    _check_refused(tensors, layout)
    found, wrong, used = dict(have), [], set()
    for entry in layout:
        names = entry.names()
        used.update(names)
        missing = [name for name in names if name not in tensors]
        if not entry.ours:
            continue
        unknown = [name for name in entry.ours if name not in have]
        if unknown:
            wrong += [f"{name}: the key map has it, the model has not" for name in unknown]
        elif missing and not (allowed.new_head and _is_head(entry, allowed)):
            which = missing[0] if len(missing) == 1 else f"{entry.theirs}, {len(missing)} of {len(names)} layers"
            wrong.append(
                f"{which}: missing in the file (for {', '.join(entry.ours)}){_hint(entry, entry.ours[0], allowed)}"
            )
        elif not missing:
            for name, value in _parts(entry, [tensors[n] for n in names], have, allowed, wrong):
                found[name] = value
    covered = {name for entry in layout for name in entry.ours}
    wrong += [f"{name}: nothing in the key map fills it" for name in have if name not in covered]
    used |= {name for name in tensors if allowed.new_head and name.split(".")[0] in allowed.heads}
    wrong += [f"{name} {tensors[name].shape}: in the file, not in this model" for name in tensors if name not in used]
    if wrong:
        more = [f"... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise WeightsError("\n  ".join(["The weights do not fit the model:", *wrong[:SHOWN], *more]))
    trees = ([found[name] for name in leaf_names(tree)] for tree in weights)
    return tuple(
        jax.tree.unflatten(jax.tree.structure(tree), leaves) for tree, leaves in zip(weights, trees, strict=True)
    )


def _check_refused(tensors: Tensors, layout: Sequence[Entry]) -> None:
    for entry in layout:
        if entry.refused and (there := [name for name in entry.names() if name in tensors]):
            more = f", and {len(there) - 1} more," if len(there) > 1 else ""
            raise WeightsError(f"The file has {there[0]}{more} {entry.refused}")


def _full_names(tensors: Tensors, layout: Sequence[Entry]) -> Tensors:
    """With the first part of names, Hugging Face's "transformer." say, that files of a model without its head lack; and
    with today's names of what the oldest files call otherwise."""
    names = {name for entry in layout for name in entry.names()}
    for old, new in OLDER:
        tensors = {name.removesuffix(old) + new if name.endswith(old) else name: x for name, x in tensors.items()}
    for prefix in sorted({name.partition(".")[0] for name in names}):
        full = {f"{prefix}.{name}" if f"{prefix}.{name}" in names else name: x for name, x in tensors.items()}
        if not any(name in names for name in tensors) and any(name in names for name in full):
            return full
    return tensors


def _is_head(entry: Entry, allowed: Allowed) -> bool:
    return all(name.split(".")[0] in allowed.heads for name in entry.ours)


def _parts(
    entry: Entry, theirs: list[np.ndarray], have: Mapping[str, Any], allowed: Allowed, wrong: list[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Our arrays of one entry; what does not fit is added to `wrong`."""
    stacked = entry.layers is not None
    shapes = [have[name].shape[stacked:] for name in entry.ours]
    rows = [form.rows(shape) for form, shape in zip(entry.forms, shapes, strict=True)]
    for name, shape, form, places in zip(entry.ours, shapes, entry.forms, _cut(entry, theirs, rows), strict=True):
        layers = [_laid_out(form, x, shape) for x in places]
        if misfits := [i for i, x in enumerate(layers) if x.shape != shape]:
            if allowed.new_head and _is_head(entry, allowed):
                continue
            if allowed.resize_positions and name.endswith(POSITIONS):
                layers = [resize_positions(x, shape, allowed.grid) for x in layers]
            else:
                hint = _hint(entry, name, allowed)
                first = misfits[0]
                which = entry.theirs if len(misfits) == len(theirs) else entry.names()[first]
                wrong.append(f"{which}: {theirs[first].shape} in the file, {name} wants {tuple(shape)}{hint}")
                continue
        value = np.stack(layers) if stacked else layers[0]
        yield name, value.astype(have[name].dtype)


def _laid_out(form: Form, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor in our layout, or as it is if its numbers do not fill `shape`."""
    try:
        return form.load(tensor, shape)
    except ValueError:
        return tensor


def _cut(entry: Entry, theirs: list[np.ndarray], rows: list[int]) -> list[list[np.ndarray]]:
    """For each of ours its piece of each layer's tensor; whole tensors where the rows do not add up."""
    axis = entry.forms[0].cut
    if len(rows) == 1:
        return [theirs]
    if any(x.ndim <= axis or x.shape[axis] != sum(rows) for x in theirs):
        return [theirs] * len(rows)
    return [list(pieces) for pieces in zip(*(entry.split(x, rows) for x in theirs), strict=True)]


def _hint(entry: Entry, name: str, allowed: Allowed) -> str:
    if _is_head(entry, allowed):
        return "; a new head is made if asked (init_from.new_head)"
    if name.endswith(POSITIONS):
        return "; positions are resized if asked (init_from.resize_positions)"
    return ""


def resize_positions(table: np.ndarray, shape: Sequence[int], grid: tuple[int, int] | None = None) -> np.ndarray:
    """Learned positions (1 T D), or (1 height width D), on another grid: bicubic with antialiasing, float32.

    Of a flat table the old grid is square, and the new one if it is not given; tokens that are no patches come first
    and keep their numbers.

    Raises:
        WeightsError: a flat table that holds no square grid, or not the new one; or positions of texts.
    """
    if table.ndim == 2:
        raise WeightsError(f"Positions {table.shape} are of texts, and are not resized. Set model.max_length to them.")
    if table.ndim == 4:
        return np.asarray(jax.image.resize(jnp.asarray(table), tuple(shape), "cubic"))
    side = math.isqrt(table.shape[1])
    grid = grid or (math.isqrt(shape[1]),) * 2
    prefix = table.shape[1] - side**2
    if shape[1] - math.prod(grid) != prefix or table.shape[-1] != shape[-1]:
        raise WeightsError(
            f"Positions {table.shape} cannot be resized to {tuple(shape)}, of {grid[0]} x {grid[1]} patches: they are "
            "no square grid with as many other tokens."
        )
    patches = table[:, prefix:].reshape(1, side, side, -1)
    resized = jax.image.resize(jnp.asarray(patches), (1, *grid, shape[-1]), "cubic")
    return np.concatenate([table[:, :prefix], np.asarray(resized).reshape(1, math.prod(grid), -1)], axis=1)


def export(weights: Any, layout: Sequence[Entry]) -> Tensors:
    """Weights under the names, and in the shapes, of a layout; `load` of it gives the same numbers, bit for bit.

    Raises:
        WeightsError: weights that the layout has no place for.
    """
    have = {**named(weights[0]), **named(weights[1])}
    if left := sorted(have.keys() - {name for entry in layout for name in entry.ours}):
        raise WeightsError(
            f"The layout has no place for {', '.join(left[:SHOWN])}: without, it would be another model."
        )
    tensors: Tensors = {}
    for entry in layout:
        names = entry.names()
        if not entry.ours:
            tensors |= {} if entry.value is None else dict.fromkeys(names, entry.value)
            continue
        ours = [np.asarray(have[name]) for name in entry.ours]
        for i, name in enumerate(names):
            parts = [x[i] if entry.layers is not None else x for x in ours]
            parts = [form.save(x) for form, x in zip(entry.forms, parts, strict=True)]
            tensors[name] = entry.join(parts) if len(parts) > 1 else parts[0]
    return tensors
