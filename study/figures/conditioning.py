"""Figures on condition numbers, and on whether κ is the cause of what heads gain."""

from collections.abc import Mapping
from typing import Any

from leanformer import conditioning
from study.figures.passages import RESULTS, Passage
from study.heads import causes, heads, language
from study.tables import Estimate, round_to


def heads_values() -> Mapping[str, Any]:
    """Return values of the trained ViTs with 2 to 16 heads."""
    dim, total = (heads.compare("heads")[trade] for trade in ("fixed head dimension", "fixed total width"))
    return {
        "dim": {n: round_to(kappa, 2 if n == 2 else 3) for n, kappa in dim["kappa"].items()},
        "total": {n: round_to(kappa, 2 if n == 2 else 3) for n, kappa in total["kappa"].items()},
        "falls": [x["kappa"][2] / x["kappa"][16] for x in (dim, total)],
        "gain": [x["gain"] for x in (dim, total)],
        "gaussian": {n: conditioning.gaussian(heads.TOKENS, n * heads.HEAD_DIM).median for n in (2, 16)},
        "gaussian_total": conditioning.gaussian(heads.TOKENS, heads.WIDTH).median,
    }


def causes_values() -> Mapping[str, Any]:
    """Return changes of top-1 and log10 κ by heads and interventions in the study, slopes, and the verdict.

    Slopes are points of top-1 per tenfold fall of κ.
    """
    rows = language.read_rows(causes.ROWS)
    effects = causes.compare(rows)
    slopes = causes.find_slopes(effects)
    assert slopes is not None
    found = {name: Estimate.of(getattr(slopes, name)) for name in slopes._fields}
    return {
        "score": {name: Estimate.of(effect.response) for name, effect in effects.items()},
        "kappa": {name: Estimate.of(effect.dose) for name, effect in effects.items()},
        "rest": -causes.without_each(effects)["spectral 2"],
        "gaining": -causes.fit_slope(effects, causes.exclude(*causes.HARMFUL)).mean(),
        "slope": {name: Estimate(-e.value, -e.high, -e.low) for name, e in found.items()},
        "runs": len(rows),
        "verdict": causes.decide(slopes),
    }


PASSAGES = [
    Passage(
        heads_values,
        {
            RESULTS: [
                "| fixed head dimension | {dim[2]:,.0f} to {dim[16]:,.0f} | {gaussian[2]:.1f} to {gaussian[16]:.1f} | "
                "{gain[0]:+.1f} |",
                "| fixed total width | {total[2]:,.0f} to {total[16]:,.0f} | {gaussian_total:.1f} | {gain[1]:+.1f} |",
            ],
        },
    ),
    Passage(
        causes_values,
        {
            RESULTS: [
                "that κ alone is the cause is {verdict}, in this model",
                "| more heads | {slope[heads]:+.2f} |",
                "| ten interventions, over seeds | {slope[interventions]:+.2f} |",
                "| the rule: interventions minus half of heads | {slope[beyond]:+.2f} |",
                "{runs} runs, ten seeds",
                "the slope is {gaining:.2f}: a share",
            ],
        },
    ),
]
