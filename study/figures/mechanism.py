"""Figures on why narrow heads start late: part E1 of PLAN2.md."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import late, mechanism
from study.heads import mechanism_verdict as verdict
from study.tables import Estimate


GAP = {"32": 1.0, "4": -1.0}
FALL = GAP | {"32 fast": -1.0, "4 fast": 1.0}
CONTRASTS = {
    "gap": GAP,
    "fall": FALL,
    "beyond": FALL | {"1": -1.0, "1 fast": 1.0},
    "start": {"32 start": 1.0, "32 fast": -1.0},
    "rotary": {"rotary 32 fast": 1.0, "rotary 32": -1.0},
}


def as_estimate(found: verdict.Estimate | None) -> Estimate:
    """Return a contrast with its 95 % interval; NaN if it was not run."""
    return Estimate(found.value, *found.interval()) if found else Estimate(math.nan, math.nan, math.nan)


def values() -> Mapping[str, Any]:
    """Return the contrasts by both estimates, the share of the gap in percent, and delays in steps."""
    rows = mechanism.read_rows()
    losses = verdict.losses_of(rows)
    learned = [name for name in losses if not name.startswith(("rotary", "256"))]
    result: dict[str, Any] = {name: as_estimate(verdict.paired(losses, w)) for name, w in CONTRASTS.items()}
    result["pooled"] = {name: as_estimate(verdict.pooled(losses, w, learned)) for name, w in CONTRASTS.items()}
    found = verdict.share(losses, FALL, GAP)
    result |= {"share": Estimate(*(100 * x for x in found or ())), "level": verdict.LEVEL}
    late = {"usual": "32", "fast": "32 fast"}
    result["late"] = {name: as_estimate(verdict.delay(rows, arm, "1")) for name, arm in late.items()}
    result["factor"] = mechanism.fast(32)
    return result


def late_values() -> Mapping[str, Any]:
    """Return the runs of part E2, the mean delays of 32 heads in steps by positions, and the rank correlation."""
    found = late.lateness(late.read_rows())

    def delays(positions: str) -> dict[str, float]:
        many, one = ([found[f"{positions}{heads}", seed] for seed in late.SEEDS] for heads in (32, 1))
        return {
            name: float(np.mean([x[name] - y[name] for x, y in zip(many, one, strict=True)]))
            for name in ("previous", "loss")
        }

    steps = [(x["previous"], x["loss"]) for x in found.values()]
    correlation = stats.spearmanr(*zip(*steps, strict=True)).statistic
    return {"runs": len(found), "late": delays(""), "rotary": delays("rotary "), "correlation": correlation}


PASSAGES = [
    Passage(
        values,
        {
            README: ["of a gap of {gap.value:.3f} between 32 and 4 heads | {fall:.3f} |"],
            FINDINGS: [
                "{share.value:.0f} % ({share.low:.0f} to {share.high:.0f}) of the gap between 32 and 4 heads after "
                "1,000 steps: {fall:+.3f nats} of {gap.value:+.3f}.",
                "with 1/√d, end {start:+.3f} behind. With rotary positions the factor harms: {rotary:+.3f}.",
                "`model.logit_scale={factor:.2f}` for heads of 4",
            ],
            RESULTS: [
                "| 32 heads minus 4, 1/√d | {gap:+.3f} | ({pooled[gap].low:.3f} to {pooled[gap].high:.3f}) |",
                "| how far √128/d lowers that, {share.value:.0f} % | {fall:+.3f} | ({pooled[fall].low:.3f} to "
                "{pooled[fall].high:.3f}) |",
                "| the same, minus the gain of one head at 4e-3 | {beyond:+.3f} | ({pooled[beyond].low:.3f} to "
                "{pooled[beyond].high:.3f}) |",
                "| 32 heads: larger start minus √128/d | {start:+.3f} | ({pooled[start].low:.3f} to "
                "{pooled[start].high:.3f}) |",
                "rotary positions: √128/d minus 1/√d | {rotary:+.3f} |",
                "reach a training loss of {level} nats {late[usual].value:+.0f} steps ({late[usual].low:.0f} to "
                "{late[usual].high:.0f}) after one head, {late[fast].value:+.0f} ({late[fast].low:.0f} to "
                "{late[fast].high:.0f}) with the factor.",
            ],
        },
    ),
    Passage(
        late_values,
        {
            FINDINGS: ["attention to the previous token comes {late[previous]:+.0f} steps later"],
            RESULTS: [
                "{runs} runs: a head",
                "half of its last value {late[previous]:+.0f} steps later with 32 heads than with one, the loss 3.3 "
                "nats {late[loss]:+.0f} steps; with rotary positions {rotary[previous]:+.0f} and {rotary[loss]:+.0f}. "
                "Over the runs the two steps have a rank correlation of {correlation:.2f}.",
            ],
        },
    ),
]
