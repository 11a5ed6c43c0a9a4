"""ListOps of the Long Range Arena (Tay et al. 2021, section 2.2.1), made from a seed; `listops_tsv` reads files.

An expression such as `[MAX 4 [SM 7 5 ] 0 ]` is answered by a digit. Its symbols are tokens 1 to 15: the digits 0 to 9
are 1 to 10, then come [MIN [MAX [MED [SM and the closing bracket. Id 0 is padding and occurs in no example; examples
are as long as they are, and cutting and padding belong to the batch.

The distribution is that of the published generator: a node above the last level is an operator with probability 1/4,
else a digit; an operator has 2 to `max_args` arguments and is MIN, MAX, MED (the median, rounded down) or SM (the sum
modulo 10), all uniform; expressions of other lengths are drawn again, and no two are equal. The random bits are
Philox4x64-10 with the key (seed, block), used as integers, so a set is the same on every machine and NumPy.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanformer.data import made
from leanformer.errors import ConfigError, DataError


SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # of ids 1, 2, ...
OPENER, CLOSER = SYMBOLS.index("[MIN") + 1, SYMBOLS.index("]") + 1
DRAWS = 4096  # expressions drawn in a block, of which those of a wanted length are kept
PATIENCE = 256  # blocks in a row without anything new before a set is called impossible
KIND = "ListOps"
VERSION = 1  # of the files and of what a seed means


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a set is made of; the defaults are the Long Range Arena's.

    Args:
        train, val, test: examples.
        min_length, max_length: bounds that the number of tokens lies strictly between.
        depth: levels of an expression, operators on all but the last.
        max_args: most arguments of an operator.
        seed: 0 ≤ seed < 2^64.

    Raises:
        ConfigError: a value that no set can have.
    """

    train: int = 96_000
    val: int = 2_000
    test: int = 2_000
    min_length: int = 500
    max_length: int = 2_000
    depth: int = 10
    max_args: int = 10
    seed: int = 0

    def __post_init__(self):
        low = min(dataclasses.astuple(self)) < 0 or self.depth < 1 or self.max_args < 2
        if low or self.seed >= 2**64 or self.max_length < self.min_length + 2:
            raise ConfigError(
                f"No ListOps set can be made as {self}: wanted are counts and lengths from 0, max_length at least "
                "min_length + 2, depth from 1, max_args from 2 and 0 <= seed < 2^64."
            )


class Expressions(NamedTuple):
    """Many expressions in three arrays."""

    tokens: np.ndarray  # uint8, one expression after the other
    offsets: np.ndarray  # int64: expression i is tokens[offsets[i] : offsets[i + 1]]
    labels: np.ndarray  # uint8

    @classmethod
    def join(cls, examples: Iterable[tuple[bytes, int]]) -> "Expressions":
        texts, labels = zip(*examples, strict=True)
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts), np.uint8), offsets, np.array(labels, np.uint8))


def sample(recipe: Recipe, block: int) -> Expressions:
    """The expressions of a wanted length among the `DRAWS` of a block; they may repeat."""
    levels = _grow(recipe, block)
    sizes, values = _fold(levels)
    offsets = np.concatenate([[0], np.cumsum(sizes[0])])
    return Expressions(_unfold(levels, sizes), offsets, values[0])


def _grow(recipe: Recipe, block: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token, number of arguments) of all nodes, level by level; the children of a level follow in its order."""
    bits = np.random.Philox(key=np.array([recipe.seed, block], np.uint64))
    tree, lengths, levels = np.arange(DRAWS), np.zeros(DRAWS), []
    for level in range(recipe.depth):
        high, low = np.divmod(bits.random_raw(len(tree)), np.uint64(2**32))
        operator = high < (2**30 if level < recipe.depth - 1 else 0)
        args, kind = np.divmod(_uniform(low, 4 * (recipe.max_args - 1)), 4)
        args = np.where(operator, args + 2, 0)
        levels.append((tree, np.where(operator, OPENER + kind, 1 + _uniform(low, 10)).astype(np.uint8), args))
        lengths += np.bincount(tree, 1 + operator, DRAWS)
        tree = np.repeat(tree, args)
        # Most expressions are too long, and known to be so long before they are complete.
        lengths[lengths + np.bincount(tree, minlength=DRAWS) >= recipe.max_length] = np.inf
        tree = tree[lengths[tree] < np.inf]
    keep = (lengths > recipe.min_length) & (lengths < recipe.max_length)
    return [(token[keep[tree]], args[keep[tree]]) for tree, token, args in levels]


def _uniform(bits: np.ndarray, n: int) -> np.ndarray:
    """32 random bits to an integer below n; shares differ by less than n / 2^32 of themselves."""
    return (bits * np.uint64(n) >> np.uint64(32)).astype(np.int64)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _fold(levels: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The number of tokens and the value of every node, level by level, computed from the bottom."""
    sizes, values = [], []
    for token, args in reversed(levels):
        operator = args > 0
        size, value = np.ones(len(token), np.int64), token - np.uint8(1)
        if operator.any():
            size[operator] = 2 + np.add.reduceat(sizes[-1], _starts(args[operator]))
            value[operator] = _apply(token[operator] - OPENER, args[operator], values[-1])
        sizes.append(size)
        values.append(value)
    return sizes[::-1], values[::-1]


