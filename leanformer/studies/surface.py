"""A response surface: from shapes that were trained to the error of one that was not, with an interval.

ln error = c · (1, ln params, ln² params, ln depth, ln² depth, ln heads, ln head width, ln MLP / width): size that pays
less and less, depth with a best value, and power laws of heads and of rank. Fitted so that single runs gone wrong weigh
little; the interval is by bootstrap, over shapes, then over the seeds of each, and has the noise of a run in it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import optimize

from leanformer.errors import ConfigError
from leanformer.studies.predictors import Dimensions


DRAWS = 200
LEVEL = 0.9
TERMS = ("ln params", "ln² params", "ln depth", "ln² depth", "ln heads", "ln head width", "ln MLP / width")
FEWEST = len(TERMS) + 3  # shapes


def terms(d: Dimensions) -> list[float]:
    """The features of a shape besides the constant; of layers that differ, means of logarithms."""

    def mean(sizes: Any) -> float:
        return float(np.mean(np.log(sizes)))

    size, depth = math.log(d.params), math.log(d.depth)
    return [size, size**2, depth, depth**2, mean(d.heads), mean(d.head_dim), mean(np.array(d.mlp) / d.width)]


@dataclasses.dataclass(frozen=True)
class Surface:
    """A fit, and those to resampled runs.

    Attributes:
        centre, scale: of the features.
        fit: coefficients; draws: of each resampling; noise: residuals, widened by the degrees of freedom spent.
    """

    centre: np.ndarray
    scale: np.ndarray
    fit: np.ndarray
    draws: np.ndarray
    noise: np.ndarray

    def error(self, shapes: Sequence[Dimensions]) -> Float[np.ndarray, " n"]:
        """Expected errors."""
        return np.exp(self._design(shapes) @ self.fit)

    def interval(self, shapes: Sequence[Dimensions], level: float = LEVEL) -> Float[np.ndarray, "2 n"]:
        """Between what the error of one run of each shape should lie."""
        rng = np.random.default_rng(0)
        noise = rng.choice(self.noise, (len(self.draws), len(shapes)))
        drawn = self.draws @ self._design(shapes).T + noise
        return np.exp(np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0))

    def as_good(self, shapes: Sequence[Dimensions], level: float = LEVEL) -> list[bool]:
        """Whether a shape cannot be told from the first: the interval of their ratio, without noise, holds 1."""
        drawn = self.draws @ self._design(shapes).T
        low, high = np.quantile(drawn - drawn[:, :1], [(1 - level) / 2, (1 + level) / 2], axis=0)
        return [bool(a <= 0 <= b) for a, b in zip(low, high, strict=True)]

    def _design(self, shapes: Sequence[Dimensions]) -> np.ndarray:
        found = (np.array([terms(shape) for shape in shapes]) - self.centre) / self.scale
        return np.concatenate([np.ones((len(shapes), 1)), found], axis=1)


def fit(shapes: Sequence[Dimensions], errors: Sequence[Sequence[float]], draws: int = DRAWS) -> Surface:
    """A surface from trained shapes.

    Args:
        errors: of each shape the errors of its runs, above 0.

    Raises:
        ConfigError: too few shapes, or an error that has no logarithm.
    """
    if len(shapes) < FEWEST:
        raise ConfigError(f"{len(shapes)} trained shapes, and a surface needs {FEWEST}: train more of them.")
    if min(min(each) for each in errors) <= 0:
        raise ConfigError("An error of 0 or less has no logarithm: choose another metric, the loss for instance.")
    raw = np.array([terms(shape) for shape in shapes])
    centre, scale = raw.mean(axis=0), raw.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.concatenate([np.ones((len(raw), 1)), (raw - centre) / scale], axis=1)
    logs = [np.log(each) for each in errors]
    means = np.array([each.mean() for each in logs])
    found = _robust(design, means)
    residuals = np.concatenate([each - row @ found for each, row in zip(logs, design, strict=True)])
    spent = np.linalg.matrix_rank(design)
    noise = residuals * math.sqrt(len(means) / max(1, len(means) - spent))
    rng, drawn = np.random.default_rng(0), []
    for _ in range(draws):
        chosen = rng.integers(len(means), size=len(means))
        resampled = np.array([rng.choice(logs[i], len(logs[i])).mean() for i in chosen])
        drawn.append(_robust(design[chosen], resampled))
    return Surface(centre, scale, found, np.array(drawn), noise)


def _robust(design: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients by Huber's loss, its bend at the residuals' own size; of a feature that does not vary, none."""
    start = np.linalg.lstsq(design, values, rcond=1e-8)[0]
    size = 1.4826 * float(np.median(np.abs(values - design @ start)))
    if size == 0:
        return start
    # A trace of ridge where features are collinear, or they could run away together.
    ridge = 1e-4 * size * np.eye(design.shape[1])[1:]

    def residuals(c: np.ndarray) -> np.ndarray:
        return np.concatenate([values - design @ c, ridge @ c])

    jacobian = -np.concatenate([design, -ridge])
    found = optimize.least_squares(residuals, start, lambda _: jacobian, loss="huber", f_scale=1.345 * size)
    return found.x
