"""Figures on the small pairs of shapes, one row per architecture of Leaner Transformers."""

import math
from collections.abc import Mapping
from typing import Any

from study.figures.passages import RESULTS, Passage
from study.heads import families
from study.tables import Estimate


MANY = "Nyströmformer"  # a family with five tasks, in one row
NAMES = {"Crammed BERT": "Crammed BERT, nats (lower is better)"}


def values() -> Mapping[str, Any]:
    """Return by family what share of parameters the lean shape saves, its change, and the ends of both of MANY."""
    pairs = [*families.summarise(families.read_rows())]
    change = {r.family: Estimate.of(r.difference) for r in pairs}
    saved = {r.family: 100 * (1 - r.params["lean"] / r.params["original"]) for r in pairs}
    many = [name for name in saved if name.startswith(MANY)]
    found = [change[name].value for name in many if math.isfinite(change[name].high)]
    return {
        "change": {r.family: f"{change[r.family]:+.{1 if r.unit == '%' else 3}f}" for r in pairs},
        "saved": saved,
        "saved_many": [end(saved[name] for name in many) for end in (min, max)],
        "many": [min(found), max(found)],
        "verdict": "No difference is shown" if {r.verdict for r in pairs} == {"not shown"} else "A difference is shown",
    }


PASSAGES = [
    Passage(
        values,
        {
            RESULTS: [
                "{verdict} in any of ten",
                *(
                    f"| {NAMES.get(name, name)} | {{saved[{name}]:.0f}} | {{change[{name}]}} |"
                    for name in families.FAMILIES
                    if not name.startswith(MANY)
                ),
                f"| {MANY}, five tasks | {{saved_many[0]:.0f}} to {{saved_many[1]:.0f}} | {{many[0]:+.1f}} to "
                "{many[1]:+.1f} |",
            ]
        },
    )
]
