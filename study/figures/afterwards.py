"""Figures on readings after the fact, in results."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from study.figures.passages import RESULTS, Passage
from study.heads import afterwards, language, verdicts, vision
from study.tables import Estimate


NAMES = {"lean, MLP kept": "kept", "lean, MLP halved": "halved", "lean, fixed width": "fixed"}


def values() -> Mapping[str, Any]:
    """Return the estimates of `study.heads.afterwards`, by name."""
    steps = {level: afterwards.arrivals(level) for level in afterwards.LEVELS}
    late = {
        n: {f"{level:.1f}".replace(".", "_"): Estimate.of(statistics.paired(x[n], x[1])) for level, x in steps.items()}
        for n in (16, 32)
    }
    short = verdicts.read_values(language.read_rows(), "A", "loss")
    margin = {f"{b}{few}_{many}": change for (b, few, many), (change, _) in afterwards.per_doubling().items()}
    pooled = afterwards.pooled_doublings("A")
    one, many = (afterwards.tuning_runs("D", n) for n in (1, 32))
    single = {n: afterwards.tuning_runs("J", n, "train_loss") for n in (4, 32)}
    best = {n: min(afterwards.tuning_runs("J", n).items(), key=lambda item: item[1])[0] for n in single}
    bias, changes = afterwards.tuning_bias(), afterwards.surface_steps()
    rows = language.read_rows(vision.ROWS)
    tuned = [
        language.rows_of(rows, vision.make_arm("original", 48, epochs), language.TUNING_SEED) for epochs in (5, 15)
    ]
    return {
        "late": late,
        "arrive": {f"{level:.1f}".replace(".", "_"): x[1].mean() for level, x in steps.items()},
        "plateau": afterwards.plateau(),
        "pooled": {n: Estimate.of(d) for (_, n), (d, _) in pooled.items()},
        "pooled_p": {n: p for (_, n), (_, p) in pooled.items()},
        "at_1000": afterwards.behind_pooled(1000),
        "short": Estimate.of(statistics.paired(short[32], short[1])),
        "margin": margin,
        "planned": Estimate.of(planned := _planned()),
        "planned_p": planned.p_differs(),
        "signs": [many[rate] - one[rate] for rate in (2e-3, 4e-3, 8e-3)],
        "overfit": afterwards.over_training(),
        "added": {short: afterwards.added_heads((name,)) for name, short in NAMES.items()},
        "added_all": (added := afterwards.added_heads()),
        "about": -added.value,
        "causes": (found := afterwards.over_interventions()),
        "better": WORDS[found["better"]].capitalize(),
        "worse": WORDS[found["count"] - found["better"]],
        "surface": [afterwards.surface_by_jackknife(budget) for budget in (120e3, 270e3)],
        "gain": sum(x < 0 for x in changes),
        "steps": len(changes),
        "least": -max(changes),
        "most": -min(changes),
        "single": {n: single[n][best[n]] for n in single},
        "ahead": single[4][best[4]] - single[32][best[32]],
        "bias": -float(np.mean(bias)),
        "below": sum(x < 0 for x in bias),
        "arms": len(bias),
        "stuck": [afterwards.tuning_runs("A", n)[8e-3] for n in (16, 32)],
        "ties": [100 * min(row["error"] for row in group) for group in tuned],
        "sampling": 100 * math.sqrt(0.13 * 0.87 / 10_000),
        "share": 100 * math.sqrt(0.87 / 0.13 / 10_000),
    }


def _planned() -> statistics.Difference:
    loss = verdicts.read_values(language.read_rows(), "D", "loss")
    return statistics.paired(loss[32], loss[4])


WORDS = ("none", "one", "two", "three", "four", "five", "six")
PASSAGES = [
    Passage(
        values,
        {
            RESULTS: [
                "training loss of {plateau[0]:.2f} to {plateau[1]:.2f} at step 400",
                "at the rate 0.008: {stuck[0]:.2f}, {stuck[1]:.2f})",
                "3.5, 3.0 and 2.6 nats at steps {arrive[3_5]:.0f}, {arrive[3_0]:.0f} and {arrive[2_6]:,.0f}; 16 heads "
                "later by {late[16][3_5]:.0f}, {late[16][3_0]:.0f} and {late[16][2_6]:.0f} steps, 32 heads by "
                "{late[32][3_5]:.0f}, {late[32][3_0]:.0f} and {late[32][2_6]:.0f}.",
                "{at_1000.value:+.3f} ({at_1000.low:.3f} to {at_1000.high:.3f}, with the error pooled over arms)",
                "shows {short:+.3f} on held-out text",
                "32 to 16 {pooled[8]:+.3f}, 16 to 8 {pooled[16]:+.3f}, 8 to 4 {pooled[32]:+.3f}, p = "
                "{pooled_p[8]:.3f}, {pooled_p[16]:.3f}, {pooled_p[32]:.3f}",
                "4 to 32 heads {margin[D4_32]:+.4f} per doubling, one to 32 {margin[D1_32]:+.4f}, and at width 64 one "
                "to 16 {margin[I1_16]:+.4f}",
                "are at {signs[0]:+.3f}, {signs[1]:+.3f} and {signs[2]:+.3f} at the rates",
                "grows from {overfit[4]:.2f} nats with 4 heads to {overfit[32]:.2f} with 32",
                "{single[32]:.3f} against {single[4]:.3f}",
                "in {below} of {arms} arms, by {bias:.3f} nats",
                "{causes[one]:.1f} by the jackknife over ten interventions and {causes[family]:.1f} over five",
                "{better} of the ten gain; the rank",
                "is {causes[correlation]:.2f} ({causes[low]:.2f} to {causes[high]:.2f}, p = {causes[p]:.2f})",
                "{surface[0]:+.1f %} and {surface[1]:+.1f %}, the first wider",
                "of {steps} steps between shapes of one budget with the same depth and total width all gain, by "
                "{least:.1f} to {most:.1f} %",
                "({ties[0]:.2f} % at 0.002 and 0.004 after 5 epochs, {ties[1]:.2f} % after 15)",
                "a test error of 13 % has a standard deviation of {sampling:.2f} points, {share:.1f} % of the error",
                "by {added[kept]:+.1f %} with the MLP kept, by {added[halved]:+.1f %} with the MLP halved, by "
                "{added[fixed]:+.1f %} as twice",
                "by {added_all:+.1f %} over all nine",
            ],
        },
    ),
]
