"""Response-surface (regression) predictor: error of an untrained architecture, with a prediction interval.

It is a Bayesian linear regression on logarithms of sizes, written with NumPy and SciPy: scikit-learn's BayesianRidge
has one prior scale for all terms and normal noise, and statsmodels' robust regression has no prior.

    f(error of run j of architecture i) = level + sum over terms (coefficient x term of i) + noise_ij

- f is the logit of a bounded error, and the logarithm of an unbounded one (`Scale`).
- Terms (`design.TERMS`) are in doublings of a size from the mean over the trained architectures, also for a size that
  did not vary. Coefficients have normal priors of mean 0 with the standard deviations given there, so that an effect
  that the runs do not determine keeps the uncertainty of its prior. Outside the range of a size the slope may change,
  with a prior (BEYOND).
- Noise is Student's t with FREEDOM degrees of freedom, so that outliers have little weight. All runs of an architecture
  share one t draw: their covariance is scale² ((1 - rho) I + rho), where rho is the part common to all seeds.
- The posterior is a mixture of normals over a grid of scale and rho. At each point, iterative reweighting finds the
  mode of the coefficients, and Laplace's approximation gives their covariance and the weight of the point. There are
  no random draws.

Expectations are medians of the mixture whose quantiles are the intervals, so they lie inside the intervals.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special

from leanformer.analysis.design import BEYOND, TERMS, Design, doublings, terms
from leanformer.analysis.dimensions import Dimensions
from leanformer.errors import ConfigError


LEVEL = 0.9
FEWEST = 10  # minimal number of different architectures
FREEDOM = 5.0  # degrees of freedom of the noise
FLAT = 3.0  # prior standard deviation of the level around the runs' median (a factor of 20)
SCALES = (1e-4, 2.0)  # range of the noise scale, log-uniform prior; errors are recorded with about four digits
COARSE, FINE, REPEATED = 24, 15, 6  # grid points: of the scale at first, of the scale when refined, of rho
REFINED = 3  # number of refinements of the grid
NODES = 8  # components of the mixture of normals that approximates Student's t


@dataclasses.dataclass(frozen=True)
class Scale:
    """Transformation f of errors before the regression: logit if they are bounded, logarithm if not.

    Attributes:
        limit: upper bound of errors: 1 for an error rate, 2 for 1 - correlation, infinity for a loss.
    """

    limit: float = math.inf

    def forward(self, errors: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """Return the logit of bounded errors, or the logarithm of unbounded ones."""
        return np.log(errors) if math.isinf(self.limit) else special.logit(errors / self.limit)

    def backward(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """Return the errors from values of `forward` (its inverse)."""
        return np.exp(values) if math.isinf(self.limit) else self.limit * special.expit(values)


@dataclasses.dataclass(frozen=True)
class Surface:
    """Posterior of the regression, which predicts errors: a mixture of k normals, one per grid point of the noise.

    Attributes:
        scale: transformation of the errors.
        design: sizes of the trained architectures.
        weight: probability of each component.
        mean: mean of the p coefficients per component: first the level, then those of `design.TERMS`.
        covariance: covariance of the coefficients per component.
        noise: scale of the noise of one run per component, in units of the transformed error.
        repeated: fraction rho of the noise variance that all runs of an architecture share, per component.
    """

    scale: Scale
    design: Design
    weight: Float[np.ndarray, " k"]
    mean: Float[np.ndarray, "k p"]
    covariance: Float[np.ndarray, "k p p"]
    noise: Float[np.ndarray, " k"]
    repeated: Float[np.ndarray, " k"]

    def expected_error(self, shapes: Sequence[Dimensions]) -> Float[np.ndarray, " n"]:
        """Return the predicted median error of one run of each of n architectures."""
        return self._quantiles(shapes, (0.5,))[0]

    def interval(self, shapes: Sequence[Dimensions], level: float = LEVEL) -> Float[np.ndarray, "2 n"]:
        """Return the prediction interval of the error of one run of each architecture: lower ends, then upper ends.

        Args:
            shapes: n architectures.
            level: probability that the error of a run lies inside.
        """
        return self._quantiles(shapes, ((1 - level) / 2, (1 + level) / 2))

    def probability_worse(self, shapes: Sequence[Dimensions], first: Dimensions) -> Float[np.ndarray, " n"]:
        """Return the probability that the mean error over seeds of each architecture is above that of `first`.

        For `first` itself it is 0.5.
        """
        rows, beyond = self._rows([first, *shapes])
        centre, variance = self._moments(rows[1:] - rows[0], beyond[1:] - beyond[0])
        nodes, weights = student_nodes(FREEDOM, NODES)
        # Lack of fit of both architectures, with a separate draw of t for each.
        spread = (1 / nodes[:, None] + 1 / nodes).reshape(-1)
        shared = np.outer(weights, weights).reshape(-1)
        sd = np.sqrt(variance[..., None] + (self.noise**2 * self.repeated)[:, None] * spread)
        result = np.einsum("k,j,nkj->n", self.weight, shared, special.ndtr(centre[..., None] / sd))
        return np.where([shape == first for shape in shapes], 0.5, result)

    def _rows(self, shapes: Sequence[Dimensions]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the regression, and the doublings by which each size lies outside its range."""
        rows = [[1.0, *terms(doublings(shape), self.design.centre)] for shape in shapes]
        return np.array(rows), np.array([[*self.design.beyond(shape).values()] for shape in shapes])

    def _moments(self, rows: np.ndarray, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of f, without noise, for every component."""
        variance = np.einsum("np,kpq,nq->nk", rows, self.covariance, rows, optimize=True)
        variance += BEYOND**2 * (beyond**2).sum(axis=1, keepdims=True)
        return rows @ self.mean.T, np.maximum(variance, 0.0)

    def _quantiles(self, shapes: Sequence[Dimensions], probabilities: Sequence[float]) -> np.ndarray:
        """Return quantiles of the error of one run, by bisection of the mixture's distribution function."""
        centre, variance = self._moments(*self._rows(shapes))
        nodes, weights = student_nodes(FREEDOM, NODES)
        mixed = (self.weight[:, None] * weights).reshape(-1)
        sd = np.sqrt(variance[..., None] + (self.noise**2)[:, None] / nodes).reshape(len(centre), -1)
        centre = np.repeat(centre, len(nodes), axis=1)
        result = []
        for probability in probabilities:
            low, high = (centre - 12 * sd).min(axis=1), (centre + 12 * sd).max(axis=1)
            for _ in range(45):  # to 3e-14 of the bracket
                middle = (low + high) / 2
                below = special.ndtr((middle[:, None] - centre) / sd) @ mixed < probability
                low, high = np.where(below, middle, low), np.where(below, high, middle)
            result.append((low + high) / 2)
        return self.scale.backward(np.array(result))


@functools.cache
def student_nodes(freedom: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return precisions and weights, each (count,), of normals whose mixture approximates Student's t.

    Args:
        freedom: degrees of freedom of Student's t.
        count: number of normals (nodes of the Gauss-Laguerre quadrature).
    """
    nodes, weights = special.roots_genlaguerre(count, freedom / 2 - 1)
    return nodes / (freedom / 2), weights / weights.sum()


def fit(shapes: Sequence[Dimensions], errors: Sequence[Sequence[float]], scale: Scale | None = None) -> Surface:
    """Return the regression fitted to trained architectures.

    Args:
        shapes: trained architectures.
        errors: errors (lower is better) of the runs of each architecture, in the order of `shapes`, at least one each.
        scale: transformation of the errors; by default that of a loss.

    Raises:
        ConfigError: there are fewer than FEWEST different architectures, or an error is not strictly between 0 and
            `scale.limit`.
    """
    scale = scale or Scale()
    different = len(set(shapes))
    if different < FEWEST:
        raise ConfigError(
            f"The response surface needs {FEWEST} different architectures, found {different}. Train more."
        )
    extremes = min(map(min, errors)), max(map(max, errors))
    if not 0 < extremes[0] <= extremes[1] < scale.limit:
        bad = extremes[0] if extremes[0] <= 0 else extremes[1]
        raise ConfigError(
            f"An error of {bad:g} is not strictly between 0 and {scale.limit:g}, as the response surface requires. "
            "Choose another metric, such as --metric=loss."
        )
    design = Design.from_shapes(shapes)
    values = [scale.forward(np.array(runs, float)) for runs in errors]
    data = _Data.of(np.insert(design.rows, 0, 1.0, axis=1), values)
    rho, rho_weight = special.roots_legendre(REPEATED)
    rho, rho_weight = (rho + 1) / 2, rho_weight / 2
    several = data.count.max() > 1  # otherwise the likelihood does not depend on rho
    places, posterior = _posterior(data, rho if several else rho[:1], rho_weight if several else np.ones(1))
    evidence = posterior.evidence.reshape(FINE, -1)
    weight = (np.exp(evidence - evidence.max()) * rho_weight).reshape(-1)
    posterior.mean[:, 0] += data.level
    mean, covariance = (
        np.repeat(part, 1 if several else REPEATED, axis=0) for part in (posterior.mean, posterior.covariance)
    )
    relevant = weight > 1e-7 * weight.max()
    noise, repeated = np.exp(np.repeat(places, REPEATED)), np.tile(rho, FINE)
    weight = weight[relevant] / weight[relevant].sum()
    return Surface(scale, design, weight, mean[relevant], covariance[relevant], noise[relevant], repeated[relevant])


def _posterior(data: "_Data", rho: np.ndarray, rho_weight: np.ndarray) -> tuple[np.ndarray, "_Posterior"]:
    """Return a grid of ln scale around its posterior, and the posterior at every pair of ln scale and rho."""
    grid = np.linspace(math.log(SCALES[1]), math.log(SCALES[0]), COARSE)
    start, coarse = np.zeros((len(rho), len(data.prior))), []
    for place in grid:  # from large to small noise, each from the previous solution, so that outliers stay outliers
        coarse.append(data.posterior(np.full(len(rho), place), rho, start, tolerance=1e-6))
        start = coarse[-1].mean
    places, step, evidence = grid, grid[0] - grid[1], np.array([posterior.evidence for posterior in coarse])
    for _ in range(REFINED):
        weight = np.exp(evidence - evidence.max()) @ rho_weight
        weight /= weight.sum()
        middle = float(weight @ places)
        spread = max(math.sqrt(float(weight @ (places - middle) ** 2)), 0.75 * step)
        places = np.clip(np.linspace(middle + 4 * spread, middle - 4 * spread, FINE), grid[-1], grid[0])
        step = 8 * spread / (FINE - 1)
        above = np.clip(np.searchsorted(-grid, -places) - 1, 0, COARSE - 1)  # next larger scale of the coarse grid
        start = np.concatenate([coarse[i].mean for i in above])
        posterior = data.posterior(np.repeat(places, len(rho)), np.tile(rho, FINE), start, tolerance=1e-11)
        evidence = posterior.evidence.reshape(FINE, len(rho))
    return places, posterior


class _Posterior(NamedTuple):
    """Modes, Laplace covariances and log evidence at several points of the grid."""

    mean: np.ndarray
    covariance: np.ndarray
    evidence: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Data:
    """Sufficient statistics of the runs for the likelihood, per architecture: count, mean and sum of squares."""

    rows: np.ndarray
    count: np.ndarray
    means: np.ndarray
    within: np.ndarray
    prior: np.ndarray  # precision of each coefficient
    level: float  # prior mean of the level, which is subtracted from the means

    @classmethod
    def of(cls, rows: np.ndarray, values: Sequence[np.ndarray]) -> "_Data":
        means = np.array([runs.mean() for runs in values])
        within = np.array([((runs - runs.mean()) ** 2).sum() for runs in values])
        prior = 1 / np.array([FLAT, *(term.prior for term in TERMS)]) ** 2
        level = float(np.median(means))
        return cls(rows, np.array([float(len(runs)) for runs in values]), means - level, within, prior, level)

    def posterior(self, ln_scale: np.ndarray, rho: np.ndarray, start: np.ndarray, tolerance: float) -> _Posterior:
        """Return the posterior of the coefficients at each pair of ln scale and rho; the level less its prior mean."""
        n, squared = self.count, np.exp(2 * ln_scale)[:, None]
        common = 1 + (n - 1) * rho[:, None]  # n x variance of an architecture's mean, in units of scale²
        precision = n / (squared * common)
        within = self.within / (squared * (1 - rho[:, None]))
        prior, coefficients = np.diag(self.prior), start
        for _ in range(100):
            distance = within + precision * (self.means - coefficients @ self.rows.T) ** 2
            weighted = precision * (FREEDOM + n) / (FREEDOM + distance)
            hessian = (self.rows.T * weighted[:, None]) @ self.rows + prior
            before = coefficients
            coefficients = np.linalg.solve(hessian, ((weighted * self.means) @ self.rows)[..., None])[..., 0]
            if np.abs(coefficients - before).max() < tolerance:
                break
        # Expected information of a t likelihood, so that the matrix is positive definite.
        information = weighted * (FREEDOM + n) / (FREEDOM + n + 2)
        factor = np.linalg.cholesky((self.rows.T * information[:, None]) @ self.rows + prior)
        inverse = np.linalg.inv(factor)
        likelihood = (
            special.gammaln((FREEDOM + n) / 2)
            - n * ln_scale[:, None]
            - ((n - 1) * np.log1p(-rho[:, None]) + np.log(common)) / 2
            - (FREEDOM + n) / 2 * np.log1p(distance / FREEDOM)
        ).sum(axis=1)
        evidence = likelihood - (self.prior * coefficients**2).sum(axis=1) / 2
        evidence -= np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        return _Posterior(coefficients, np.swapaxes(inverse, 1, 2) @ inverse, evidence)
