"""ListOps of the Long Range Arena (Tay et al. 2021, section 2.2.1), generated from a seed.

The label of an expression such as `[MAX 4 [SM 7 5 ] 0 ]` is a digit, its value. Its symbols are tokens 1 to 15: the
digits 0 to 9 are 1 to 10, followed by [MIN [MAX [MED [SM and the closing bracket. Id 0 is padding, and examples are not
padded: the batch truncates and pads them. `Published` reads the published files.

The distribution is as published: a node above the last level is an operator with probability 1/4,
else a digit; an operator has 2 to `max_args` arguments and is MIN, MAX, MED (the median, rounded down) or SM (the sum
modulo 10), all uniform; expressions of other lengths are drawn again, and no two are equal. The random bits are
Philox4x64-10 with the key (seed, block), used as integers, so a dataset is the same on every machine and NumPy version.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanformer.data.source import make_dataset, read_record
from leanformer.data.tables import lines, parse_rows, shorten, split
from leanformer.errors import ConfigError


SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # of ids 1, 2, ...
IDS = {symbol.encode(): i for i, symbol in enumerate(SYMBOLS, 1)}
OPENER, CLOSER = SYMBOLS.index("[MIN") + 1, SYMBOLS.index("]") + 1
DRAWS = 4096  # expressions drawn per block, before filtering by length
PATIENCE = 256  # consecutive blocks without a new expression before an error


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Recipe of a ListOps dataset, with the Long Range Arena's defaults."""

    train: int = 96_000  # examples
    val: int = 2_000
    test: int = 2_000
    min_length: int = 500  # of an expression, in tokens, exclusive
    max_length: int = 2_000  # likewise
    depth: int = 10  # levels of an expression, with operators on all but the last
    max_args: int = 10  # of an operator, at least 2
    seed: int = 0


class Expressions(NamedTuple):
    """Expressions of ListOps with their values, concatenated in three arrays to save memory."""

    tokens: np.ndarray  # of all n expressions, one after the other, uint8
    offsets: np.ndarray  # int64 (n + 1,): expression i is tokens[offsets[i] : offsets[i + 1]]
    labels: np.ndarray  # value of each expression, 0 to 9, uint8 (n,)

    @classmethod
    def join(cls, examples: Iterable[tuple[bytes, int]]) -> "Expressions":
        """Pack (tokens as bytes, value) pairs into arrays."""
        texts, labels = zip(*examples, strict=True)
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts), np.uint8), offsets, np.array(labels, np.uint8))


def sample(recipe: Recipe, block: int) -> Expressions:
    """Draw DRAWS expressions from a block of random numbers; return those within the limits of length, some equal."""
    levels = _grow(recipe, block)
    sizes, values = _fold(levels)
    offsets = np.concatenate([[0], np.cumsum(sizes[0])])
    return Expressions(_unfold(levels, sizes), offsets, values[0])


