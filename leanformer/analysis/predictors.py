"""What can be said of a shape before it is trained: each predictor by its name, and none believed without a test.

`experiments/planner.py` holds them against trained models. All say how good a shape should be: higher is better, on a
scale of their own, and only the order counts.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from leanformer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """A shape, layer by layer.

    Attributes:
        params: that the predictors count; flops: of an example, forward, None where they are not known.
        tokens: rows of the matrices, None where they are not known.
    """

    width: int
    heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    mlp: tuple[int, ...]
    params: int
    flops: int | None = None
    tokens: int | None = None

    @property
    def depth(self) -> int:
        return len(self.heads)


AXES = ("depth", "width", "num_heads", "head_dim", "mlp_dim")


def of_model(model: Mapping[str, Any], params: int, flops: int | None = None, tokens: int | None = None) -> Dimensions:
    """The shape of a model by its config's section. Raises ConfigError where a size is not one for all layers."""
    uneven = [axis for axis in AXES if type(model.get(axis)) is not int]
    if uneven or type(model.get("value_dim") or 1) is not int:
        said = ", ".join(f"{axis}={model.get(axis)}" for axis in uneven or ["value_dim"])
        raise ConfigError(f"The model {model.get('name')} has {said}: shapes are compared of one size for all layers.")
    depth, width, heads, head_dim, mlp = (model[axis] for axis in AXES)
    return Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params, flops, tokens)


@dataclasses.dataclass(frozen=True)
class Predictor:
    """`of` gives None of a shape without the figures that it needs."""

    what: str
    of: Callable[[Dimensions], float | None]


def _capacity(rows: int, columns: int) -> float:
    """∑ ln(1 + λ) over the eigenvalues of W Wᵀ, rows x columns, expected of independent entries of variance
    2 / (rows + columns) (Glorot): the Shannon transform of the Marchenko-Pastur law (Tulino and Verdú 2004, 1.14)."""
    small, large = sorted((rows, columns))
    gain, ratio = large * 2 / (rows + columns), small / large
    root = math.sqrt(gain * (1 + math.sqrt(ratio)) ** 2 + 1) - math.sqrt(gain * (1 - math.sqrt(ratio)) ** 2 + 1)
    f = root**2 / 4
    return small * math.log(1 + gain - f) + large * math.log(1 + gain * ratio - f) - large * f / gain


def spectral_capacity(d: Dimensions) -> float:
    """Neural Spectral Capacity (arXiv 2609.23087): expected log-determinants of all weights, each head's by itself."""
    return sum(
        3 * heads * _capacity(d.width, head_dim) + _capacity(heads * head_dim, d.width) + 2 * _capacity(d.width, mlp)
        for heads, head_dim, mlp in zip(d.heads, d.head_dim, d.mlp, strict=True)
    )


def conditioning(d: Dimensions) -> float | None:
    """Minus the logarithm of the condition number that the attention output would have, were it Gaussian, in the mean
    over layers: Leaner Transformers (arXiv 2505.20802) with the exact law in place of its formula."""
    if d.tokens is None:
        return None
    from leanformer.conditioning.theory import gaussian  # imports JAX, which nothing else here needs

    medians = {
        inner: gaussian(d.tokens, inner).median for inner in {n * h for n, h in zip(d.heads, d.head_dim, strict=True)}
    }
    return -sum(math.log(medians[n * h]) for n, h in zip(d.heads, d.head_dim, strict=True)) / d.depth


# SoViT-400m/14, the shape that its authors' laws ended at, and their exponents of compute (arXiv 2305.13035, eq. 4).
SOVIT = {"width": (1152, 0.22), "depth": (27, 0.45), "mlp": (4304, 0.60)}
SOVIT_FLOPS = 27 * (2 * 256 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 256**2 * 1152)  # forward, 256 patches, 2 a product


def sovit(d: Dimensions) -> float | None:
    """Minus the distance, in squared logarithms, from the shape that SoViT's laws give at these FLOPs. Blind to heads,
    which its runs never changed."""
    if d.flops is None:
        return None
    found = {"width": d.width, "depth": d.depth, "mlp": sum(d.mlp) / d.depth}
    ideal = {name: size * (d.flops / SOVIT_FLOPS) ** power for name, (size, power) in SOVIT.items()}
    return -sum(math.log(found[name] / ideal[name]) ** 2 for name in SOVIT)


PREDICTORS = {
    "params": Predictor("more parameters are better", lambda d: math.log(d.params)),
    "flops": Predictor("more FLOPs are better", lambda d: math.log(d.flops) if d.flops else None),
    "nsc": Predictor("Neural Spectral Capacity", spectral_capacity),
    "conditioning": Predictor("a Gaussian attention output of that shape is better conditioned", conditioning),
    "sovit": Predictor("nearer to SoViT's shape laws at its FLOPs", sovit),
}