def _apply(kind: np.ndarray, args: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One operator a row: MIN, MAX, MED or SM of its next `args` values."""
    rows = np.full((len(args), args.max()), 10, np.uint8)  # above every digit, so it sorts to the end
    rows[np.arange(args.max()) < args[:, None]] = values
    rows.sort(axis=1)
    low, high, last = (np.take_along_axis(rows, at[:, None], 1)[:, 0] for at in ((args - 1) // 2, args // 2, args - 1))
    total = np.add.reduceat(values, _starts(args), dtype=np.int64) % 10
    return np.choose(kind, (rows[:, 0], last, (low + high) // 2, total.astype(np.uint8)))


def _unfold(levels: list[tuple[np.ndarray, np.ndarray]], sizes: list[np.ndarray]) -> np.ndarray:
    """All nodes' tokens in reading order, computed from the top."""
    tokens = np.empty(sizes[0].sum(), np.uint8)
    at = _starts(sizes[0])
    for (token, args), size, below in zip(levels, sizes, [*sizes[1:], sizes[0][:0]], strict=True):
        operator = args > 0
        tokens[at] = token
        tokens[(at + size - 1)[operator]] = CLOSER
        run, args = _starts(below), args[operator]
        at = run + np.repeat(at[operator] + 1 - run[_starts(args)], args)
    return tokens


def write(folder: str | Path, recipe: Recipe = Recipe()) -> Path:
    """Makes a set once; a folder that holds the same set is left as it is. The published sizes take about 15 s.

    The folder appears when it is complete (see `made.make`): `<split>-tokens.npy`, `-offsets.npy` and `-labels.npy`,
    as `Expressions`. Test and val are the first distinct expressions of the seed's sequence, so they do not depend on
    the size of train.

    Returns:
        The folder, absolute.

    Raises:
        DataError: the folder holds something else, or cannot be written.
        ConfigError: the recipe asks for more distinct expressions than seem to exist.
    """
    return made.make(folder, KIND, VERSION, dataclasses.asdict(recipe), lambda partial: _fill(partial, recipe))


def _fill(folder: Path, recipe: Recipe) -> dict[str, Any]:
    counts = {split: n for split in ("test", "val", "train") if (n := getattr(recipe, split))}
    found = iter(_distinct(recipe, sum(counts.values())).items())
    for split, count in counts.items():
        for name, array in Expressions.join(itertools.islice(found, count))._asdict().items():
            np.save(folder / f"{split}-{name}.npy", array)
    return {}


def _distinct(recipe: Recipe, count: int) -> dict[bytes, int]:
    """The first `count` different expressions of the sequence of blocks, and their values."""
    found, barren = {}, 0
    blocks = itertools.count()
    while len(found) < count:
        if barren == PATIENCE:
            raise ConfigError(
                f"{recipe}: {count} different expressions are wanted, but the last {PATIENCE * DRAWS} draws gave none "
                f"beyond the {len(found)} found. Widen the range of lengths, or ask for fewer."
            )
        before = len(found)
        tokens, offsets, labels = sample(recipe, next(blocks))
        text, ends = tokens.tobytes(), offsets.tolist()
        for start, end, label in zip(ends[:-1], ends[1:], labels.tolist(), strict=True):
            found.setdefault(text[start:end], label)
        barren = 0 if len(found) > before else barren + 1
    return found


class ExpressionSource:
    """Expressions as a source of examples, wherever they come from."""

    num_classes, classes = 10, None
    vocabulary = len(SYMBOLS) + 1  # ids, of which 0 is padding
    _data: Expressions

    def __len__(self) -> int:
        return len(self._data.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`tokens`, int32 (n,) without padding, and `label`, the value 0 to 9."""
        tokens, offsets, labels = self._data
        index = range(len(labels))[index]  # from the end too; past it an IndexError
        return {"tokens": tokens[offsets[index] : offsets[index + 1]].astype(np.int32), "label": int(labels[index])}


class ListOps(ExpressionSource):
    """A split of a set that `write` made, memory-mapped.

    Args:
        recipe: that it must be made by, if it matters.

    Raises:
        DataError: there is no such set, it was made by another recipe, or a file is not what was written.
    """

    def __init__(self, folder: str | Path, split: str, recipe: Recipe | None = None):
        self.folder, self.split = Path(folder).expanduser().resolve(), split
        record = made.read(self.folder, KIND, VERSION, {} if recipe is None else dataclasses.asdict(recipe))
        for path in self._paths():
            if path.name not in record["sha256"]:
                found = ", ".join(sorted({name.partition("-")[0] for name in record["sha256"]}))
                raise DataError(f'{self.folder} has no split "{split}". Found: {found}.')
            made.check_file(path, record)

    def _paths(self) -> list[Path]:
        return [self.folder / f"{self.split}-{name}.npy" for name in Expressions._fields]

    @functools.cached_property
    def _data(self) -> Expressions:
        return Expressions(*(np.load(path, mmap_mode="r") for path in self._paths()))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled map is a copy of its file: worker processes map it themselves.
        return {key: value for key, value in self.__dict__.items() if key != "_data"}

    def name(self, index: int) -> str:
        return f"{self.folder}, {self.split}, expression {index}"
