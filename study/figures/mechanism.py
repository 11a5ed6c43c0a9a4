"""Figures on why narrow heads start late: parts E1 and E2 of PLAN2.md."""

from collections.abc import Mapping
from typing import Any

from leanformer.analysis.statistics import Difference
from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import language, late, mechanism
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


def factor_values() -> Mapping[str, Any]:
    """Return the contrasts, paired by seed, the share of the gap in percent, and delays behind one head in steps."""
    rows = mechanism.read_rows()
    losses = verdict.losses_of(rows)
    found: dict[str, Difference | None] = {name: verdict.paired(losses, w) for name, w in CONTRASTS.items()}
    found |= {"late": verdict.delay(rows, "32", "1"), "late_fast": verdict.delay(rows, "32 fast", "1")}
    estimates = {name: Estimate.of(x) for name, x in found.items() if x}
    return estimates | {"share": verdict.share(losses, FALL, GAP), "level": verdict.LEVEL, "factor": mechanism.fast(32)}


def late_values() -> Mapping[str, Any]:
    """Return the delays of 32 heads behind one in steps, and rank correlations over the runs."""
    found = late.lateness(language.read_rows(late.ROWS))
    delays = {
        f"{kind}_{name}": late.delay(found, name, prefix)
        for kind, prefix in (("learned", ""), ("rotary", "rotary "))
        for name in ("previous", "loss")
    }
    ranks = {kind or "all": late.correlation(found, "previous", kind)[0] for kind in (None, "learned", "rotary")}
    return {name: Estimate.of(x) for name, x in delays.items() if x} | {
        "rank": ranks,
        "runs": len(found),
        "level": late.LATE,
    }


PASSAGES = [
    Passage(
        factor_values,
        {
            README: ["of {gap.value:.3f} nats between 32 and 4 heads | {fall:.3f} |"],
            FINDINGS: [
                "closes {share.value:.0f} % ({share.low:.0f} to {share.high:.0f}) of the gap between 32 and 4 heads "
                "after 1,000 steps with learned positions: {fall:+.3f nats} of {gap.value:+.3f}.",
                "`model.logit_scale={factor:.2f}` for heads of 4",
                "the factor harms 32 heads: {rotary:+.3f}.",
            ],
            RESULTS: [
                "| 32 heads minus 4, 1/√d | {gap:+.3f} |",
                "| how far √128/d lowers that, {share.value:.0f} % | {fall:+.3f} |",
                "| the same, minus the gain of one head at 4e-3 | {beyond:+.3f} |",
                "| 32 heads: larger start minus √128/d | {start:+.3f} |",
                "rotary positions: √128/d minus 1/√d | {rotary:+.3f} |",
                "reach a training loss of {level} nats {late:+.0f steps} after one head, {late_fast:+.0f} with the "
                "factor.",
            ],
        },
    ),
    Passage(
        late_values,
        {
            FINDINGS: [
                "the previous token comes {learned_previous.value:+.0f} steps later than with one, a loss of {level} "
                "nats {learned_loss.value:+.0f}; with rotary positions {rotary_previous.value:+.0f} and "
                "{rotary_loss.value:+.0f}.",
            ],
            RESULTS: [
                "4,000 steps, {runs} runs:",
                "half of its last value {learned_previous:+.0f} steps after one, the loss {level} nats "
                "{learned_loss:+.0f}; with rotary positions {rotary_previous:+.0f} and {rotary_loss:+.0f}. The two "
                "have rank correlations of {rank[learned]:.2f} and {rank[rotary]:.2f} over runs with learned and "
                "rotary positions, {rank[all]:.2f} over all.",
            ],
        },
    ),
]
