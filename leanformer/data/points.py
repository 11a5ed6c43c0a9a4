"""Endless synthetic tasks on sets of points, whose targets are functions of the points.

An example depends only on its index, its split and the seed. So no example occurs twice in a run, regardless of
restarts, processes and workers, and no two splits share examples.
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
class Sizes:
    """Sizes of an example of a point-set task."""

    points: int  # number of points of a set; of "regression", number of pairs x, y
    dim: int  # dimension d of a point
    num_items: int = 1  # number of directions of "retrieval"
    bias: float = 0.0  # added to the first point's inner product with the query, in tasks with a query


@dataclasses.dataclass(frozen=True)
class PointTask:
    """Definition of a task on point sets, for one `data.name`."""

    what: str  # description for messages
    # from standard normal numbers (B, `normals`, d) and the sizes to B examples: `points` (B T d), `targets` (B S V),
    # and arrays that these were computed from
    draw: Callable[[np.ndarray, Sizes], Examples]
    normals: Callable[[Sizes], int]  # number of normal vectors per example
    outputs: Callable[[Sizes], int]  # dimension V of a target
    tokens: Callable[[Sizes], int]  # number of tokens T of an example
    targets: Callable[[Sizes], int]  # number of targets S of an example
    read: slice = slice(None)  # of the model's outputs, one per token: what is compared with the targets
    ordered: bool = False  # True if the error depends on the position of a target, and is reported by position
    # from (examples, sizes, number of coordinates, number of points) to the smaller examples of a curriculum, in arrays
    # of the same shapes, with `scored` (S) if not all targets count
    shrink: Callable[[Examples, Sizes, int, int], Examples] | None = None
    curriculum_axes: tuple[str, ...] = ()  # sizes that a curriculum starts small, "dim" and "points"
    validate: Callable[[Sizes], str | None] = lambda sizes: None  # reason why there are no such examples


def sphere(normals: np.ndarray) -> np.ndarray:
    """Return points (B P d) that are uniform on the unit sphere, from standard normal numbers."""
    return normals / np.linalg.norm(normals, axis=-1, keepdims=True)


def orthonormal(normals: np.ndarray) -> np.ndarray:
    """Return uniform random sets of P orthonormal points (B P d), P at most d, from standard normal numbers."""
    q, r = np.linalg.qr(normals.swapaxes(-2, -1))
    return (q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]).swapaxes(-2, -1)


def _nearest(normals: np.ndarray, s: Sizes) -> Examples:
    """Draw sets in which a point's target has the smallest inner product with it (Amsel et al. 2025, section 7)."""
    x = sphere(normals)
    return {"points": x, "targets": _gather_points(x, np.argmin(x @ x.swapaxes(1, 2), axis=2))}