def _grow(recipe: Recipe, block: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw trees; return (token, number of arguments) of all nodes, by level, children in the order of parents."""
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
        # Most expressions are too long. Drop them before they are complete.
        lengths[lengths + np.bincount(tree, minlength=DRAWS) >= recipe.max_length] = np.inf
        tree = tree[lengths[tree] < np.inf]
    keep = (lengths > recipe.min_length) & (lengths < recipe.max_length)
    return [(token[keep[tree]], args[keep[tree]]) for tree, token, args in levels]


def _uniform(bits: np.ndarray, n: int) -> np.ndarray:
    """Map 32 random bits to an integer below n; probabilities differ by a factor below 1 + n / 2^32."""
    return (bits * np.uint64(n) >> np.uint64(32)).astype(np.int64)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _fold(levels: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the number of tokens and the value of every node, by level, computed from the bottom."""
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
    """Return the value of each operator, MIN, MAX, MED or SM, of its next `args` values."""
    rows = np.full((len(args), args.max()), 10, np.uint8)  # above every digit, so it sorts to the end
    rows[np.arange(args.max()) < args[:, None]] = values
    rows.sort(axis=1)
    low, high, last = (np.take_along_axis(rows, at[:, None], 1)[:, 0] for at in ((args - 1) // 2, args // 2, args - 1))
    total = np.add.reduceat(values, _starts(args), dtype=np.int64) % 10
    return np.choose(kind, (rows[:, 0], last, (low + high) // 2, total.astype(np.uint8)))


def _unfold(levels: list[tuple[np.ndarray, np.ndarray]], sizes: list[np.ndarray]) -> np.ndarray:
    """Return the tokens of all nodes in reading order, computed from the top."""
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
    """Build a ListOps dataset if the folder is missing or empty, in about 15 s at the published sizes; return it.

    Test and val are the first distinct expressions of the seed's sequence, so they do not depend on the size of train.
    """
    return make_dataset(folder, dataclasses.asdict(recipe), lambda draft: _fill(draft, recipe))


def _fill(folder: Path, recipe: Recipe) -> None:
    counts = {name: n for name in ("test", "val", "train") if (n := getattr(recipe, name))}
    expressions = iter(_distinct(recipe, sum(counts.values())).items())
    for name, count in counts.items():
        for field, array in Expressions.join(itertools.islice(expressions, count))._asdict().items():
            np.save(folder / f"{name}-{field}.npy", array)


def _distinct(recipe: Recipe, count: int) -> dict[bytes, int]:
    """Return the first `count` distinct expressions of the sequence of blocks, with their values."""
    values, barren = {}, 0
    blocks = itertools.count()
    while len(values) < count:
        if barren == PATIENCE:
            raise ConfigError(
                f"{recipe}: {count} distinct expressions are needed, but the last {PATIENCE * DRAWS} draws gave none "
                f"beyond the {len(values)} found. Widen the range of lengths, or use fewer."
            )
        before = len(values)
        tokens, offsets, labels = sample(recipe, next(blocks))
        text, ends = tokens.tobytes(), offsets.tolist()
        for start, end, label in zip(ends[:-1], ends[1:], labels.tolist(), strict=True):
            values.setdefault(text[start:end], label)
        barren = 0 if len(values) > before else barren + 1
    return values


class ExpressionSource:
    """Base class of sources of ListOps expressions, whose label is their value; subclasses set `_data`."""

    num_classes, classes = 10, None
    vocabulary = len(SYMBOLS) + 1  # ids, of which 0 is padding
    _data: Expressions

    def __len__(self) -> int:
        return len(self._data.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, offsets, labels = self._data
        index = range(len(labels))[index]  # supports negative indices, and raises IndexError
        return {"tokens": tokens[offsets[index] : offsets[index + 1]].astype(np.int32), "label": int(labels[index])}


class ListOps(ExpressionSource):
    """Memory-mapped split of a ListOps dataset that `write` built, by any recipe if None."""

    def __init__(self, folder: str | Path, split: str, recipe: Recipe | None = None):
        self.folder, self.split = Path(folder).expanduser().resolve(), split
        read_record(self.folder, {} if recipe is None else dataclasses.asdict(recipe))

    @functools.cached_property
    def _data(self) -> Expressions:
        paths = [self.folder / f"{self.split}-{name}.npy" for name in Expressions._fields]
        return Expressions(*(np.load(path, mmap_mode="r") for path in paths))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled map is a copy of its file: worker processes map it themselves.
        return {key: value for key, value in self.__dict__.items() if key != "_data"}

    def name(self, index: int) -> str:
        return f"{self.folder}, {self.split}, expression {index}"


def is_published(folder: Path) -> bool:
    return any(folder.glob("basic_*.tsv"))


class Published(ExpressionSource):
    """Published split of ListOps, `basic_<split>.tsv`, in memory (train takes about 20 s to read).

    After the header Source, Target, a line is an expression in redundant parentheses, which are dropped, a tab, and its
    value, as in `( ( ( [MAX 4 ) 3 ) ] )\\t4`.
    """

    def __init__(self, folder: str | Path, split: str):
        self.path = Path(folder).expanduser() / f"basic_{split}.tsv"
        rows = lines(self.path)
        next(rows, None)  # header
        self._data = Expressions.join([parsed for _, parsed in parse_rows(self.path, rows, _parse)])

    def name(self, index: int) -> str:
        return f"{self.path}, line {index + 2}"


def _parse(line: bytes) -> tuple[bytes, int]:
    source, target = split(line, 2)
    if len(target) != 1 or target not in b"0123456789":
        raise ValueError(f"has the label {shorten(target)} instead of a digit 0 to 9")
    return encode(source).tobytes(), int(target)


def encode(source: bytes) -> np.ndarray:
    """Return the tokens, uint8 (n,), of an expression such as b"[MAX 4 [SM 7 5 ] 0 ]"; round brackets are ignored."""
    try:
        return np.array([IDS[word] for word in source.translate(None, b"()").split()], np.uint8)
    except KeyError as error:
        raise ValueError(f"holds {shorten(error.args[0])}, not a symbol of ListOps") from error
