"""Figures on why narrow heads start late: parts E1, E2, E7 and E9 of PLAN2.md."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis.statistics import Difference
from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import growth, language, late, mechanism
from study.heads import mechanism_verdict as verdict
from study.tables import Estimate


GAP = verdict.GAP
FALL = GAP | {"32 fast": -1.0, "4 fast": 1.0}
WIDE_GAP, WIDE_FALL = verdict.WIDE_GAP, {f"256: {name}": w for name, w in FALL.items()}
RANK = {"32": 1.0, "32 rank": -1.0}
CORNERS = {"few_wide": "4", "few_narrow": "4 low rank", "many_wide": "32 wide", "many_narrow": "32"}
CONTRASTS = {
    "gap": GAP,
    "fall": FALL,
    "beyond": FALL | {"1": -1.0, "1 fast": 1.0},
    "start": {"32 start": 1.0, "32 fast": -1.0},
    "wide_gap": WIDE_GAP,
    "wide_fall": WIDE_FALL,
    "wide_gain": {"256: 32": 0.5, "256: 32 fast": -0.5, "256: 4": 0.5, "256: 4 fast": -0.5},
    "rate": {"32": 1.0, "32 rate": -1.0},
    "rank": RANK,
    "few": verdict.FEW,
    "many": {"32 wide": 1.0, "4": -1.0},
    "taught": verdict.TAUGHT,
    "taught_four": {"4": 1.0, "4 taught at first": -1.0},
    "taught_low": {"4 low rank": 1.0, "4 low rank taught at first": -1.0},
    "narrow": verdict.beyond_control("4"),
    "even": verdict.beyond_control("4 low rank"),
    "limited": {"4 low rank taught by 4": 1.0, "4 low rank": -1.0},
    "logits": {"32 rank": 1.0, "32 wide": -1.0},
    "split": verdict.SPLIT,
    "interaction": verdict.INTERACTION,
    "wide_few": verdict.WIDE_FEW,
    "alike": {"32": 1.0, "32 alike": -1.0},
    "tied_300": {"32": 1.0, "32 tied until 300": -1.0},
    "tied_500": {"32": 1.0, "32 tied until 500": -1.0},
    "tied_700": {"32": 1.0, "32 tied until 700": -1.0},
    "long": {"long 64: 16": 1.0, "long 64: 4": -1.0},
    "long_wide": {"long 128: 32": 1.0, "long 128: 4": -1.0},
    "rotary": {"rotary 32 fast": 1.0, "rotary 32": -1.0},
}


def factor_values() -> Mapping[str, Any]:
    """Return the contrasts, paired by seed, the share of the gap in percent, and delays behind one head in steps."""
    rows = language.read_rows(mechanism.ROWS)
    losses = verdict.losses_of(rows)
    found: dict[str, Difference | None] = {name: verdict.paired(losses, w) for name, w in CONTRASTS.items()}
    found |= {"late": verdict.delay(rows, "32", "1"), "late_fast": verdict.delay(rows, "32 fast", "1")}
    estimates = {name: Estimate.of(x) for name, x in found.items() if x}
    parts = {"share": FALL, "rank_share": RANK, "split_share": verdict.SPLIT, "few_share": verdict.FEW}
    shares = {
        name: verdict.share(losses, w, GAP) for name, w in (parts | {"logits_share": CONTRASTS["logits"]}).items()
    }
    wide = {"wide_share": WIDE_FALL, "wide_few_share": verdict.WIDE_FEW}
    shares |= {name: verdict.share(losses, w, WIDE_GAP) for name, w in wide.items()}
    steps = verdict.arrivals(rows)
    shares["late_share"] = verdict.share(steps, verdict.SPLIT, GAP)
    corners = {"corners": {name: np.mean([*losses[arm].values()]) for name, arm in CORNERS.items()}}
    params = {row["arm"]: row["params"] for row in rows}
    corners |= {"more": params["32 wide"] - params["32"], "fewer": params["4"] - params["4 low rank"]}
    delays = {
        "few_late": verdict.delay(rows, "4 low rank", "4"),
        "many_late": verdict.delay(rows, "32 wide", "4"),
    }
    found = {name: Estimate.of(x) for name, x in delays.items() if x} | {"level": verdict.LEVEL}
    return estimates | shares | corners | found | {"factor": mechanism.fast(32)}


def growth_values() -> Mapping[str, Any]:
    """Return by step the logits q·k/√d of one head over those of 32, and the slope of log q·k on log d."""
    rows = language.read_rows(growth.ROWS)
    slope = growth.slope(rows, growth.READ)
    return {
        "ratio": {step: growth.ratio(rows, step) for step in (50, growth.READ, growth.STOP)},
        "slope": slope and Estimate.of(slope),
        "idea": 32**0.5,
        "fast": 1 / growth.ratio(rows, growth.READ, "32 fast"),
        "small": [growth.ratio(rows, step) / growth.ratio(rows, step, "32 rank") for step in (50, growth.STOP)],
        "low": growth.LOW,
        "high": growth.HIGH,
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
            README: [
                "{split_share.value:.0f} % ({split_share.low:.0f} to {split_share.high:.0f}) |",
                "Rotary positions: 32 heads end {long_wide.value:.3f} behind,",
            ],
            FINDINGS: [
                "| 4 heads, values of 32 | {corners[few_wide]:.3f} | {corners[few_narrow]:.3f} |",
                "| 32 heads, values of 4 | {corners[many_wide]:.3f} | {corners[many_narrow]:.3f} |",
                "| the split of the values | {split_share.value:.0f} ({split_share.low:.0f} to "
                "{split_share.high:.0f}) |",
                "queries and keys of 8 | {wide_few_share.value:.1f} ({wide_few_share.low:.1f} to "
                "{wide_few_share.high:.1f}) |",
                "| larger logits at equal shape, 32 heads | {logits_share.value:.0f} ({logits_share.low:.0f} to "
                "{logits_share.high:.0f}) |",
                "at logits as small, 32 heads | {rank_share.value:.0f} ({rank_share.low:.0f} to "
                "{rank_share.high:.0f}) |",
                "√128/d, no parameters | {share.value:.0f} ({share.low:.0f} to {share.high:.0f}) |",
                "√256/d at width 256 | {wide_share.value:.0f} ({wide_share.low:.0f} to {wide_share.high:.0f}) |",
                "a training loss of {level} nats by {few_late.value:.0f} steps, the split alone by "
                "{many_late.value:.0f}.",
                "cost of the split is {few.value:.3f} nats with",
                "start with the same pattern | {alike:.3f} |",
                "they also keep one pattern until step 300 | {tied_300:.3f} |",
                "| until step 500 | {tied_500:.3f} |",
                "| until step 700 | {tied_700:.3f} |",
                "`model.logit_scale={factor:.2f}` for d = 4",
                "at width 256 both gain {wide_gain.value:.2f} nats, and with rotary positions it costs 32 heads "
                "{rotary.value:.3f} nats.",
                "| width 64, 16 heads minus 4 | {long:+.3f} |",
                "| width 128, 32 heads minus 4 | {long_wide:+.3f} |",
            ],
            RESULTS: [
                "| 32 heads minus 4, 1/√d | {gap:+.3f} |",
                "| how far √128/d lowers that, {share.value:.0f} % | {fall:+.3f} |",
                "| the same, minus the gain of one head at 4e-3 | {beyond:+.3f} |",
                "| width 256: 32 heads minus 4, 1/√d | {wide_gap:+.3f} |",
                "| how far √256/d lowers that, {wide_share.value:.0f} % | {wide_fall:+.3f} |",
                "| 32 heads: larger start minus √128/d | {start:+.3f} |",
                "with 2.38 times the rate of queries and keys | {rate:+.3f} |",
                "at logits about as small, {rank_share.value:.0f} % | {rank:+.3f} |",
                "with queries and keys of 32: 1/16 minus 1/√32, {logits_share.value:.0f} % | {logits:+.3f} |",
                "| 32 heads minus 4 with queries and keys of 4, {few_share.value:.0f} % | {few:+.3f} |",
                "| the same with queries and keys of 32 | {many:+.3f} |",
                "| mean of both, {split_share.value:.0f} % | {split:+.3f} |",
                "| their difference, the interaction | {interaction:+.3f} |",
                "4 with queries and keys of 8, {wide_few_share.value:.0f} % | {wide_few:+.3f} |",
                "the split of the values is {split_share.value:.0f} % of the gap after",
                "32 heads minus the same, taught until step 400 by 8 heads' values | {taught:+.3f} |",
                "4 heads minus the same, taught until step 400 by 4 heads' values | {taught_four:+.3f} |",
                "the first minus the second | {narrow:+.3f} |",
                "minus the same, taught by 4 heads' values | {taught_low:+.3f} |",
                "the first minus this | {even:+.3f} |",
                "taught by 4 dimensions of values minus by 32 | {limited:+.3f} |",
                "rotary positions: √128/d minus 1/√d | {rotary:+.3f} |",
                "4,000 steps: 16 heads minus 4 | {long:+.3f} |",
                "| width 128, the same: 32 heads minus 4 | {long_wide:+.3f} |",
                "the same with 4 patterns at the start | {alike:+.3f} |",
                "the same, tied in groups until step 300 | {tied_300:+.3f} |",
                "| the same until step 500 | {tied_500:+.3f} |",
                "| the same until step 700 | {tied_700:+.3f} |",
                "The split makes {late_share.value:.0f} % ({late_share.low:.0f} to {late_share.high:.0f}) of the delay "
                "to {level} nats behind 4 heads: small queries and keys alone make {few_late:.0f steps}, the split "
                "alone {many_late:.0f}.",
                "queries and keys of 4 have {fewer:,} parameters less, 32 with those of 32 {more:,} more.",
                "reach a training loss of {level} nats {late:+.0f steps} after one head, {late_fast:+.0f} with the "
                "factor.",
            ],
        },
    ),
    Passage(
        growth_values,
        {
            RESULTS: [
                "are {ratio[50]:.1f}, {ratio[100]:.1f} and {ratio[400]:.1f} times those of 32 at steps 50, 100 and 400 "
                "(by the idea {idea:.1f}). With √128/d those of 32 are {fast:.1f} times one head's at step 100,",
                "about as small ({small[0]:.2f} to {small[1]:.2f} of those with 4 from step 50 on)",
                "d to the power of {slope:.2f} at step 100; the idea's rule asks for {low} to {high}:",
            ],
        },
    ),
    Passage(
        late_values,
        {
            RESULTS: [
                "4,000 steps, {runs} runs:",
                "half of its last value {learned_previous:+.0f} steps after one, the loss {level} nats "
                "{learned_loss:+.0f}; with rotary positions {rotary_previous:+.0f} and {rotary_loss:+.0f}. Their rank "
                "correlations are {rank[learned]:.2f} and {rank[rotary]:.2f}, over all runs {rank[all]:.2f}.",
            ],
        },
    ),
]
