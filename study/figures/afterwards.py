"""Figures on readings after the fact."""

from collections.abc import Mapping
from typing import Any

from leanformer.analysis import statistics
from study.figures.passages import RESULTS, WORDS, Passage
from study.heads import afterwards, language, verdicts
from study.tables import Estimate


ADDED = {  # rows of the table of added heads
    "a third more": "lean, MLP kept",
    "a third more, half the MLP": "lean, MLP halved",
    "twice, equal parameters": "lean, fixed width",
}


def values() -> Mapping[str, Any]:
    """Return the estimates of `study.heads.afterwards`, by name; lists are in the order of its LEVELS."""
    steps = {level: afterwards.arrivals(level) for level in afterwards.LEVELS}
    late = {n: [Estimate.of(statistics.paired(x[n], x[1])) for x in steps.values()] for n in (16, 32)}
    rows = language.read_rows()
    short, long = (verdicts.read_values(rows, block, "loss") for block in "AD")
    planned = statistics.paired(long[32], long[4])
    one, many = (afterwards.tuning_runs("D", n) for n in (1, 32))
    fit = {n: afterwards.tuning_runs("J", n, "train_loss") for n in (4, 32)}
    best = {n: min(afterwards.tuning_runs("J", n).items(), key=lambda item: item[1])[0] for n in fit}
    changes, per_doubling = afterwards.surface_steps(), afterwards.per_doubling()
    return {
        "late": late,
        "arrive": [x[1].mean() for x in steps.values()],
        "plateau": afterwards.plateau(),
        "at_1000": afterwards.behind_pooled(1000),
        "short": Estimate.of(statistics.paired(short[32], short[1])),
        "margin": {f"{b}{few}_{many}": x for (b, few, many), (x, _) in per_doubling.items()},
        "equivalent": "equivalent" if all(inside for _, inside in per_doubling.values()) else "not equivalent",
        "planned": Estimate.of(planned),
        "planned_p": planned.p_differs(),
        "signs": [many[rate] - one[rate] for rate in (2e-3, 4e-3, 8e-3)],
        "added": {name: afterwards.added_heads((name,)) for name in ADDED.values()},
        "added_all": (added := afterwards.added_heads()),
        "about": -added.value,
        "causes": (found := afterwards.over_interventions()),
        "better": WORDS[found["better"]].capitalize(),
        "worse": WORDS[found["worse"]],
        "neither": WORDS[found["count"] - found["better"] - found["worse"]],
        "surface": [afterwards.surface_by_jackknife(budget) for budget in (120e3, 270e3)],
        "gain": sum(x < 0 for x in changes),
        "steps": len(changes),
        "ahead": fit[4][best[4]] - fit[32][best[32]],
    }


PASSAGES = [
    Passage(
        values,
        {
            RESULTS: [
                *(
                    f"| {level:.1f} nats | {{arrive[{i}]:,.0f}} | {{late[16][{i}]:.0f}} | {{late[32][{i}]:.0f}} |"
                    for i, level in enumerate(afterwards.LEVELS)
                ),
                "the most heads are {equivalent} to the fewest at widths 64 and 128",
                "32 heads minus one is {at_1000:+.3f} at step",
                "all are at {plateau[0]:.2f} to {plateau[1]:.2f} nats",
                "{planned:+.3f}, p = {planned_p:.4f} | {margin[D4_32]:+.4f} |",
                "32 minus one | {short:+.3f} |",
                "| {margin[D1_32]:+.4f} |",
                "| {margin[I1_16]:+.4f} |",
                "with the rate: {signs[0]:+.3f}, {signs[1]:+.3f} and {signs[2]:+.3f} at",
                "| heads, at the same total width | {surface[0]:+.1f %} | {surface[1]:+.1f %} |",
                "All {steps} direct steps",
                *(f"| {{added[{arm}]:+.1f}} |" for arm in ADDED.values()),
                "| all nine comparisons | {added_all:+.1f} |",
                "{better} of the ten gain; the rank correlation of fall and gain is {causes[correlation]:.2f} "
                "({causes[low]:.2f} to {causes[high]:.2f})",
                "| the same, over interventions | {causes[one]:+.1f} |",
            ],
        },
    ),
]
