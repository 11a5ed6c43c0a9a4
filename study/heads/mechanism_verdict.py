"""Verdicts of parts E1 and E7 of PLAN2.md from the committed rows.

python -m study.heads.mechanism_verdict [--rows=FILE]
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from study.heads import language
from study.heads.mechanism import ROWS, SEEDS, best_rate
from study.heads.trainer import WINDOW
from study.tables import Estimate


Losses = Mapping[str, Mapping[int, float]]  # by arm and seed
Weights = Mapping[str, float]  # of arms
DOUBLING = 0.01  # nats per doubling of heads that are ignored
MARGIN = 3 * DOUBLING  # from 4 to 32 heads
GAP, WIDE_GAP = {"32": 1.0, "4": -1.0}, {"256: 32": 1.0, "256: 4": -1.0}
FEW, WIDE_FEW = {"32": 1.0, "4 low rank": -1.0}, {"256: 32": 1.0, "256: 4 low rank": -1.0}  # at equal queries and keys
WIDE = {"32 wide": 1.0, "4": -1.0}
SPLIT = {"32": 0.5, "4 low rank": -0.5, "32 wide": 0.5, "4": -0.5}
INTERACTION = {"32": 1.0, "4 low rank": -1.0, "32 wide": -1.0, "4": 1.0}
TAUGHT = {"32": 1.0, "32 taught at first": -1.0}
GIVEN = GAP | {"32 given": -1.0, "4 given": 1.0}
GIVEN_FIRST = GAP | {"32 given until 300": -1.0, "4 given until 300": 1.0}
GIVEN_WEAKLY = GAP | {"32 given weakly": -1.0, "4 given weakly": 1.0}
GIVEN_ITSELF = GAP | {"32 given itself": -1.0, "4 given itself": 1.0}
WEAK_ITSELF = GAP | {"32 given itself weakly": -1.0, "4 given itself weakly": 1.0}
WEAK_SHAM = {"32 given itself weakly": 1.0, "32 given weakly": -1.0}
TWO_BACK = {"32 given two back": 1.0, "32 given weakly": -1.0}
GIVEN_TWO_BACK = GAP | {"32 given two back": -1.0, "4 given two back": 1.0}
SHAM = {"32 given itself": 1.0, "32 given": -1.0}
ROTARY_GAP = {"rotary 32": 1.0, "rotary 4": -1.0}
ROTARY_FEW = {"rotary 32": 1.0, "rotary 4 low rank": -1.0}
ROTARY_SMALL = {"rotary 4 low rank": 1.0, "rotary 4": -1.0}
ROTARY_REPAIR = {"rotary 32": 1.0, "rotary 32 wide": -1.0}
ROTARY_MANY = {"rotary 32 wide": 1.0, "rotary 4": -1.0}
ROTARY_SPLIT = {"rotary 32": 0.5, "rotary 4 low rank": -0.5, "rotary 32 wide": 0.5, "rotary 4": -0.5}
ROTARY_QUERIES = {"rotary 32 mlp": 1.0, "rotary 32 wide": -1.0}
FREQUENCIES = {"rotary 4 two": 1.0, "rotary 4": -1.0}
WIDE_FREQUENCIES = {"rotary 32 wide two": 1.0, "rotary 32 wide": -1.0}
BASE = {"rotary 32": 1.0, "rotary 32 base 10": -1.0}
BASE_GAP = ROTARY_GAP | {"rotary 32 base 10": -1.0, "rotary 4 base 10": 1.0}
LONG_GAP = {"long 128: 32": 1.0, "long 128: 4": -1.0}
LONG_FEW = {"long 128: 32": 1.0, "long 128: 4 low rank": -1.0}
LONG_SMALL = {"long 128: 4 low rank": 1.0, "long 128: 4": -1.0}
LONG_REPAIR = {"long 128: 32": 1.0, "long 128: 32 wide": -1.0}
ROTARY_GIVEN = ROTARY_GAP | {"rotary 32 given": -1.0, "rotary 4 given": 1.0}
GIVEN_FEW = FEW | {"32 given": -1.0, "4 low rank given": 1.0}
PARTS = (  # rules that something explains a gap: claim, gap, what closes a part of it
    ("Rank explains the lateness", GAP, {"32": 1.0, "32 rank": -1.0}),
    ("The split of values explains the lateness", GAP, FEW),
    ("The split of values explains the lateness at width 256", WIDE_GAP, WIDE_FEW),
    ("Teaching explains the split", FEW, {"4 low rank taught by 4": 1.0, "4 low rank": -1.0}),
    ("Teaching until step 400 repairs the split", FEW, TAUGHT),
    ("The start explains the split", FEW, {"32": 1.0, "32 alike": -1.0}),
    ("The split costs before step 300", FEW, {"32": 1.0, "32 tied until 300": -1.0}),
    ("The split costs before step 500", FEW, {"32": 1.0, "32 tied until 500": -1.0}),
    ("The split costs before step 700", FEW, {"32": 1.0, "32 tied until 700": -1.0}),
    ("The previous token's pattern explains the lateness", GAP, GIVEN),
    ("The previous token's pattern explains the split", FEW, GIVEN_FEW),
    ("The same with rotary positions", ROTARY_GAP, ROTARY_GIVEN),
    ("The pattern until step 300 explains the lateness", GAP, GIVEN_FIRST),
    ("A weaker pattern explains the lateness too", GAP, GIVEN_WEAKLY),
    ("The sham explains the lateness", GAP, GIVEN_ITSELF),
    ("Small queries and keys explain the lateness with rotary positions", ROTARY_GAP, ROTARY_SMALL),
    ("The split of values explains the lateness with rotary positions", ROTARY_GAP, ROTARY_FEW),
    ("Large queries and keys repair narrow heads with rotary positions", ROTARY_GAP, ROTARY_REPAIR),
    ("The split explains it in this order too", ROTARY_GAP, ROTARY_MANY),
    ("It is the queries and keys, not the parameters", ROTARY_REPAIR, ROTARY_QUERIES),
    ("Small queries and keys explain what stays after 4,000 steps, rotary", LONG_GAP, LONG_SMALL),
    ("The split of values explains what stays after 4,000 steps, rotary", LONG_GAP, LONG_FEW),
    ("Few rotary frequencies explain the lateness", ROTARY_GAP, FREQUENCIES),
    ("Few rotary frequencies explain the repair, in this order too", ROTARY_REPAIR, WIDE_FREQUENCIES),
    ("A base of 10 repairs narrow heads with rotary positions", ROTARY_GAP, BASE),
    ("A base of 10 closes the gap", ROTARY_GAP, BASE_GAP),
    ("Large queries and keys repair what stays after 4,000 steps, rotary", LONG_GAP, LONG_REPAIR),
    ("It is the previous token's pattern", {"32": 1.0, "32 given": -1.0}, SHAM),
    ("It is the previous token's pattern, weakly", {"32": 1.0, "32 given weakly": -1.0}, WEAK_SHAM),
    ("The weak sham explains the lateness", GAP, WEAK_ITSELF),
    ("It is the previous token, not any near one", {"32": 1.0, "32 given weakly": -1.0}, TWO_BACK),
    ("The token two back explains the lateness", GAP, GIVEN_TWO_BACK),
    ("The start explains the split of large queries and keys", WIDE, {"32 wide": 1.0, "32 wide alike": -1.0}),
)
UNSTEADY = ("rotary 32 given", "32 given two back")  # at the rate that the tuning seed chose
STEADY_PARTS = (  # with the rate chosen over five seeds for these
    ("The same with rotary positions, the rate chosen over five seeds", ROTARY_GAP, ROTARY_GIVEN),
    ("It is the previous token, the same", {"32": 1.0, "32 given weakly": -1.0}, TWO_BACK),
    ("The token two back explains the lateness, the same", GAP, GIVEN_TWO_BACK),
)
PLANNED = {  # arms of the plan's first rules, whose residuals the pooled estimates share; a later arm adds its own
    *("1", "1 fast", "4", "4 fast", "16", "16 fast", "32", "32 fast", "32 start", "32 half", "32 double"),
    *("rotary 1", "rotary 32", "rotary 32 fast", "256: 4", "256: 4 fast", "256: 32", "256: 32 fast"),
}
EARLY = 3.5  # nats: a level that teaching reaches before it can harm
LEVEL = 3.3  # nats of training loss at which the delay is read


def losses_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the scored loss by arm and seed, of the runs at each arm's best rate."""
    result: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["seed"] in SEEDS and row["lr"] == best_rate(row["arm"], list(rows)):
            result.setdefault(row["arm"], {})[row["seed"]] = row["loss"]
    return result


