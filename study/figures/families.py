"""Figures on the small pairs of shapes, one row per architecture of Leaner Transformers."""

import math
from collections.abc import Mapping
from typing import Any

from study.figures.passages import RESULTS, Passage
from study.heads import families
from study.tables import Estimate


def rows() -> Mapping[str, Any]:
    """Return the cells of a row by the name of its family."""
    cells = {}
    for r in families.summarise(families.read_rows()):
        digits, change = (1 if r.unit == "%" else 3), Estimate.of(r.difference)
        cells[r.family] = {
            "params": " to ".join(f"{r.params[shape]:,}" for shape in families.SHAPES),
            **{shape: f"{r.scores[shape]:.{digits}f}" for shape in families.SHAPES},
            "change": f"{change:+.{digits}f}" if math.isfinite(change.high) else "0, equal in every seed",
            "verdict": r.verdict,
            "kappa": "; ".join(r.kappa.values()),
            "seeds": r.seeds,
        }
    return {"rows": cells}


COLUMNS = ("params", "original", "lean", "change", "verdict", "kappa")
PASSAGES = [
    Passage(
        rows,
        {
            RESULTS: [
                f"| {name} | {' | '.join(f'{{rows[{name}][{column}]}}' for column in COLUMNS)} |"
                for name in families.FAMILIES
            ]
        },
    )
]
