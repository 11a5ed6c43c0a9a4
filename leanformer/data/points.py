"""Sets of vectors with vectors to be found from them: drawn as they are asked for, without an end.

Example `index` of a split is a function of both and of the seed alone, so nothing is drawn twice in a run, whatever
its restarts, processes and workers; and no split shares a draw with another.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from leanformer.errors import ConfigError


Examples = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a `data.name` stands for.

    Attributes:
        what: in words.
        draw: examples, B of them, from normal numbers (B, `normals`, d) and `Sizes`: `points`, `targets` and what else
            they are made of.
        normals: vectors of normal numbers that an example is made of, by sizes.
        refuse: why there are no such examples of these sizes, or None.
        outputs: width of a target, by sizes.
        tokens, targets: how many an example has, by sizes.
        read: the outputs of a model, one a token, that targets are asked of.
        ordered: whether the place of a target says something.
        fewer: of examples, by sizes, the smaller ones of a curriculum, of so many coordinates and points, in arrays of
            the same shapes; with `scored` (S) where not all targets count. None where there is no curriculum.
        grown: the sizes that a curriculum starts small.
    """

    what: str
    draw: Callable[[np.ndarray, "Sizes"], Examples]
    normals: Callable[["Sizes"], int]
    outputs: Callable[["Sizes"], int]
    tokens: Callable[["Sizes"], int]
    targets: Callable[["Sizes"], int]
    read: slice = slice(None)
    ordered: bool = False
    fewer: Callable[[Examples, "Sizes", int, int], Examples] | None = None
    grown: tuple[str, ...] = ()
    refuse: Callable[["Sizes"], str | None] = lambda sizes: None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """N points of width d; of "retrieval" D items; of "nearest_biased" the bias."""

    points: int
    dim: int
    items: int = 1
    bias: float = 0.0


def sphere(normals: np.ndarray) -> np.ndarray:
    """Points uniform on the unit sphere, B N d, from as many normal numbers."""
    return normals / np.linalg.norm(normals, axis=-1, keepdims=True)


def orthonormal(normals: np.ndarray) -> np.ndarray:
    """Orthonormal rows, B N d with N at most d, uniform over all such sets, from as many normal numbers."""
    q, r = np.linalg.qr(normals.swapaxes(-2, -1))
    return (q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]).swapaxes(-2, -1)


def _nearest(normals: np.ndarray, s: Sizes) -> Examples:
    """Of each point the set's point of the smallest inner product with it, nearest to its negation (Amsel et al. 2025,
    section 7)."""
    x = sphere(normals)
    return {"points": x, "targets": _taken(x, np.argmin(x @ x.swapaxes(1, 2), axis=2))}


