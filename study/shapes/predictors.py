"""Predictors of the quality of an architecture from its sizes alone; `planner.py` compares them with trained models.

Each returns a score, of which only the order matters (higher is better), or None if it needs FLOPs that are unknown.
"""

import math

from leanformer.analysis.design import Dimensions


def _capacity(rows: int, columns: int) -> float:
    """Return the expected ∑ ln(1 + λ) over the eigenvalues of W Wᵀ, rows x columns, its entries of variance
    2 / (rows + columns) (Glorot): the Shannon transform of the Marchenko-Pastur law (Tulino and Verdú 2004, 1.14)."""
    small, large = sorted((rows, columns))
    gain, ratio = large * 2 / (rows + columns), small / large
    root = math.sqrt(gain * (1 + math.sqrt(ratio)) ** 2 + 1) - math.sqrt(gain * (1 - math.sqrt(ratio)) ** 2 + 1)
    f = root**2 / 4
    return small * math.log(1 + gain - f) + large * math.log(1 + gain * ratio - f) - large * f / gain


def spectral_capacity(d: Dimensions) -> float:
    """Return Neural Spectral Capacity (arXiv 2609.23087): expected log-determinants of all weights, per head."""
    return sum(
        3 * heads * _capacity(d.width, head_dim) + _capacity(heads * head_dim, d.width) + 2 * _capacity(d.width, mlp)
        for heads, head_dim, mlp in zip(d.heads, d.head_dim, d.mlp, strict=True)
    )


# SoViT-400m/14, the result of its authors' scaling laws, and their exponents of compute (arXiv 2305.13035, eq. 4).
SOVIT = {"width": (1152, 0.22), "depth": (27, 0.45), "mlp": (4304, 0.60)}
SOVIT_FLOPS = 27 * (2 * 256 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 256**2 * 1152)  # forward, 256 patches


def sovit(d: Dimensions) -> float | None:
    """Return minus the distance, in squared logarithms, from the shape that SoViT's laws give at these FLOPs. It
    ignores heads, which were not varied for these laws."""
    if d.flops is None:
        return None
    sizes = {"width": d.width, "depth": d.depth, "mlp": sum(d.mlp) / d.depth}
    ideal = {name: size * (d.flops / SOVIT_FLOPS) ** power for name, (size, power) in SOVIT.items()}
    return -sum(math.log(sizes[name] / ideal[name]) ** 2 for name in SOVIT)


PREDICTORS = {
    "params": lambda d: math.log(d.params),
    "flops": lambda d: math.log(d.flops) if d.flops else None,
    "nsc": spectral_capacity,
    "sovit": sovit,
}
