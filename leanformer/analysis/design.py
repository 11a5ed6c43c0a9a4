"""Sizes of the trained architectures: the range of each, and the effects that the runs do not determine."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from leanformer.config.architectures import listed_per_layer
from leanformer.errors import ConfigError


AXES = ("depth", "width", "num_heads", "head_dim", "mlp_dim")


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Sizes of an architecture; heads, head dimension and MLP have one number per layer."""

    width: int
    heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    mlp: tuple[int, ...]
    params: int  # with embeddings and head
    flops: int | None = None  # forward FLOPs per example, if known

    @property
    def depth(self) -> int:
        return len(self.heads)


def model_dimensions(model: Mapping[str, Any], params: int, flops: int | None = None) -> Dimensions:
    """Return the sizes of a config's section `model`. Raises ConfigError if the model has stages."""
    several = listed_per_layer(model)
    uneven = [axis for axis in AXES if axis not in several and type(model.get(axis)) is not int]
    if uneven or (type(model.get("value_dim") or 1) is not int and "value_dim" not in several):
        values = ", ".join(f"{axis}={model.get(axis)}" for axis in uneven or ["value_dim"])
        raise ConfigError(f"{model.get('name')} has {values}. Set one number, or one per layer where layers differ.")
    heads, head_dim, mlp = (several.get(axis) or (model[axis],) * model["depth"] for axis in AXES[2:])
    return Dimensions(model["width"], heads, head_dim, mlp, params, flops)


class Term(NamedTuple):
    """Term of the regression: a power of a size's logarithm to base 2 (doublings)."""

    axis: str  # key of `doublings`
    power: int  # 1 or 2
    prior: float  # standard deviation of the coefficient, in transformed error (`surface.Scale`) per doubling


# In published tables of trained models (study/shapes/planner.py) the effects are 0.02 to 0.3 per doubling of
# parameters, and up to 0.1 per doubling of another size.
TERMS = (
    Term("parameters", 1, 0.3),
    Term("parameters", 2, 0.05),
    Term("depth", 1, 0.2),
    Term("depth", 2, 0.05),
    Term("heads", 1, 0.2),
    Term("head dimension", 1, 0.2),
    Term("MLP / width", 1, 0.2),
)
SIZES = ("depth", "width", "heads", "head dimension", "MLP", "parameters")  # sizes whose ranges limit extrapolation
BEYOND = 0.2  # prior standard deviation of a change of slope outside the range of a size, per doubling
EXACT = 1e-6  # doublings; smaller differences between sizes are rounding of logarithms
NEAR = math.log2(1.1)  # parameters follow from the other sizes, so up to 10 % outside their range is accepted
CONDITION = 30.0  # condition index above which terms are collinear (Belsley, Kuh and Welsch, 1980)
SHARED = 0.5  # fraction of a coefficient's variance in collinear directions above which its term is listed (ibid.)
FLOOR = 1e-4  # fraction of the largest singular value; smaller values are rounding noise of integer sizes


def doublings(d: Dimensions) -> dict[str, float]:
    """Return log2 of each size by name, averaged over layers. An MLP of size 0 counts as 1."""
    sizes = {"parameters": d.params, "depth": d.depth, "width": d.width, "heads": d.heads, "head dimension": d.head_dim}
    result = {axis: float(np.mean(np.log2(size))) for axis, size in sizes.items()}
    result["MLP"] = float(np.mean(np.log2(np.maximum(d.mlp, 1))))
    return result | {"MLP / width": result["MLP"] - result["width"]}


def terms(sizes: Mapping[str, float], centre: Mapping[str, float]) -> list[float]:
    """Return the values of TERMS for one architecture's `doublings`, from the mean of the trained ones."""
    return [(sizes[term.axis] - centre[term.axis]) ** term.power for term in TERMS]


