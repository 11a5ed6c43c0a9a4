"""Figures on why narrow heads start late: parts E1, E2, E7 and E9 of PLAN2.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import growth, language, late, mechanism, patterns
from study.heads import mechanism_verdict as verdict
from study.tables import Estimate


GAP, BEGUN = verdict.GAP, 0.1  # a largest attention to the previous token
FALL = GAP | {"32 fast": -1.0, "4 fast": 1.0}
WIDE_GAP, WIDE_FALL = verdict.WIDE_GAP, {f"256: {name}": w for name, w in FALL.items()}
RANK = {"32": 1.0, "32 rank": -1.0}
CONTRASTS = {
    "gap": GAP,
    "fall": FALL,
    "wide_gap": WIDE_GAP,
    "wide_fall": WIDE_FALL,
    "rank": RANK,
    "few": verdict.FEW,
    "many": {"32 wide": 1.0, "4": -1.0},
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
    "given": verdict.GIVEN,
    "weak": verdict.GIVEN_WEAKLY,
    "weak_gap": {"32 given weakly": 1.0, "4 given weakly": -1.0},
    "sham_gap": {"32 given itself": 1.0, "4 given itself": -1.0},
    "first_gap": {"32 given until 300": 1.0, "4 given until 300": -1.0},
    "rotary_given_gap": {"rotary 32 given": 1.0, "rotary 4 given": -1.0},
    "given_gap": {"32 given": 1.0, "4 given": -1.0},
    "given_few": verdict.GIVEN_FEW,
    "gain": {"32": 1.0, "32 given": -1.0},
    "four_gain": {"4": 1.0, "4 given": -1.0},
    "low_given": {"4 low rank given": 1.0, "4 given": -1.0},
    "sham": {"32": 1.0, "32 given itself": -1.0},
    "sham_fall": verdict.GIVEN_ITSELF,
    "weak_sham_fall": verdict.WEAK_ITSELF,
    "weak_sham_gap": {"32 given itself weakly": 1.0, "4 given itself weakly": -1.0},
    "first": verdict.GIVEN_FIRST,
    "rotary_gap": verdict.ROTARY_GAP,
    "rotary_given": verdict.ROTARY_GIVEN,
    "rotary_small": verdict.ROTARY_SMALL,
    "rotary_few": verdict.ROTARY_FEW,
    "rotary_split": verdict.ROTARY_SPLIT,
    "rotary_ahead": {name: -weight for name, weight in verdict.ROTARY_MANY.items()},
    "rotary_repair": verdict.ROTARY_REPAIR,
    "rotary_many": verdict.ROTARY_MANY,
    "rotary_mlp": {"rotary 32": 1.0, "rotary 32 mlp": -1.0},
    "rotary_queries": verdict.ROTARY_QUERIES,
    "long_small": verdict.LONG_SMALL,
    "rotary": {"rotary 32 fast": 1.0, "rotary 32": -1.0},
    "frequencies": verdict.FREQUENCIES,
    "wide_frequencies": verdict.WIDE_FREQUENCIES,
    "weak_gain": {"32": 1.0, "32 given weakly": -1.0},
    "base_four": {"rotary 4 base 10": 1.0, "rotary 4": -1.0},
    "base": {name: -weight for name, weight in verdict.BASE.items()},
}
STEADY = {  # with rates chosen over five seeds
    "steady": verdict.ROTARY_GIVEN,
    "steady_gap": CONTRASTS["rotary_given_gap"],
    "two": verdict.GIVEN_TWO_BACK,
    "two_gap": {"32 given two back": 1.0, "4 given two back": -1.0},
    "two_gain": {"32": 1.0, "32 given two back": -1.0},
}
SHARES = {
    "share": (FALL, GAP),
    "rank_share": (RANK, GAP),
    "split_share": (verdict.SPLIT, GAP),
    "few_share": (verdict.FEW, GAP),
    "logits_share": (CONTRASTS["logits"], GAP),
    "given_share": (verdict.GIVEN, GAP),
    "given_few_share": (verdict.GIVEN_FEW, verdict.FEW),
    "weak_share": (verdict.GIVEN_WEAKLY, GAP),
    "sham_share": (verdict.GIVEN_ITSELF, GAP),
    "wide_frequencies_share": (verdict.WIDE_FREQUENCIES, verdict.ROTARY_REPAIR),
    "weak_sham_share": (verdict.WEAK_ITSELF, GAP),
    "first_share": (verdict.GIVEN_FIRST, GAP),
    "rotary_share": (verdict.ROTARY_GIVEN, verdict.ROTARY_GAP),
    "rotary_small_share": (verdict.ROTARY_SMALL, verdict.ROTARY_GAP),
    "rotary_few_share": (verdict.ROTARY_FEW, verdict.ROTARY_GAP),
    "rotary_split_share": (verdict.ROTARY_SPLIT, verdict.ROTARY_GAP),
    "rotary_repair_share": (verdict.ROTARY_REPAIR, verdict.ROTARY_GAP),
    "rotary_queries_share": (verdict.ROTARY_QUERIES, verdict.ROTARY_REPAIR),
    "frequencies_share": (verdict.FREQUENCIES, verdict.ROTARY_GAP),
    "long_small_share": (verdict.LONG_SMALL, verdict.LONG_GAP),
    "wide_share": (WIDE_FALL, WIDE_GAP),
    "wide_few_share": (verdict.WIDE_FEW, WIDE_GAP),
}


def factor_values() -> Mapping[str, Any]:
    """Return the contrasts, paired by seed, the share of the gap in percent, and delays behind one head in steps."""
    rows = language.read_rows(mechanism.ROWS)
    losses = verdict.losses_of(rows)
    found: dict[str, Difference | None] = {name: verdict.paired(losses, w) for name, w in CONTRASTS.items()}
    estimates = {name: Estimate.of(x) for name, x in found.items() if x}
    shares = {name: verdict.share(losses, part, whole) for name, (part, whole) in SHARES.items()}
    steady = losses | {arm: verdict.over_seeds(rows, arm) for arm in verdict.UNSTEADY}
    shares["steady_share"] = verdict.share(steady, verdict.ROTARY_GIVEN, verdict.ROTARY_GAP)
    shares["two_share"] = verdict.share(steady, verdict.GIVEN_TWO_BACK, GAP)
    for name, weights in STEADY.items():
        if found_steady := verdict.paired(steady, weights):
            estimates[name] = Estimate.of(found_steady)
    steps = verdict.arrivals(rows)
    shares["late_share"] = verdict.share(steps, verdict.SPLIT, GAP)
    params = {row["arm"]: row["params"] for row in rows}
    sizes = {"more": params["32 wide"] - params["32"], "fewer": params["4"] - params["4 low rank"]}
    delays = {
        "rotary_late": verdict.delay(rows, "rotary 32", "rotary 4"),
        "rotary_early": verdict.delay(rows, "rotary 4", "rotary 32 wide"),
        "few_late": verdict.delay(rows, "4 low rank", "4"),
        "many_late": verdict.delay(rows, "32 wide", "4"),
        "later": verdict.delay(rows, "32", "4"),
        "later_given": verdict.delay(rows, "32 given", "4 given"),
    }
    doses = {
        "dose": attention(mechanism.ARMS["32 given"].bonus),
        "weak": attention(mechanism.ARMS["32 given weakly"].bonus),
    }
    found = {name: Estimate.of(x) for name, x in delays.items() if x} | {"level": verdict.LEVEL}
    return estimates | shares | sizes | found | {"factor": mechanism.fast(32), "doses": doses}


def attention(bonus: float) -> float:
    """Return the attention to a token whose logit is larger by `bonus` than equal others, mean over positions."""
    return float(np.mean(math.exp(bonus) / (math.exp(bonus) + np.arange(1, mechanism.TOKENS))))


def growth_values() -> Mapping[str, Any]:
    """Return the logits of "32 rank" over those of 32 heads at two steps."""
    rows = language.read_rows(growth.ROWS)
    return {"small": [growth.ratio(rows, step) / growth.ratio(rows, step, "32 rank") for step in (50, growth.STOP)]}


def pattern_values() -> Mapping[str, Any]:
    """Return means over runs at the last step by arm, and the cosine of heads that began alike at step 200."""
    rows = language.read_rows(patterns.ROWS)

    def mean(arm: str, step: int, name: str) -> float:
        return float(np.mean([r[name] for r in rows if (r["arm"], r["step"]) == (arm, step)]))

    ends = {
        key: {name: mean(arm, 1000, name) for name in ("first", "mean", "within")}
        for key, arm in zip(("split", "few", "tied", "alike"), patterns.NAMES, strict=True)
    }
    return {"end": ends, "begun": mean("32 alike", 200, "within"), "equal": np.mean(1 / np.arange(2, 129))}


def rows_of(rows: Sequence[Mapping[str, Any]], arm: str, seed: int) -> tuple[list[int], list[float]]:
    """Return the steps of a run of part E2, and the largest previous-token masses of a head."""
    of_run = sorted((r for r in rows if (r["arm"], r["seed"]) == (arm, seed)), key=lambda r: r["step"])
    return [r["step"] for r in of_run], [r["previous"] for r in of_run]


def late_values() -> Mapping[str, Any]:
    """Return the delays of 32 heads behind one in steps, and rank correlations over the runs."""
    rows = language.read_rows(late.ROWS)
    found = late.lateness(rows)
    delays = {
        f"{kind}_{name}": late.delay(found, name, prefix)
        for kind, prefix in (("learned", ""), ("rotary", "rotary "))
        for name in ("previous", "loss")
    }
    steps = {arm: [rows_of(rows, arm, seed) for seed in late.SEEDS] for arm in ("32", "1")}
    tenth = ([late.first_step(*run, BEGUN) for run in steps[arm]] for arm in ("32", "1"))
    delays["tenth"] = statistics.paired(*map(np.array, tenth))
    masses = {f"mass_{arm}": np.mean([masses[-1] for _, masses in runs]) for arm, runs in steps.items()}
    ranks = {kind or "all": late.correlation(found, "previous", kind)[0] for kind in (None, "learned", "rotary")}
    return {name: Estimate.of(x) for name, x in delays.items() if x} | {
        "rank": ranks,
        "runs": len(found),
        "level": late.LATE,
        "begun": BEGUN,
        **masses,
    }


def _share(change: str, gap: str, share: str = "") -> str:
    """Return a row of the table of gaps: what is changed, the gap that stays, and the share that goes."""
    share = f"{share or gap}_share"
    return f"| {change} | {{{gap}_gap:.3f}} | {{{share}.value:.0f}} ({{{share}.low:.0f}} to {{{share}.high:.0f}}) |"


PASSAGES = [
    Passage(
        factor_values,
        {
            README: [
                "by giving it weakly (the token two back: {two_share.value:.0f} %, at a rate chosen over five "
                "seeds) | {weak_share.value:.0f} % "
                "({weak_share.low:.0f} to {weak_share.high:.0f}) |",
                "Rotary positions: 32 heads end {long_wide.value:.3f} behind,",
            ],
            FINDINGS: [
                "makes {doses[dose]:.2f} or {doses[weak]:.2f} of their attention,",
                "| as usual | {gap:.3f} | |",
                _share("given the previous token", "given"),
                _share("given it weakly", "weak"),
                _share("given the token two back weakly", "two"),
                _share("given it until step 300", "first"),
                _share("given the token itself, a sham", "sham"),
                _share("given the token itself weakly", "weak_sham"),
                "| rotary positions | {rotary_gap:.3f} | |",
                _share("rotary positions, given the previous token", "rotary_given", "rotary"),
                _share("the same at a rate chosen over five seeds", "steady"),
                "it gives 32 heads {two_gain:.3f nats}, the previous token {weak_gain.value:.3f}.",
                "The stronger pattern helps both: 32 heads by {gain:.3f nats}, 4 heads by {four_gain:.3f}; the "
                "delay to a training loss of {level} nats shrinks from {later:.0f steps} to {later_given:.0f}; small "
                "queries and keys then cost nothing, {low_given:.3f nats}.",
                "the rest is of small queries and keys | {split_share.value:.0f} ({split_share.low:.0f} to "
                "{split_share.high:.0f}) |",
                "queries and keys of 8 | {wide_few_share.value:.1f} ({wide_few_share.low:.1f} to "
                "{wide_few_share.high:.1f}) |",
                "| rotary positions: small queries and keys alone | {rotary_small_share.value:.0f} "
                "({rotary_small_share.low:.0f} to {rotary_small_share.high:.0f}) |",
                "| small queries and keys alone, after 4,000 steps | {long_small_share.value:.0f} "
                "({long_small_share.low:.0f} to {long_small_share.high:.0f}) |",
                "| rotary positions: the split of the values | {rotary_split_share.value:z.0f} "
                "({rotary_split_share.low:.0f} to {rotary_split_share.high:.0f}) |",
                "of 32 and values of 4 end {rotary_ahead:.3f nats} ahead of 4 heads",
                "as many in the MLP instead gain {rotary_mlp:.3f nats}, so {rotary_queries_share.value:.0f} % "
                "({rotary_queries_share.low:.0f} to {rotary_queries_share.high:.0f}) of this repair is beyond",
                "They reach a training loss of {level} nats {rotary_early.value:.0f} steps earlier; with queries and "
                "keys of 4, {rotary_late.value:.0f} later.",
                "heads of 32 with only these two lose {frequencies:.3f nats}, 32 heads with queries and keys of 32 "
                "lose {wide_frequencies:.3f nats}, {wide_frequencies_share.value:.0f} % "
                "({wide_frequencies_share.low:.0f} to {wide_frequencies_share.high:.0f}) of the repair,",
                "but cost 32 heads {base:.3f nats} more, 4 heads of 32 only {base_four.value:.3f}.",
                "| part of this: two frequencies instead of sixteen | {frequencies_share.value:.0f} "
                "({frequencies_share.low:.0f} to {frequencies_share.high:.0f}) |",
                "√128/d, no parameters | {share.value:.0f} ({share.low:.0f} to {share.high:.0f}) |",
                "√256/d at width 256 | {wide_share.value:.0f} ({wide_share.low:.0f} to {wide_share.high:.0f}) |",
                "a training loss of {level} nats by {few_late.value:.0f} steps, the split alone by "
                "{many_late.value:.0f}.",
                "split's cost, {few:.3f nats} with queries and keys of 4,",
                "until step 300: they end {tied_300:.3f nats} lower.",
                "not shown to help, {alike:.3f}:",
                "`model.logit_scale={factor:.2f}` for d = 4",
                "with rotary positions they cost 32 heads {rotary.value:.3f} nats.",
                "| width 64, 16 heads minus 4 | {long:+.3f} |",
                "| width 128, 32 heads minus 4 | {long_wide:+.3f} |",
            ],
            RESULTS: [
                "given it, {given_share.value:.0f} % of the gap between 4 and 32 heads after",
                "| 32 heads minus 4, 1/√d | {gap:+.3f} |",
                "| how far it falls if both are given the previous token, {given_share.value:.0f} % | {given:+.3f} |",
                "| the same with 3 instead of 6, {weak_share.value:.0f} % | {weak:+.3f} |",
                "the token two back, at a rate chosen over five seeds, {two_share.value:.0f} % | {two:+.3f} |",
                "| what stays of it with 6 | {given_gap:+.3f} |",
                "| 32 heads minus the same, given the previous token | {gain:+.3f} |",
                "| the same for 4 heads | {four_gain:+.3f} |",
                "| 4 heads given it: queries and keys of 4 minus 32 | {low_given:+.3f} |",
                "| 32 heads minus the same, given their own token, a sham | {sham:+.3f} |",
                "| how far the gap falls by the sham, {sham_share.value:.0f} % | {sham_fall:+.3f} |",
                "| the same by a sham of 3 instead of 6, {weak_sham_share.value:.0f} % | {weak_sham_fall:+.3f} |",
                "until step 300, {first_share.value:.0f} % | {first:+.3f} |",
                "| rotary positions: 32 heads minus 4 | {rotary_gap:+.3f} | | how far it falls if both are given the "
                "previous token, {rotary_share.value:.0f} % | {rotary_given:+.3f} |",
                "five seeds, {steady_share.value:.0f} % | {steady:+.3f} |",
                "queries and keys of 4 minus 32, {rotary_small_share.value:.0f} % | {rotary_small:+.3f} |",
                "two frequencies minus sixteen, {wide_frequencies_share.value:.0f} % of their gain | "
                "{wide_frequencies:+.3f} |",
                "two frequencies minus sixteen, {frequencies_share.value:.0f} % | {frequencies:+.3f} |",
                "| rotary positions: 32 heads, base 10 minus base 10,000 | {base:+.3f} |",
                "both with queries and keys of 4, {rotary_few_share.value:.0f} % | {rotary_few:+.3f} |",
                "the same, both with queries and keys of 32 | {rotary_many:+.3f} |",
                "mean of the last two, the split, {rotary_split_share.value:z.0f} % | {rotary_split:+.3f} |",
                "| 32 heads: queries and keys of 4 minus 32, {rotary_repair_share.value:.0f} % | "
                "{rotary_repair:+.3f} |",
                "a larger MLP, of as many parameters | {rotary_mlp:+.3f} |",
                "minus 32: the same after 4,000 steps, {long_small_share.value:.0f} % | {long_small:+.3f} |",
                "32 heads reach a training loss of {level} nats {later:.0f steps} after 4, {later_given:.0f} given the "
                "previous token.",
                "| 32 heads minus 4, both with queries and keys of 4, {few_share.value:.0f} % | {few:+.3f} |",
                "given the previous token, {given_few_share.value:.0f} % of it | {given_few:+.3f} |",
                "| 32 heads minus 4, both with queries and keys of 32 | {many:+.3f} |",
                "| mean of both, {split_share.value:.0f} % | {split:+.3f} |",
                "| their difference, the interaction | {interaction:+.3f} |",
                "| width 256: 32 heads minus 4, 1/√d | {wide_gap:+.3f} |",
                "| the same with queries and keys of 8, {wide_few_share.value:.0f} % | {wide_few:+.3f} |",
                "the same with 4 patterns at the start | {alike:+.3f} |",
                "the same, tied in groups until step 300 | {tied_300:+.3f} |",
                "| the same until step 500 | {tied_500:+.3f} |",
                "| the same until step 700 | {tied_700:+.3f} |",
                "queries and keys of 4 have {fewer:,} parameters less, 32 with those of 32 {more:,} more.",
                "The split makes {late_share.value:.0f} % ({late_share.low:.0f} to {late_share.high:.0f}) of the delay "
                "to {level} nats behind 4 heads: small queries and keys alone make {few_late:.0f steps}, the split "
                "alone {many_late:.0f}.",
                "| how far √128/d lowers the gap, {share.value:.0f} % | {fall:+.3f} |",
                "| how far √256/d lowers that of width 256, {wide_share.value:.0f} % | {wide_fall:+.3f} |",
                "at logits about as small, {rank_share.value:.0f} % | {rank:+.3f} |",
                "with queries and keys of 32: 1/16 minus 1/√32, {logits_share.value:.0f} % | {logits:+.3f} |",
                "rotary positions: √128/d minus 1/√d | {rotary:+.3f} |",
                "| width 64: 16 heads minus 4 | {long:+.3f} |",
                "| width 128: 32 heads minus 4 | {long_wide:+.3f} |",
            ],
        },
    ),
    Passage(
        pattern_values,
        {
            FINDINGS: ["stay alike (cosine of W_Q W_Kᵀ {end[tied][within]:.2f})", "differ ({begun:.2f})"],
            RESULTS: [
                *(
                    f"| {name} | {{end[{arm}][first]:.2f}} | {{end[{arm}][mean]:.2f}} | {{end[{arm}][within]:.2f}} |"
                    for name, arm in (
                        ("32 heads", "split"),
                        ("32, tied until step 500", "tied"),
                        ("32, started alike", "alike"),
                    )
                ),
                "queries and keys of 4 | {end[few][first]:.2f} | {end[few][mean]:.2f} | - |",
                "equal attention, {equal:.3f}, is nearly half of the mean",
            ],
        },
    ),
    Passage(
        growth_values,
        {
            RESULTS: [
                '"About as small": {small[0]:.2f} to {small[1]:.2f} of those with 4 from step 50 on.',
            ],
        },
    ),
    Passage(
        late_values,
        {
            FINDINGS: [
                "reaches {begun} later than with one head, by {tenth:.0f steps}; at step 1,200 it is "
                "{mass_32:.2f}, not {mass_1:.2f} (schedule",
            ],
            RESULTS: [
                "4,000 steps, {runs} runs:",
                "half of its last value {learned_previous:+.0f} steps after one, the loss {level} nats "
                "{learned_loss:+.0f}; with rotary positions {rotary_previous:+.0f} and {rotary_loss:+.0f}. Their rank "
                "correlations are {rank[learned]:.2f} and {rank[rotary]:.2f}, over all runs {rank[all]:.2f}.",
            ],
        },
    ),
]
