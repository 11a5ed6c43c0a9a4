"""Sets of vectors with vectors to be found from them: drawn as they are asked for, without an end.

Example `index` of a split is a function of both and of the seed alone, so nothing is drawn twice in a run, whatever
its restarts, processes and workers; and no split shares a draw with another.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from leanformer.errors import ConfigError


Example = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a `data.name` stands for.

    Attributes:
        what: in words.
        draw: one example, from a generator and `Sizes`: `points`, `targets` and what else it is made of.
        refuse: why there are no such examples of these sizes, or None.
        outputs: width of a target, by sizes.
        tokens, targets: how many an example has, by sizes.
        read: the outputs of a model, one a token, that targets are asked of.
    """

    what: str
    draw: Callable[[np.random.Generator, "Sizes"], Example]
    outputs: Callable[["Sizes"], int]
    tokens: Callable[["Sizes"], int]
    targets: Callable[["Sizes"], int]
    read: slice = slice(None)
    refuse: Callable[["Sizes"], str | None] = lambda sizes: None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """N points of width d; of "retrieval" D items; of "nearest_biased" the bias."""

    points: int
    dim: int
    items: int = 1
    bias: float = 0.0


def sphere(rng: np.random.Generator, points: int, dim: int) -> np.ndarray:
    """Points uniform on the unit sphere, N d."""
    x = rng.standard_normal((points, dim))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def orthonormal(rng: np.random.Generator, points: int, dim: int) -> np.ndarray:
    """Orthonormal rows, N d, uniform over all such sets; N at most d."""
    q, r = np.linalg.qr(rng.standard_normal((dim, points)))
    return (q * np.sign(np.diag(r))).T


def _nearest(rng: np.random.Generator, s: Sizes) -> Example:
    """Of each point the set's point of the smallest inner product with it, nearest to its negation (Amsel et al. 2025,
    section 7)."""
    x = sphere(rng, s.points, s.dim)
    return {"points": x, "targets": x[np.argmin(x @ x.T, axis=1)]}


def _query(make: Callable[..., np.ndarray], rng: np.random.Generator, s: Sizes, scale: str) -> Example:
    """A set and a query y: the set's point of the largest inner product with y, the first one's being larger by the
    bias. The last token is −y, so that the query is never its own answer and the target is that of `_nearest`."""
    x = make(rng, s.points, s.dim)
    y = rng.standard_normal(s.dim) if scale == "normal" else sphere(rng, 1, s.dim)[0]
    products = x @ y
    products[0] += s.bias
    return {"points": np.concatenate([x, -y[None]]), "targets": x[[np.argmax(products)]]}


def _regression(rng: np.random.Generator, s: Sizes) -> Example:
    """Pairs of x ~ N(0, I) and y = w·x, w ~ N(0, I), as tokens x₁ y₁ x₂ y₂ ..., y in front of zeros (Garg et al. 2022,
    section 2): at each x its y is asked for, by all pairs before."""
    return interleaved(rng.standard_normal((s.points, s.dim)), rng.standard_normal(s.dim))


def interleaved(x: np.ndarray, w: np.ndarray) -> Example:
    """The tokens, 2N d, and the targets, N 1, of pairs; with x (N d) and w (d) themselves."""
    y = (x @ w)[:, None]
    values = np.pad(y, ((0, 0), (0, x.shape[1] - 1)))
    return {"points": np.stack([x, values], axis=1).reshape(-1, x.shape[1]), "targets": y, "x": x, "w": w}


def directions(s: Sizes) -> np.ndarray:
    """The a of "retrieval", orthonormal, D d: one function of the sizes, which models are to learn."""
    return orthonormal(np.random.Generator(np.random.Philox(key=(s.items, s.dim))), s.items, s.dim)


def _retrieval(rng: np.random.Generator, s: Sizes) -> Example:
    """Points on the sphere; the sum over D directions of the largest inner product of a point with it (Yu et al. 2025,
    arXiv 2510.06662)."""
    x = sphere(rng, s.points, s.dim)
    return {"points": x, "targets": (x @ directions(s).T).max(axis=0).sum()[None, None]}


def _wide_enough(number: str, s: Sizes) -> str | None:
    found = getattr(s, number)
    if found > s.dim:
        return f"data.{number}={found} orthonormal vectors do not fit into data.dim={s.dim}. Take at most as many."
    return None


def _two(s: Sizes) -> str | None:
    return None if s.points > 1 else f"data.points={s.points}: of a single point nothing is nearest. Take 2 at least."


def _kind_of_query(what: str, make: Callable[..., np.ndarray], scale: str = "unit") -> Kind:
    return Kind(
        what,
        draw=lambda rng, s: _query(make, rng, s, scale),
        outputs=lambda s: s.dim,
        tokens=lambda s: s.points + 1,
        targets=lambda s: 1,
        read=slice(-1, None),
        refuse=lambda s: _two(s) or (_wide_enough("points", s) if make is orthonormal else None),
    )


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "nearest": Kind(
            "of each point, the one nearest to its negation",
            draw=_nearest,
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
            "normal",
        ),
        "regression": Kind(
            "linear regression in context",
            draw=_regression,
            outputs=lambda s: 1,
            tokens=lambda s: 2 * s.points,
            targets=lambda s: s.points,
            read=slice(None, None, 2),
        ),
        "retrieval": Kind(
            "the sum of the largest inner products with each of data.items directions",
            draw=_retrieval,
            outputs=lambda s: 1,
            tokens=lambda s: s.points,
            targets=lambda s: 1,
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


class Points:
    """A split without an end, of float64 arrays.

    Args:
        seed: of what is drawn; splits of one seed differ.
    """

    def __init__(self, name: str, sizes: Sizes, split: str, seed: int):
        self.kind, self.sizes, self.split, self.seed = name, sizes, split, seed
        self._stream = zlib.crc32(split.encode()) << 32 | seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.Generator(np.random.Philox(key=(self._stream, index)))
        return find(self.kind).draw(rng, self.sizes)

    def name(self, index: int) -> str:
        return f"{self.kind}, {self.split}, seed {self.seed}, draw {index}"


class Some(Points):
    """The first draws of a split: so many examples, to be scored by."""

    def __init__(self, *args: Any, examples: int):
        super().__init__(*args)
        self.examples = examples

    def __len__(self) -> int:
        return self.examples