@dataclasses.dataclass(frozen=True)
class Design:
    """Sizes of n trained architectures in doublings (logarithms to base 2), and the design matrix of the regression."""

    centre: dict[str, float]  # mean, minimum and maximum over the architectures, by key of `doublings`
    low: dict[str, float]
    high: dict[str, float]
    sizes: dict[str, Float[np.ndarray, " n"]]
    rows: Float[np.ndarray, "n p"]  # values of the p TERMS

    @classmethod
    def from_shapes(cls, shapes: Sequence[Dimensions]) -> "Design":
        sizes = [doublings(shape) for shape in shapes]
        columns = {axis: np.array([size[axis] for size in sizes]) for axis in sizes[0]}
        centre = {axis: math.fsum(column) / len(column) for axis, column in columns.items()}
        rows = np.array([terms(size, centre) for size in sizes])
        low, high = ({axis: float(end(column)) for axis, column in columns.items()} for end in (np.min, np.max))
        return cls(centre, low, high, columns, rows)

    def beyond(self, shape: Dimensions) -> dict[str, float]:
        """Return the signed doublings by which each of SIZES lies outside the trained range; 0 inside."""
        sizes = doublings(shape)
        return {
            axis: min(0.0, sizes[axis] - self.low[axis]) + max(0.0, sizes[axis] - self.high[axis]) for axis in SIZES
        }

    def outside(self, shape: Dimensions) -> list[str]:
        """Return the names of the sizes outside the trained range; parameters may lie up to 10 % outside."""
        allowed = dict.fromkeys(SIZES, EXACT) | {"parameters": NEAR}
        return [axis for axis, excess in self.beyond(shape).items() if abs(excess) > allowed[axis]]

    def ranges(self) -> str:
        """Return the trained range of each size as text, such as "depth 2 to 12, width 384, ..."."""
        ends = {axis: (2 ** self.low[axis], 2 ** self.high[axis]) for axis in SIZES}
        return ", ".join(
            f"{axis} {low:,.0f} to {high:,.0f}" if self.values(axis) > 1 else f"{axis} {low:,.0f}"
            for axis, (low, high) in ends.items()
        )

    def values(self, axis: str) -> int:
        return 1 + int((np.diff(np.sort(self.sizes[axis])) > EXACT).sum())

    def collinear(self) -> list[list[str]]:
        """Return the names of sizes whose effects the runs cannot separate, by group.

        A product of powers of a group's sizes is nearly constant: the singular value of this direction of the centred,
        scaled columns is below 1/30 of the largest. A size belongs to a group if most of its coefficient's variance
        lies in such directions.
        """
        used = [i for i, term in enumerate(TERMS) if term.power == 1 and self.values(term.axis) > 1]
        if len(used) < 2:
            return []
        columns = self.rows[:, used] - self.rows[:, used].mean(axis=0)
        _, singular, vectors = np.linalg.svd(columns / np.linalg.norm(columns, axis=0), full_matrices=False)
        weak = singular < singular[0] / CONDITION
        variance = (vectors / np.maximum(singular, FLOOR * singular[0])[:, None]) ** 2
        named = variance[weak].sum(axis=0) > SHARED * variance.sum(axis=0)
        projector = vectors[weak].T @ vectors[weak]  # independent of the basis of the collinear directions
        groups: list[list[str]] = []
        left = [k for k in range(len(used)) if named[k]]
        while left:
            link = projector[left[0]]
            members = [k for k in left if abs(link[k]) > FLOOR]
            left = [k for k in left if k not in members]
            groups.append([TERMS[used[k]].axis for k in members])
        return groups

    def undetermined(self) -> list[str]:
        """Return a sentence for each effect that the runs leave to its prior."""
        sentences = []
        for term in TERMS:
            if term.power == 1 and self.values(term.axis) == 1:
                sentences.append(f"{term.axis} did not vary: its effect is unknown.")
            elif term.power == 2 and self.values(term.axis) == 2:
                sentences.append(f"{term.axis} had two values: an optimum between them cannot be detected.")
        apart = "vary together: their effects cannot be separated."
        return [*sentences, *(f"{' and '.join(group)} {apart}" for group in self.collinear())]
