"""Response-surface (regression) predictor: error of an untrained architecture, with a prediction interval.

A Bayesian linear regression on logarithms of sizes, with NumPy and SciPy: scikit-learn's BayesianRidge has one prior
scale for all terms and normal noise, and statsmodels' robust regression has no prior.

    f(mean error of architecture i) = level + sum over terms (coefficient x term of i) + noise_i

- f is the logit of a bounded error, and the logarithm of an unbounded one (`Scale`).
- Terms (`design.TERMS`) are in doublings of a size from the mean over the trained architectures, also for a size that
  did not vary. Coefficients have normal priors of mean 0, so an effect that the runs do not determine keeps the
  uncertainty of its prior. Outside the range of a size the slope may change, with a prior (BEYOND).
- Noise is normal. Its variance maximises the evidence (MacKay, 1992), with a weak prior (NOISE); predictions are
  Student's t with the degrees of freedom that the effective number of coefficients leaves.
- An outlier, such as a run that diverged, widens all intervals. Leave it out.
- The variance of seeds is pooled over architectures, and is added to the prediction of a single run.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy import special, stats

from leanformer.analysis.design import BEYOND, TERMS, Design, Dimensions, doublings, terms
from leanformer.errors import ConfigError


LEVEL = 0.9
FEWEST = 10  # minimal number of different architectures
FLAT = 3.0  # prior standard deviation of the level around the runs' median (a factor of 20)
STEPS = 100  # iterations of the variance
NOISE, NOISE_FREEDOM = 0.01, 1.0  # prior standard deviation of the noise, and its weight in architectures


@dataclasses.dataclass(frozen=True)
class Scale:
    """Transformation f of errors before the regression: logit if they are bounded, logarithm if not."""

    limit: float = math.inf  # upper bound of errors: 1 for a rate, 2 for 1 - correlation, infinity for a loss

    def forward(self, errors: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        return np.log(errors) if math.isinf(self.limit) else special.logit(errors / self.limit)

    def backward(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        return np.exp(values) if math.isinf(self.limit) else self.limit * special.expit(values)


@dataclasses.dataclass(frozen=True)
class Surface:
    """Posterior of the regression, which predicts errors."""

    scale: Scale
    design: Design
    mean: Float[np.ndarray, " p"]  # coefficients: first the level, then one per term of TERMS
    covariance: Float[np.ndarray, "p p"]
    noise: float  # variance of f(mean error) around the surface
    seeds: float  # variance to add for a single run
    freedom: float  # degrees of freedom of the predictions

    def expected_error(self, shapes: Sequence[Dimensions]) -> Float[np.ndarray, " n"]:
        """Return the predicted median error of one run of each architecture."""
        return self.scale.backward(self._rows(shapes)[0] @ self.mean)

    def interval(self, shapes: Sequence[Dimensions], level: float = LEVEL) -> Float[np.ndarray, "2 n"]:
        """Return the lower and the upper ends that contain one run's error with probability `level`."""
        rows, beyond = self._rows(shapes)
        error = np.sqrt(self._variance(rows, beyond) + self.noise + self.seeds)
        return self.scale.backward(np.array(stats.t.interval(level, self.freedom, rows @ self.mean, error)))

    def probability_worse(self, shapes: Sequence[Dimensions], first: Dimensions) -> Float[np.ndarray, " n"]:
        """Return the probability, per shape, that its mean error over seeds is above `first`'s; 0.5 if equal."""
        rows, beyond = self._rows([first, *shapes])
        rows, beyond = rows[1:] - rows[0], beyond[1:] - beyond[0]
        error = np.sqrt(self._variance(rows, beyond) + 2 * self.noise)
        result = stats.t.cdf(rows @ self.mean / error, self.freedom)
        return np.where([shape == first for shape in shapes], 0.5, result)

    def _rows(self, shapes: Sequence[Dimensions]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the regression, and the doublings by which each size lies outside its range."""
        rows = [[1.0, *terms(doublings(shape), self.design.centre)] for shape in shapes]
        return np.array(rows), np.array([[*self.design.beyond(shape).values()] for shape in shapes])

    def _variance(self, rows: np.ndarray, beyond: np.ndarray) -> np.ndarray:
        # of f, without noise
        return np.einsum("np,pq,nq->n", rows, self.covariance, rows) + BEYOND**2 * (beyond**2).sum(axis=1)


def fit(shapes: Sequence[Dimensions], errors: Sequence[Sequence[float]], scale: Scale | None = None) -> Surface:
    """Fit the response surface, transformed errors on log sizes with a prior, to trained architectures.

    Args:
        shapes: trained architectures.
        errors: errors (lower is better) of the runs of each architecture, in the order of `shapes`, at least one each.
        scale: transformation of the errors; by default a loss's.

    Raises:
        ConfigError: there are fewer than FEWEST different architectures, or an error is not strictly between 0 and
            `scale.limit`.
    """
    scale = scale or Scale()
    if (different := len(set(shapes))) < FEWEST:
        raise ConfigError(f"The response surface needs {FEWEST} architectures, found {different}. Train more.")
    if wrong := [error for runs in errors for error in runs if not 0 < error < scale.limit]:
        raise ConfigError(f"An error of {wrong[0]:g} is not between 0 and {scale.limit:g}. Choose --metric=loss.")
    design = Design.from_shapes(shapes)
    values = [scale.forward(np.array(runs, float)) for runs in errors]
    means = np.array([runs.mean() for runs in values])
    level = float(np.median(means))
    rows, targets = np.insert(design.rows, 0, 1.0, axis=1), means - level
    precision = np.diag(1 / np.array([FLAT, *(term.prior for term in TERMS)]) ** 2)
    noise = float(np.var(means)) + NOISE**2
    for _ in range(STEPS):
        covariance = np.linalg.inv(rows.T @ rows / noise + precision)
        mean = covariance @ rows.T @ targets / noise
        freedom = len(rows) - float(np.trace(covariance @ rows.T @ rows)) / noise + NOISE_FREEDOM
        noise = (float(((targets - rows @ mean) ** 2).sum()) + NOISE_FREEDOM * NOISE**2) / freedom
    within = sum(float(((runs - runs.mean()) ** 2).sum()) for runs in values)
    spare = sum(len(runs) - 1 for runs in values)
    seeds = within / spare * (1 - np.mean([1 / len(runs) for runs in values])) if spare else 0.0
    mean[0] += level
    return Surface(scale, design, mean, covariance, noise, float(seeds), freedom)
