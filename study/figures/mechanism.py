"""Figures on why narrow heads start late: parts E1, E2 and E9 of PLAN2.md."""

from collections.abc import Mapping
from typing import Any

from leanformer.analysis.statistics import Difference
from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import growth, language, late, mechanism
from study.heads import mechanism_verdict as verdict
from study.tables import Estimate


GAP = {"32": 1.0, "4": -1.0}
FALL = GAP | {"32 fast": -1.0, "4 fast": 1.0}
WIDE_GAP, WIDE_FALL = ({f"256: {name}": w for name, w in weights.items()} for weights in (GAP, FALL))
CONTRASTS = {
    "gap": GAP,
    "fall": FALL,
    "beyond": FALL | {"1": -1.0, "1 fast": 1.0},
    "start": {"32 start": 1.0, "32 fast": -1.0},
    "wide_gap": WIDE_GAP,
    "wide_fall": WIDE_FALL,
    "rate": {"32": 1.0, "32 rate": -1.0},
    "rotary": {"rotary 32 fast": 1.0, "rotary 32": -1.0},
}


def factor_values() -> Mapping[str, Any]:
    """Return the contrasts, paired by seed, the share of the gap in percent, and delays behind one head in steps."""
    rows = mechanism.read_rows()
    losses = verdict.losses_of(rows)
    found: dict[str, Difference | None] = {name: verdict.paired(losses, w) for name, w in CONTRASTS.items()}
    found |= {"late": verdict.delay(rows, "32", "1"), "late_fast": verdict.delay(rows, "32 fast", "1")}
    estimates = {name: Estimate.of(x) for name, x in found.items() if x}
    shares = {"share": verdict.share(losses, FALL, GAP), "wide_share": verdict.share(losses, WIDE_FALL, WIDE_GAP)}
    return estimates | shares | {"level": verdict.LEVEL, "factor": mechanism.fast(32)}


def growth_values() -> Mapping[str, Any]:
    """Return by step the logits q·k/√d of one head over those of 32, and the slope of log q·k on log d."""
    rows, steps = language.read_rows(growth.ROWS), (0, growth.READ, growth.STOP)
    slopes = {step: Estimate.of(slope) for step in steps if (slope := growth.slope(rows, step))}
    return {
        "ratio": {step: growth.ratio(rows, step) for step in steps},
        "slope": slopes,
        "idea": 32**0.5,
    }


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
            README: ["of {wide_gap.value:.3f} nats between 32 and 4 heads after 1,000 steps | {wide_fall:.3f} |"],
            FINDINGS: [
                "closes {share.value:.0f} % ({share.low:.0f} to {share.high:.0f}) of the gap between 32 and 4 heads "
                "after 1,000 steps with learned positions: {fall:+.3f nats} of {gap.value:+.3f}.",
                "`model.logit_scale={factor:.2f}` for heads of 4",
                "the same closes {wide_share.value:.0f} % ({wide_share.low:.0f} to {wide_share.high:.0f}), "
                "{wide_fall:+.3f nats} of {wide_gap.value:+.3f}: refuted.",
                "the factor harms 32 heads: {rotary:+.3f}.",
            ],
            RESULTS: [
                "| 32 heads minus 4, 1/√d | {gap:+.3f} |",
                "| how far √128/d lowers that, {share.value:.0f} % | {fall:+.3f} |",
                "| the same, minus the gain of one head at 4e-3 | {beyond:+.3f} |",
                "| width 256: 32 heads minus 4, 1/√d | {wide_gap:+.3f} |",
                "| how far √256/d lowers that, {wide_share.value:.0f} % | {wide_fall:+.3f} |",
                "| 32 heads: larger start minus √128/d | {start:+.3f} |",
                "with 2.38 times the rate of queries and keys | {rate:+.3f} |",
                "rotary positions: √128/d minus 1/√d | {rotary:+.3f} |",
                "reach a training loss of {level} nats {late:+.0f steps} after one head, {late_fast:+.0f} with the "
                "factor.",
            ],
        },
    ),
    Passage(
        growth_values,
        {
            FINDINGS: [
                "{idea:.1f} times as fast with one head as with 32. It is {ratio[100]:.1f} times as large at step 100, "
                "{ratio[400]:.1f} times at step 400.",
            ],
            RESULTS: [
                "one head are {ratio[0]:.2f}, {ratio[100]:.2f} and {ratio[400]:.2f} times those of 32 at steps 0, 100 "
                "and 400. q·k grows like d to the power of {slope[100]:.2f} at step 100, {slope[400]:.2f} at step 400;",
            ],
        },
    ),
    Passage(
        late_values,
        {
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