def _gather_points(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the points (B S d) of indices (B S)."""
    return np.take_along_axis(x, chosen[..., None], axis=1)


def _query(
    set_of: Callable[[np.ndarray], np.ndarray],
    query_of: Callable[[np.ndarray], np.ndarray],
    normals: np.ndarray,
    s: Sizes,
) -> Examples:
    """Draw sets with a query y. The target is the point with the largest inner product with y.

    The last token is −y, so that the query is never its own target, and the target is the one of `_nearest`.
    """
    x, y = set_of(normals[:, :-1]), query_of(normals[:, -1:])
    products = (y @ x.swapaxes(1, 2)) + s.bias * (np.arange(s.points) == 0)
    return {"points": np.concatenate([x, -y], axis=1), "targets": _gather_points(x, np.argmax(products, axis=2))}


def _regression(normals: np.ndarray, s: Sizes) -> Examples:
    """Draw in-context linear regression (Garg et al. 2022, section 2): tokens x₁ y₁ x₂ y₂ ..., x, w ~ N(0, I), y = w·x.

    Tokens of y are padded with zeros. The target at each x is its y, to be predicted from all pairs before.
    """
    return _interleave(normals[:, 1:], normals[:, 0])


def _interleave(x: np.ndarray, w: np.ndarray) -> Examples:
    """Return the tokens (B 2N d) and targets (B N 1) of pairs, from x (B N d) and w (B d)."""
    y = x @ w[..., None]
    values = np.pad(y, ((0, 0), (0, 0), (0, x.shape[2] - 1)))
    tokens = np.stack([x, values], axis=2).reshape(len(x), -1, x.shape[2])
    return {"points": tokens, "targets": y, "x": x, "w": w}


def _fewer_pairs(examples: Examples, s: Sizes, dim: int, pairs: int) -> Examples:
    """Zero all but the first `dim` coordinates of x, and score only the first pairs (Garg et al. 2022, appendix A)."""
    x = np.where(np.arange(s.dim) < dim, examples["x"], 0)
    return _interleave(x, examples["w"]) | {"scored": np.arange(s.points) < pairs}


def directions(s: Sizes) -> np.ndarray:
    """Return the orthonormal directions (num_items, d) of "retrieval", fixed for given sizes, so that models learn."""
    rng = np.random.Generator(np.random.Philox(key=(s.num_items, s.dim)))
    return orthonormal(rng.standard_normal((s.num_items, s.dim)))


def _with_retrieval_targets(x: np.ndarray, s: Sizes) -> Examples:
    """Return points with their target, the sum of the largest inner product with each direction (Yu et al. 2025)."""
    return {"points": x, "targets": (x @ directions(s).T).max(axis=1).sum(axis=1)[:, None, None]}


def _fewer_points(examples: Examples, s: Sizes, dim: int, points: int) -> Examples:
    """Repeat the first points in turn to fill the set.

    To softmax attention this is a set of just those points, with equal weights if their number divides the total.
    """
    return _with_retrieval_targets(examples["points"][:, np.arange(s.points) % points], s)


def _check_dim(number: str, s: Sizes) -> str | None:
    """Return a message if there are more orthonormal vectors than dimensions."""
    value, problem = getattr(s, number), "orthonormal vectors do not exist in data.dim"
    return f"data.{number}={value} {problem}={s.dim}. Use at most {s.dim}." if value > s.dim else None


def _query_task(
    what: str, set_of: Callable[[np.ndarray], np.ndarray], query_of: Callable[[np.ndarray], np.ndarray] = sphere
) -> PointTask:
    """Return the definition of a task with one query per set."""
    return PointTask(
        what,
        draw=functools.partial(_query, set_of, query_of),
        normals=lambda s: s.points + 1,
        outputs=lambda s: s.dim,
        tokens=lambda s: s.points + 1,
        targets=lambda s: 1,
        read=slice(-1, None),
        validate=lambda s: _check_dim("points", s) if set_of is orthonormal else None,
    )


KINDS: Mapping[str, PointTask] = MappingProxyType(
    {
        "nearest": PointTask(
            "for each point, the point nearest to its negation",
            draw=_nearest,
            normals=lambda s: s.points,
            outputs=lambda s: s.dim,
            tokens=lambda s: s.points,
            targets=lambda s: s.points,
        ),
        "nearest_query": _query_task("for a query, the nearest point", sphere),
        "nearest_orthonormal": _query_task("for a query, the nearest of orthonormal points", orthonormal),
        "nearest_biased": _query_task(
            "nearest_orthonormal with a Gaussian query, and the first point nearer by data.bias",
            orthonormal,
            lambda normals: normals,
        ),
        "regression": PointTask(
            "in-context linear regression",
            draw=_regression,
            normals=lambda s: s.points + 1,
            outputs=lambda s: 1,
            tokens=lambda s: 2 * s.points,
            targets=lambda s: s.points,
            read=slice(None, None, 2),
            ordered=True,
            shrink=_fewer_pairs,
            curriculum_axes=("dim", "points"),
        ),
        "retrieval": PointTask(
            "the sum of the largest inner products with each of data.num_items directions",
            draw=lambda normals, s: _with_retrieval_targets(sphere(normals), s),
            normals=lambda s: s.points,
            outputs=lambda s: 1,
            tokens=lambda s: s.points,
            targets=lambda s: 1,
            shrink=_fewer_points,
            curriculum_axes=("points",),
            validate=lambda s: _check_dim("num_items", s),
        ),
    }
)


def find(name: str) -> PointTask:
    if name not in KINDS:
        choices = "".join(f"\n  {word}: {kind.what}" for word, kind in KINDS.items())
        raise ConfigError(f'data.name="{name}": unknown name. Choose one of:{choices}')
    return KINDS[name]


def _normals(key: int, first: int, number: int, count: int) -> np.ndarray:
    """Return `count` standard normal numbers per example (Box & Muller 1958); example i has the i-th block of words."""
    blocks = -(-count // 4)  # the generator advances in blocks of four words
    bits = np.random.Philox(key=key).advance(first * blocks)
    words = bits.random_raw(number * blocks * 4).reshape(number, 2, -1) >> np.uint64(11)
    uniform = (words + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = np.sqrt(-2 * np.log(uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :count]


class Points:
    """Endless split of a point-set task, with random access to examples.

    An example has the float64 arrays of `PointTask.draw` without axis B. Splits of different names have different
    examples, also with the same seed, which is from 0 and below 2^32.
    """

    def __init__(self, name: str, sizes: Sizes, split: str, seed: int):
        self.kind, self.sizes, self.split, self.seed = name, sizes, split, seed
        self._stream = zlib.crc32(split.encode()) << 32 | seed

    def __getitem__(self, index: int) -> Examples:
        return {name: array[0] for name, array in self.get_batch(index, 1).items()}

    def get_batch(self, first: int, number: int) -> Examples:
        """Return `number` examples from index `first` on, as a dict of float64 arrays with a leading axis B."""
        rows = find(self.kind).normals(self.sizes)
        normals = _normals(self._stream, first, number, rows * self.sizes.dim)
        return find(self.kind).draw(normals.reshape(number, rows, self.sizes.dim), self.sizes)

    def name(self, index: int) -> str:
        return f"{self.kind}, {self.split}, seed {self.seed}, draw {index}"


class FixedSplit(Points):
    """Split of fixed length for evaluation: the first examples of an endless split."""

    def __init__(self, *args: Any, examples: int):
        super().__init__(*args)
        self.examples = examples

    def __len__(self) -> int:
        return self.examples