def over_seeds(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[int, float]:
    """Return an arm's scored loss by seed at the rate with the lowest mean tuning loss over SEEDS, if all have it."""
    of_arm = [row for row in rows if row["arm"] == arm and row["seed"] in SEEDS]
    rates = [[row for row in of_arm if row["lr"] == lr] for lr in {row["lr"] for row in of_arm}]
    complete = [some for some in rates if len(some) == len(SEEDS)]
    best = min(complete, key=lambda some: np.mean([row["tuning_loss"] for row in some]), default=[])
    return {row["seed"]: row["loss"] for row in best}


def paired(losses: Losses, weights: Weights) -> Difference | None:
    """Return the mean over seeds of a weighted sum of arms; None with fewer than two seeds that all arms have."""
    seeds = sorted(set.intersection(*(set(losses.get(arm, {})) for arm in weights)))
    if len(seeds) < 2:
        return None
    values = np.array([sum(w * losses[arm][seed] for arm, w in weights.items()) for seed in seeds])
    return statistics.paired(values, np.zeros(len(values)))


def pooled(losses: Losses, weights: Weights, arms: Sequence[str]) -> Difference | None:
    """Return the same contrast with the residual of a two-way table (arm + seed) of all `arms`."""
    arms = [arm for arm in arms if set(losses.get(arm, {})) == set(SEEDS)]
    if not set(weights) <= set(arms) or len(arms) < 2:
        return None
    table = np.array([[losses[arm][seed] for seed in SEEDS] for arm in arms])
    residual = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    freedom = (len(arms) - 1) * (len(SEEDS) - 1)
    seed_std = float(np.sqrt((residual**2).sum() / freedom * sum(w**2 for w in weights.values())))
    value = float(sum(w * table[arms.index(arm)].mean() for arm, w in weights.items()))
    return Difference("pooled", value, seed_std / math.sqrt(len(SEEDS)), freedom, len(SEEDS), seed_std)


def share(losses: Losses, part: Weights, whole: Weights) -> Estimate | None:
    """Return the ratio of two paired contrasts in percent, with Fieller's interval; infinite if the whole may be 0."""
    seeds = sorted(set.intersection(*(set(losses.get(arm, {})) for arm in {**part, **whole})))
    if len(seeds) < 2:
        return None
    x, y = (np.array([sum(w * losses[a][s] for a, w in weights.items()) for s in seeds]) for weights in (part, whole))
    (xx, xy), (_, yy) = np.cov(x, y) / len(seeds)
    t = float(stats.t.ppf(0.975, len(seeds) - 1)) ** 2
    # The values r at which the mean of x - r y is within t standard errors of 0.
    a, b, c = y.mean() ** 2 - t * yy, x.mean() * y.mean() - t * xy, x.mean() ** 2 - t * xx
    low, high = np.sort(np.roots([a, -2 * b, c])) if a > 0 else (-np.inf, np.inf)
    return Estimate(*(100 * float(ratio) for ratio in (x.mean() / y.mean(), low, high)))


def arrivals(rows: Sequence[Mapping[str, Any]], level: float = LEVEL) -> dict[str, dict[int, float]]:
    """Return the step at which the training loss passes a level, by arm and seed, of runs at best rates that do."""
    result: dict[str, dict[int, float]] = {}
    for row in rows:
        step = step_of(row["curve"], level)
        if row["seed"] in SEEDS and row["lr"] == best_rate(row["arm"], list(rows)) and np.isfinite(step):
            result.setdefault(row["arm"], {})[row["seed"]] = step
    return result


def delay(rows: Sequence[Mapping[str, Any]], slow: str, fast: str, level: float = LEVEL) -> Difference | None:
    """Return how many steps later an arm reaches a training loss than another, paired by seed."""
    return paired(arrivals(rows, level), {slow: 1.0, fast: -1.0})


def step_of(curve: Sequence[float], level: float) -> float:
    """Return the first step at which the interpolated training loss is at most `level`; infinity if it never is.

    A mean of WINDOW steps stands at their middle.
    """
    middles = WINDOW * (np.arange(len(curve)) + 0.5)
    below = np.flatnonzero(np.array(curve) <= level)
    if not len(below):
        return float("inf")
    i = int(below[0])
    if i == 0:
        return float(middles[0])
    share = (curve[i - 1] - level) / (curve[i - 1] - curve[i])
    return float(middles[i - 1] + share * WINDOW)


def estimators(losses: Losses, arms: Sequence[str]) -> list[Callable[[Weights], Difference | None]]:
    """Return the functions from weights of arms to the paired and to the pooled estimate."""
    return [lambda weights: paired(losses, weights), lambda weights: pooled(losses, weights, arms)]


def agreed(verdicts: Sequence[str]) -> str:
    """Return the verdict that both estimates give."""
    return verdicts[0] if len(set(verdicts)) == 1 else "undecided: the two estimates disagree"


def within(difference: Difference, margin: float) -> bool:
    """Return whether the 90 % interval lies inside the margin."""
    interval = difference.interval(0.9)
    return interval.low >= -margin and interval.high <= margin


def beyond(difference: Difference, margin: float) -> bool:
    """Return whether the 95 % interval excludes 0 and the 90 % interval lies outside the margin."""
    interval = difference.interval(0.9)
    return not difference.interval().contains(0) and (interval.low > margin or interval.high < -margin)


def judge(estimates: Sequence[Difference | None], holds: Callable[..., bool], refuted: Callable[..., bool]) -> str:
    """Return the verdict on which both estimates agree."""
    if any(estimate is None for estimate in estimates):
        return "not run"
    return agreed(["holds" if holds(e) else "refuted" if refuted(e) else "undecided" for e in estimates])


def explains(
    losses: Losses, name: str, gap: Weights, fall: Weights, beyond: Weights | None, arms: Sequence[str]
) -> list[str]:
    """Return the lines of a rule that something explains a gap: it takes at least half of it, and more than a control.

    Args:
        losses: scored losses.
        name: the claim.
        gap: weights of the arms whose sum is the gap.
        fall: those of what the gap falls by.
        beyond: the same minus the control's gain; None without a control.
        arms: arms of the pooled estimate.
    """
    verdicts, lines = [], []
    for estimate in estimators(losses, arms):
        whole, part, more = estimate(gap), estimate(fall), estimate(beyond or fall)
        if whole is None or part is None or more is None:
            return [f"{name}: not run"]
        holds = part.value >= whole.value / 2 and part.interval().low > 0 and more.interval().low > 0
        verdicts.append("holds" if holds else "refuted" if part.interval().high < whole.value / 2 else "undecided")
        found = {"gap": whole, "fall": part} | ({"fall minus the control's gain": more} if beyond else {})
        lines.append(f"  {part.method}: " + ", ".join(f"{what} {Estimate.of(x):+.3f}" for what, x in found.items()))
    if ratio := share(losses, fall, gap):
        lines.append(f"  share of the gap, paired: {ratio:.0f %}")
    return [f"{name}: {agreed(verdicts)}", *lines]


def factor_rule(losses: Losses, prefix: str, control: str | None, arms: Sequence[str]) -> list[str]:
    """Return the lines of the rule that the factor explains the lateness, at one width."""
    usual = {f"{prefix}32": 1.0, f"{prefix}4": -1.0}
    fall = usual | {f"{name} fast": -w for name, w in usual.items()}
    more = fall | {control: -1.0, f"{control} fast": 1.0} if control else None
    return explains(losses, f"The factor explains the lateness{prefix and ' at width 256'}", usual, fall, more, arms)


def control_rule(losses: Losses, claim: str, control: str, limit: Weights, arms: Sequence[str]) -> list[str]:
    """Return the lines of the rule that teaching at first gains more in 32 heads than in `control`.

    It is refuted if the difference is below half of the contrast `limit`.
    """
    estimates = [estimate(beyond_control(control)) for estimate in estimators(losses, arms)]
    whole = paired(losses, limit)
    half = whole.value / 2 if whole else 0.0
    verdict = judge(estimates, lambda e: e.interval().low > 0, lambda e: e.interval().high < half)
    lines = [f"{claim}: {verdict}"]
    return lines + [f"  {e.method}, its gain minus that of {control}: {Estimate.of(e):+.3f}" for e in estimates if e]


def beyond_control(control: str) -> dict[str, float]:
    """Return the weights of what teaching at first gains in 32 heads, minus what it gains in `control`."""
    return TAUGHT | {control: -1.0, f"{control} taught at first": 1.0}


def sum_rule(losses: Losses, arms: Sequence[str]) -> list[str]:
    """Return the lines of the rule that the split of values and the size of queries and keys add up, at width 128."""
    estimates = [estimate(INTERACTION) for estimate in estimators(losses, arms)]
    verdict = judge(estimates, lambda e: within(e, MARGIN), lambda e: beyond(e, MARGIN))
    lines = [f"The split and the size of queries and keys add up: {verdict}"]
    lines += [f"  {e.method}, interaction: {Estimate.of(e):+.3f}" for e in estimates if e]
    if ratio := share(losses, SPLIT, GAP):
        lines.append(f"  share of the split in the gap, paired: {ratio:.0f %}")
    return lines


def rate_rule(losses: Losses, arms: Sequence[str]) -> list[str]:
    """Return the lines of the rule that a larger learning rate of queries and keys does what the factor does."""
    contrasts = {"32": 1.0, "32 rate": -1.0}, {"32 rate": 1.0, "32 fast": -1.0}
    less = {"32": 0.5, "32 fast": 0.5, "32 rate": -1.0}  # its gain minus half of the factor's
    name, verdicts, lines = "A larger rate of queries and keys does what the factor does", [], []
    for estimate in estimators(losses, arms):
        gain, rest, lack = map(estimate, (*contrasts, less))
        if gain is None or rest is None or lack is None:
            return [f"{name}: not run"]
        holds = gain.interval().low > 0 and within(rest, MARGIN)
        verdicts.append("holds" if holds else "refuted" if lack.interval().high < 0 else "undecided")
        lines.append(f"  {gain.method}: gain {Estimate.of(gain):+.3f}, behind the factor {Estimate.of(rest):+.3f}")
    return [f"{name}: {agreed(verdicts)}", *lines]


def long_rule(losses: Losses, width: int, many: int) -> list[str]:
    """Return the lines of the rule on 4,000 steps with rotary positions, at one width, without and with the factor."""
    arms, lines = [name for name in losses if name.startswith(f"long {width}: ")], []
    for end in ("", " fast"):
        doublings = math.log2(many / 4)
        weights = {f"long {width}: {many}{end}": 1 / doublings, f"long {width}: 4{end}": -1 / doublings}
        estimates = [estimate(weights) for estimate in estimators(losses, arms)]
        verdict = judge(estimates, lambda e: within(e, DOUBLING), lambda e: beyond(e, DOUBLING))
        lines.append(
            f"{many} heads are equivalent to 4, rotary, 4,000 steps, width {width}{end and ', √w/d'}: {verdict}"
        )
        lines += [f"  {e.method}, per doubling: {Estimate.of(e):+.4f}" for e in estimates if e]
    return lines


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdicts of the rules, and the delays, as text."""
    losses = losses_of(rows)
    planned = [name for name in losses if name in PLANNED]
    rotary, wide = ([name for name in planned if name.startswith(start)] for start in ("rotary", "256"))
    learned = [name for name in planned if name not in (*rotary, *wide)]
    long = [name for name in losses if name.startswith("long 128") and not name.endswith(("low rank", "wide"))]
    kinds = {"256: 32": wide, "rotary 32": rotary, "long 128: 32": long}
    lines = [f"Five rules, not corrected. Nats per token of the scored chapters. {len(rows)} rows.", ""]
    lines += factor_rule(losses, "", "1", learned)

    def two(arms: Sequence[str], weights: Weights) -> list[Difference | None]:
        return [estimate(weights) for estimate in estimators(losses, arms)]

    for title, arms, weights in (
        ("It is growth, not the start", learned, {"32 start": 1.0, "32 fast": -1.0}),
        ("It holds with rotary positions", rotary, {"rotary 32": 1.0, "rotary 32 fast": -1.0}),
    ):
        estimates = two(arms, weights)
        lines.append(f"{title}: {judge(estimates, lambda e: e.interval().low > 0, lambda e: within(e, MARGIN))}")
        lines += [f"  {e.method}: {Estimate.of(e):+.3f}" for e in estimates if e]
    sides = [two(learned, {name: 1.0, "32 fast": -1.0}) for name in ("32 half", "32 double")]
    verdicts = [judge(s, lambda e: e.interval(0.9).high <= MARGIN, lambda e: e.interval().low > MARGIN) for s in sides]
    delicate = next((word for word in ("not run", "refuted", "undecided") if any(word in v for v in verdicts)), "holds")
    lines.append(f"The factor is not delicate: {delicate}")
    lines += [f"  {name}: {Estimate.of(s[0]):+.3f}" for name, s in zip(("half", "double"), sides, strict=True) if s[0]]
    lines += factor_rule(losses, "256: ", None, wide)
    lines += ["", "Planned after the rows of width 128:", *rate_rule(losses, [*learned, "32 rate"])]
    for source, parts in ((losses, PARTS), (losses | {arm: over_seeds(rows, arm) for arm in UNSTEADY}, STEADY_PARTS)):
        for claim, gap, fall in parts:
            arms = next((arms for name, arms in kinds.items() if name in gap), learned)
            lines += explains(source, claim, gap, fall, None, [*arms, *({*gap, *fall} - PLANNED)])
    for claim, control, limit in (("narrow heads", "4", TAUGHT), ("split values", "4 low rank", FEW)):
        arms = [*learned, *(beyond_control(control).keys() - PLANNED)]
        lines += control_rule(losses, f"Teaching is for {claim}", control, limit, arms)
    lines += sum_rule(losses, [*learned, "4 low rank", "32 wide"])
    if ratio := share(losses, ROTARY_SPLIT, ROTARY_GAP):
        lines.append(f"Share of the split in the gap with rotary positions, mean of both orders: {ratio:.0f %}")
    lines += ["", f"Share of the split in the delay to {LEVEL} nats, of 32 heads behind 4:"]
    if ratio := share(arrivals(rows), SPLIT, GAP):
        lines.append(f"  {ratio:.0f %}")
    for name in ("32 taught by 32", "32 taught at first"):
        if early := delay(rows, "32", name, EARLY):
            lines.append(f"Steps to {EARLY} nats, 32 heads after {name}: {Estimate.of(early):+.0f}")
    lines += ["", "E7:", *long_rule(losses, 64, 16), *long_rule(losses, 128, 32)]
    lines += ["", f"Steps at which the training loss passes {LEVEL} nats, later than one head:"]
    for name in ("32", "32 fast", "32 start", "32 rank", "4 low rank", "32 wide", "4"):
        if late := delay(rows, name, "1"):
            lines.append(f"  {name}: {Estimate.of(late):+.0f}")
    lines += ["", "arm, rate, mean of the seeds that are there:"]
    for name, of in losses.items():
        lines.append(f"  {name}: {best_rate(name, list(rows)):g}, {np.mean([*of.values()]):.4f} ({len(of)})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    print(report(language.read_rows(parser.parse_args().rows)))


if __name__ == "__main__":
    main()