def _taken(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Points B S d, by their places B S."""
    return np.take_along_axis(x, chosen[..., None], axis=1)


def _query(
    set_of: Callable[[np.ndarray], np.ndarray],
    query_of: Callable[[np.ndarray], np.ndarray],
    normals: np.ndarray,
    s: Sizes,
) -> Examples:
    """A set and a query y: the set's point of the largest inner product with y, the first one's being larger by the
    bias. The last token is −y, so that the query is never its own answer and the target is that of `_nearest`."""
    x, y = set_of(normals[:, :-1]), query_of(normals[:, -1:])
    products = (y @ x.swapaxes(1, 2)) + s.bias * (np.arange(s.points) == 0)
    return {"points": np.concatenate([x, -y], axis=1), "targets": _taken(x, np.argmax(products, axis=2))}


def _as_it_is(normals: np.ndarray) -> np.ndarray:
    return normals


def _regression(normals: np.ndarray, s: Sizes) -> Examples:
    """Pairs of x ~ N(0, I) and y = w·x, w ~ N(0, I), as tokens x₁ y₁ x₂ y₂ ..., y in front of zeros (Garg et al. 2022,
    section 2): at each x its y is asked for, by all pairs before."""
    return _interleaved(normals[:, 1:], normals[:, 0])


def _interleaved(x: np.ndarray, w: np.ndarray) -> Examples:
    """The tokens, B 2N d, and the targets, B N 1, of pairs; with x (B N d) and w (B d) themselves."""
    y = x @ w[..., None]
    values = np.pad(y, ((0, 0), (0, 0), (0, x.shape[2] - 1)))
    tokens = np.stack([x, values], axis=2).reshape(len(x), -1, x.shape[2])
    return {"points": tokens, "targets": y, "x": x, "w": w}


def _fewer_pairs(examples: Examples, s: Sizes, dim: int, pairs: int) -> Examples:
    """x of which the first `dim` coordinates are not zero; the first pairs are asked for (Garg et al. 2022, appendix
    A)."""
    x = np.where(np.arange(s.dim) < dim, examples["x"], 0)
    return _interleaved(x, examples["w"]) | {"scored": np.arange(s.points) < pairs}


def directions(s: Sizes) -> np.ndarray:
    """The a of "retrieval", orthonormal, D d: one function of the sizes, which models are to learn."""
    rng = np.random.Generator(np.random.Philox(key=(s.items, s.dim)))
    return orthonormal(rng.standard_normal((s.items, s.dim)))


def _retrieval(normals: np.ndarray, s: Sizes) -> Examples:
    """Points on the sphere; the sum over D directions of the largest inner product of a point with it (Yu et al. 2025,
    arXiv 2510.06662)."""
    return _retrieved(sphere(normals), s)


def _retrieved(x: np.ndarray, s: Sizes) -> Examples:
    return {"points": x, "targets": (x @ directions(s).T).max(axis=1).sum(axis=1)[:, None, None]}


def _fewer_points(examples: Examples, s: Sizes, dim: int, points: int) -> Examples:
    """The first points, repeated in turn to fill the set: to softmax a set of just those, all of one weight where
    their number divides the whole's."""
    return _retrieved(examples["points"][:, np.arange(s.points) % points], s)


def _wide_enough(number: str, s: Sizes) -> str | None:
    found = getattr(s, number)
    if found > s.dim:
        return f"data.{number}={found} orthonormal vectors do not fit into data.dim={s.dim}. Take at most as many."
    return None


def _two(s: Sizes) -> str | None:
    return None if s.points > 1 else f"data.points={s.points}: of a single point nothing is nearest. Take 2 at least."


def _kind_of_query(
    what: str,
    set_of: Callable[[np.ndarray], np.ndarray],
    query_of: Callable[[np.ndarray], np.ndarray] = sphere,
) -> Kind:
    return Kind(
        what,
        draw=functools.partial(_query, set_of, query_of),
        normals=lambda s: s.points + 1,
        outputs=lambda s: s.dim,
        tokens=lambda s: s.points + 1,
        targets=lambda s: 1,
        read=slice(-1, None),
        refuse=lambda s: _two(s) or (_wide_enough("points", s) if set_of is orthonormal else None),
    )


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "nearest": Kind(
            "of each point, the one nearest to its negation",
            draw=_nearest,
            normals=lambda s: s.points,
            outputs=lambda s: s.dim,
            tokens=lambda s: s.points,
            targets=lambda s: s.points,
            refuse=_two,
        ),
        "nearest_query": _kind_of_query("of a query, the nearest point", sphere),
        "nearest_orthonormal": _kind_of_query("of a query, the nearest of orthonormal points", orthonormal),
        "nearest_biased": _kind_of_query(
            "as nearest_orthonormal, of a Gaussian query, the first point data.bias nearer",
            orthonormal,
            _as_it_is,
        ),
        "regression": Kind(
            "linear regression in context",
            draw=_regression,
            normals=lambda s: s.points + 1,
            outputs=lambda s: 1,
            tokens=lambda s: 2 * s.points,
            targets=lambda s: s.points,
            read=slice(None, None, 2),
            ordered=True,
            fewer=_fewer_pairs,
            grown=("dim", "points"),
        ),
        "retrieval": Kind(
            "the sum of the largest inner products with each of data.items directions",
            draw=_retrieval,
            normals=lambda s: s.points,
            outputs=lambda s: 1,
            tokens=lambda s: s.points,
            targets=lambda s: 1,
            fewer=_fewer_points,
            grown=("points",),
            refuse=lambda s: _wide_enough("items", s),
        ),
    }
)


def find(name: str) -> Kind:
    """The kind of a `data.name`. Raises ConfigError for one of none."""
    if name not in KINDS:
        known = "".join(f"\n  {word}: {kind.what}" for word, kind in KINDS.items())
        raise ConfigError(f'data.name="{name}" is not known: choose one of{known}')
    return KINDS[name]


def _normals(key: int, first: int, number: int, each: int) -> np.ndarray:
    """Standard normal numbers of examples, (number, each): of example i those in the i-th run of the words that belong
    to the key (Box & Muller 1958)."""
    blocks = -(-each // 4)  # of four words, in which the generator counts
    bits = np.random.Philox(key=key).advance(first * blocks)
    words = bits.random_raw(number * blocks * 4).reshape(number, 2, -1) >> np.uint64(11)
    uniform = (words + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = np.sqrt(-2 * np.log(uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :each]


class Points:
    """A split without an end, of float64 arrays.

    Args:
        seed: of what is drawn; splits of one seed differ.
    """

    def __init__(self, name: str, sizes: Sizes, split: str, seed: int):
        self.kind, self.sizes, self.split, self.seed = name, sizes, split, seed
        self._stream = zlib.crc32(split.encode()) << 32 | seed

    def __getitem__(self, index: int) -> Examples:
        return {name: array[0] for name, array in self.several(index, 1).items()}

    def several(self, first: int, number: int) -> Examples:
        """Examples from `first` on, all at once: leading axis B."""
        rows = find(self.kind).normals(self.sizes)
        normals = _normals(self._stream, first, number, rows * self.sizes.dim)
        return find(self.kind).draw(normals.reshape(number, rows, self.sizes.dim), self.sizes)

    def name(self, index: int) -> str:
        return f"{self.kind}, {self.split}, seed {self.seed}, draw {index}"


class Some(Points):
    """The first draws of a split: so many examples, to be scored by."""

    def __init__(self, *args: Any, examples: int):
        super().__init__(*args)
        self.examples = examples

    def __len__(self) -> int:
        return self.examples
