"""Check of Equation 3 and Theorem 3.2 of Leaner Transformers (arXiv 2505.20802) on Gaussian matrices.

    python -m study.paper.theorem [--tokens=197] [--head_dim=64]

2026-11-21. They hold to 3 % if total width is at least four times the number of tokens, as they assume (D >> N). Near
square matrices they are wrong by a factor, and starting from D < N the condition number first rises with heads.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from leanformer.conditioning import formula, singular_values


AMPLE = 4.0  # D / N from which D >> N is considered met
DRAWS = 32


class Check(NamedTuple):
    """Statement of the paper, compared with the median over random Gaussian matrices."""

    statement: str
    measured: float
    predicted: float
    assumption: str

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1


def _check(statement: str, tokens: int, width: int, measured: float, predicted: float) -> Check:
    met = "met" if width >= AMPLE * tokens else "not met"
    return Check(statement, measured, predicted, f"D >> N: D / N = {width / tokens:.2f}, {met}")


def _spectra(tokens: int, width: int) -> np.ndarray:
    return np.asarray(singular_values(jax.random.normal(jax.random.key(0), (DRAWS, tokens, width))), np.float64)


def check_equation(tokens: int, width: int) -> list[Check]:
    """Check Equation 3: σ_1 against √D + √N, and the smallest singular value against |√D - √N|."""
    s, a, b = np.median(_spectra(tokens, width), axis=0), math.sqrt(tokens), math.sqrt(width)
    values = {"largest": (s[0], b + a), "smallest": (s[-1], abs(b - a))}
    return [_check(f"Equation 3: {name} singular value", tokens, width, *map(float, x)) for name, x in values.items()]


def check_theorem(tokens: int, head_dim: int, heads: Sequence[int] = (2, 3, 4, 6, 8, 12, 16)) -> list[Check]:
    """Check Theorem 3.2: condition numbers of tokens x (heads · head_dim) matrices against the formula."""
    checks = []
    for n in heads:
        s, width = _spectra(tokens, n * head_dim), n * head_dim
        measured = float(np.median(s[:, 0] / s[:, -1]))
        name = f"Theorem 3.2: condition number with {n} heads of {head_dim}"
        checks.append(_check(name, tokens, width, measured, formula(tokens, width)))
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--head_dim", type=int, default=64)
    args = parser.parse_args()
    for check in (*check_equation(args.tokens, 16 * args.head_dim), *check_theorem(args.tokens, args.head_dim)):
        values = f"measured {check.measured:7.3f}  predicted {check.predicted:7.3f}"
        print(f"{check.statement:<60} {values}  {check.assumption}")


if __name__ == "__main__":
    main()
