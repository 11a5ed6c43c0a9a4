"""Figures on why narrow heads start late: part E1 of PLAN2.md."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import mechanism
from study.heads import mechanism_verdict as verdict


GAP = {"32": 1.0, "4": -1.0}
FALL = GAP | {"32 fast": -1.0, "4 fast": 1.0}
CONTRASTS = {
    "gap": GAP,
    "rest": {"32 fast": 1.0, "4 fast": -1.0},
    "fall": FALL,
    "beyond": FALL | {"1": -1.0, "1 fast": 1.0},
    "control": {"1 fast": 1.0, "1": -1.0},
    "gain": {"32 fast": 1.0, "32": -1.0},
    "start": {"32 start": 1.0, "32 fast": -1.0},
    "half": {"32 half": 1.0, "32 fast": -1.0},
    "double": {"32 double": 1.0, "32 fast": -1.0},
    "rotary": {"rotary 32 fast": 1.0, "rotary 32": -1.0},
}


def values() -> Mapping[str, Any]:
    """Return mean losses by arm, the contrasts by both estimates, the share of the gap in percent, and delays."""
    rows = mechanism.read_rows()
    losses = verdict.losses_of(rows)
    learned = [name for name in losses if not name.startswith(("rotary", "256"))]
    result: dict[str, Any] = {"loss": {name: np.mean([*of.values()]) for name, of in losses.items()}}
    result |= {name: verdict.paired(losses, weights) for name, weights in CONTRASTS.items()}
    result["pooled"] = {name: verdict.pooled(losses, weights, learned) for name, weights in CONTRASTS.items()}
    result["share"] = 100 * result["fall"].value / result["gap"].value
    result["late"] = {name: verdict.delay(rows, name, "1") for name in ("4", "32", "32 fast", "32 start")}
    return result


PASSAGES: list[Passage] = [Passage(values, {README: [], FINDINGS: [], RESULTS: []})]
