"""Experimental design of the trained architectures: range of each size, and effects that the runs do not determine."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from leanformer.analysis.dimensions import Dimensions


class Term(NamedTuple):
    """Term of the regression: a power of a size's logarithm to base 2 (doublings).

    Attributes:
        axis: name of the size, a key of `doublings`.
        power: exponent, 1 or 2.
        prior: standard deviation of the coefficient's normal prior of mean 0, in units of the transformed error (logit
            or logarithm, `surface.Scale`) per doubling, or per squared doubling.
    """

    axis: str
    power: int
    prior: float


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
    """Return log2 of each size of an architecture by name; the mean of the logarithms if layers differ.

    The names are "parameters", "depth", "width", "heads", "head dimension", "MLP", and "MLP / width" for the ratio of
    the two. An MLP of size 0 counts as 1.
    """
    sizes = {"parameters": d.params, "depth": d.depth, "width": d.width, "heads": d.heads, "head dimension": d.head_dim}
    result = {axis: float(np.mean(np.log2(size))) for axis, size in sizes.items()}
    result["MLP"] = float(np.mean(np.log2(np.maximum(d.mlp, 1))))
    return result | {"MLP / width": result["MLP"] - result["width"]}


def terms(sizes: Mapping[str, float], centre: Mapping[str, float]) -> list[float]:
    """Return the values of TERMS for one architecture: its row of the design matrix, without the intercept.

    Args:
        sizes: sizes of the architecture, from `doublings`.
        centre: mean of each size over the trained architectures, which is subtracted.
    """
    return [(sizes[term.axis] - centre[term.axis]) ** term.power for term in TERMS]


@dataclasses.dataclass(frozen=True)
class Design:
    """Sizes of n trained architectures in doublings (logarithms to base 2), and the design matrix of the regression.

    Attributes:
        centre, low, high: mean, minimum and maximum of each size over the architectures, by key of `doublings`.
        sizes: doublings of every architecture, shape (n,), by key of `doublings`.
        rows: value of each of the p terms in TERMS for each architecture.
    """

    centre: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    sizes: dict[str, Float[np.ndarray, " n"]]
    rows: Float[np.ndarray, "n p"]

    @classmethod
    def from_shapes(cls, shapes: Sequence[Dimensions]) -> "Design":
        """Return the design of the trained architectures, of which there is at least one.

        An architecture whose layers differ counts with the mean of log2 over its layers.
        """
        sizes = [doublings(shape) for shape in shapes]
        columns = {axis: np.array([size[axis] for size in sizes]) for axis in sizes[0]}
        centre = {axis: math.fsum(column) / len(column) for axis, column in columns.items()}
        rows = np.array([terms(size, centre) for size in sizes])
        low, high = ({axis: float(end(column)) for axis, column in columns.items()} for end in (np.min, np.max))
        return cls(centre, low, high, columns, rows)

    def beyond(self, shape: Dimensions) -> dict[str, float]:
        """Return the doublings by which each size in SIZES of an architecture lies outside the trained range, by name.

        They are negative below the range, positive above it, and 0 inside.
        """
        sizes = doublings(shape)
        return {
            axis: min(0.0, sizes[axis] - self.low[axis]) + max(0.0, sizes[axis] - self.high[axis]) for axis in SIZES
        }

    def outside(self, shape: Dimensions) -> list[str]:
        """Return the names of the sizes of an architecture that lie outside the trained range; [] if none does.

        Parameters may lie up to 10 % outside, since they follow from the other sizes.
        """
        allowed = dict.fromkeys(SIZES, EXACT) | {"parameters": NEAR}
        return [axis for axis, excess in self.beyond(shape).items() if abs(excess) > allowed[axis]]

    def ranges(self) -> str:
        """Return the trained range of each size in SIZES as text, such as "depth 2 to 12, width 384, ..."."""
        ends = {axis: (2 ** self.low[axis], 2 ** self.high[axis]) for axis in SIZES}
        return ", ".join(
            f"{axis} {low:,.0f} to {high:,.0f}" if self.values(axis) > 1 else f"{axis} {low:,.0f}"
            for axis, (low, high) in ends.items()
        )

    def values(self, axis: str) -> int:
        """Return the number of different values of a size, a key of `sizes`, among the trained architectures."""
        return 1 + int((np.diff(np.sort(self.sizes[axis])) > EXACT).sum())

    def collinear(self) -> list[tuple[list[str], list[str]]]:
        """Return groups of sizes whose effects the runs cannot separate, each as two lists of names; [] for none.

        Over the trained architectures, a product of powers of the sizes in the first list is nearly proportional to a
        product of powers of those in the second. If the second list is empty, the product of the first is nearly
        constant.

        Only sizes with several values count. The columns of their logarithms are centred and scaled to length 1.
        Directions with a singular value below 1/30 of the largest are collinear. A size belongs to a group if most of
        its coefficient's variance lies in collinear directions.
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
        groups: list[tuple[list[str], list[str]]] = []
        left = [k for k in range(len(used)) if named[k]]
        while left:
            link = projector[left[0]]
            members = [k for k in left if abs(link[k]) > FLOOR]
            left = [k for k in left if k not in members]
            one, other = ([TERMS[used[k]].axis for k in members if sign * link[k] > 0] for sign in (1, -1))
            groups.append((one, other))
        return groups

    def undetermined(self) -> list[str]:
        """Return a sentence for each effect that the runs do not determine; [] if there is none.

        These are the effect of a size that did not vary, the squared term of a size with only two values, and the
        separate effects of `collinear` sizes. In the regression they are determined by their priors.
        """
        sentences = []
        for term in TERMS:
            if term.power == 1 and self.values(term.axis) == 1:
                sentences.append(f"{term.axis} did not vary: its effect is unknown.")
            elif term.power == 2 and self.values(term.axis) == 2:
                sentences.append(f"{term.axis} had two values: an optimum between them cannot be detected.")
        for one, other in self.collinear():
            sides = " and ".join(" x ".join(side) for side in (one, other) if side)
            text = sides if other else f"{' and '.join(one)} (at a constant product)"
            sentences.append(f"{text} vary together: their effects cannot be separated.")
        return sentences
