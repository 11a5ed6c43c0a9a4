"""Figures on condition numbers, and on whether conditioning mediates the effect of heads."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from leanformer import conditioning
from study.figures.passages import RESULTS, Passage
from study.heads import causes, heads, language, mediation, peak
from study.tables import EVIDENCE, Estimate, round_to


TRAINED = 100  # steps after which part 4 of the study measures κ again
LEVERS = {
    "graying": "token graying",
    "lambda": "λI added to the matrices of queries, keys and values",
    "sigma": "σReparam",
    "svd": "initialisation by shifted singular values",
    "qk_norm": "QK-norm",
}


def heads_values() -> Mapping[str, Any]:
    """Return values of the trained ViTs with 2 to 16 heads."""
    dim, total = (heads.compare("heads")[trade] for trade in ("fixed head dimension", "fixed total width"))
    shapes = {2: heads.HEAD_DIM, 16: heads.HEAD_DIM}
    return {
        "dim": {n: round_to(kappa, 2 if n == 2 else 3) for n, kappa in dim["kappa"].items()},
        "total": {n: round_to(kappa, 2 if n == 2 else 3) for n, kappa in total["kappa"].items()},
        "falls": [x["kappa"][2] / x["kappa"][16] for x in (dim, total)],
        "gain": [x["gain"] for x in (dim, total)],
        "error": [x["error"] for x in (dim, total)],
        "gaussian": {n: conditioning.gaussian(heads.TOKENS, n * h).median for n, h in shapes.items()},
        "gaussian_total": conditioning.gaussian(heads.TOKENS, heads.WIDTH).median,
    }


def peak_values() -> Mapping[str, Any]:
    """Return log10 κ by number of heads, before training, trained and Gaussian, and the differences to 3 heads."""
    rows = peak.read_rows()

    def by_heads(steps: int, heads: Sequence[int]) -> dict[int, list[float]]:
        chosen = [row for row in rows if row["steps"] == steps]
        return {n: [row["log10_condition"] for row in chosen if row["num_heads"] == n] for n in heads}

    kappa, trained = by_heads(0, (2, 3, 4, 8, 16)), by_heads(TRAINED, (2, 3, 4))
    differences, after = (peak.compare(rows, steps) for steps in (0, TRAINED))
    gaussian = {n: math.log10(conditioning.gaussian(peak.TOKENS, n * peak.HEAD_DIM).median) for n in kappa}
    return {
        "kappa": {n: sum(values) / len(values) for n, values in kappa.items()},
        "gaussian": gaussian,
        "gaussian_above": {n: gaussian[3] - gaussian[n] for n in (2, 4)},
        "above": {other: Estimate.of(difference) for (_, other), difference in differences.items()},
        "trained": {n: sum(values) / len(values) for n, values in trained.items()},
        "trained_above": {other: Estimate.of(difference) for (_, other), difference in after.items()},
        "trained_exists": peak.decide(after),
        "images": peak.IMAGES,
        "exists": "the peak exists" if peak.decide(differences) == "holds" else "the peak is not shown",
    }


def mediation_values() -> Mapping[str, Any]:
    """Return values of the mediation study."""
    records = mediation.read_table(EVIDENCE / "mediation.csv")
    by_rule = mediation.judge(records, mediation.TESTED)
    one_rate = mediation.judge(records, mediation.TESTED, mediation.select_at_one_rate)
    first_five = mediation.judge(mediation.restrict(records, 5), mediation.TESTED)
    differences = {name: Estimate.of(d) for name, d in by_rule.effects.items()}
    moved = differences["heads, log10 κ"].value
    rates = {rate: Estimate.of(d) for rate, d in mediation.gains_by_rate(records).items()}
    many: dict[float, list[float]] = {}  # heads: top-1 by learning rate
    for run in records["base, many"]["runs"]:
        many.setdefault(run["rate"], []).append(100 * run["top1"])
    single = [gain.value for rate, gain in rates.items() if rate != "mean"]
    return {
        "score": {name.removesuffix(", score"): d for name, d in differences.items()},
        "kappa": {name.removesuffix(", log10 κ"): d for name, d in differences.items()},
        "share": {
            name.partition(" beside base")[0].removesuffix(", log10 κ"): 100 * d.value / moved
            for name, d in differences.items()
            if name.endswith("log10 κ") and "equal" not in name
        },
        "factor": round_to(10**-moved, 1),
        "one_rate": Estimate.of(one_rate.effects["heads, score"]),
        "five": Estimate.of(first_five.effects["heads, score"]),
        "five_word": first_five.word,
        "mlp": differences["MLP of equal parameters, score"],
        "under_sigma": differences["heads under sigma, score"],
        "under_qk_norm": differences["heads under qk_norm, score"],
        "two_rates": sorted(map(statistics.fmean, many.values()), reverse=True)[:2],
        "chosen": mediation.make_condition(records["base, many"]).score.mean(),
        "rates": [min(single), max(single)],
        "mean": rates["mean"],
    }


BROKEN = "spectral 2"  # the condition that harms training most
NAMES = {  # of the conditions of the study's part 3
    "4 heads": "4 heads",
    "8 heads": "8 heads",
    "graying 0.75": "token graying, power 0.75",
    "graying 0.5": "token graying, power 0.5",
    "graying 0.25": "token graying, power 0.25",
    "spectral 0.5": "λI added, λ = 0.5",
    "spectral 1": "λI added, λ = 1",
    "spectral 2": "λI added, λ = 2",
    "sigma, attention": "σReparam, attention only",
    "sigma, all layers": "σReparam, all layers",
    "QK-norm": "QK-norm",
    "orthogonal Q and K": "orthogonal queries and keys",
}


def causes_values() -> Mapping[str, Any]:
    """Return changes of top-1 and log10 κ by heads and interventions in the study, slopes, and verdicts.

    Slopes are points of top-1 per tenfold fall of κ. `low` is of the two lower learning rates, where no median is a
    bound.
    """

    def per_tenfold(slopes: causes.Slopes | None) -> dict[str, Estimate]:
        assert slopes is not None
        found = {name: Estimate.of(getattr(slopes, name)) for name in slopes._fields}
        return {name: Estimate(-e.value, -e.high, -e.low) for name, e in found.items()}

    rows, low_rates = language.read_rows(causes.ROWS), causes.RATES[:2]
    effects = causes.compare(rows)
    slopes, low = (causes.find_slopes(e) for e in (effects, causes.compare(rows, low_rates)))
    without = causes.without_each(effects)
    others = sorted(value for name, value in without.items() if name != BROKEN)
    return {
        "score": {name: Estimate.of(effect.response) for name, effect in effects.items()},
        "kappa": {name: Estimate.of(effect.dose) for name, effect in effects.items()},
        "entropy": causes.average(rows, BROKEN, "entropy").mean(),
        "bounds": 100 * max(row["bounds"] for row in rows),
        "low_bounds": 100 * max(row["bounds"] for row in rows if row["lr"] in low_rates),
        "without": -without[BROKEN],
        "gaining": -causes.fit_slope(effects, causes.exclude(*causes.HARMFUL)).mean(),
        "others": (-others[0], -others[-1]),
        "slope": per_tenfold(slopes),
        "low": per_tenfold(low),
        "runs": len(rows),
        "verdict": causes.decide(slopes),
        "low_verdict": causes.decide(low),
    }


PASSAGES = [
    Passage(
        heads_values,
        {
            RESULTS: [
                "16 heads instead of 2: {gain[0]:+.1f points} at fixed head dimension, {gain[1]:+.1f} at",
                "| fixed head dimension | {dim[2]:,.0f} | {dim[16]:,.0f} | {gain[0]:+.1f} | {error[0]:+.1f} % |",
                "| fixed total width | {total[2]:,.0f} | {total[16]:,.0f} | {gain[1]:+.1f} | {error[1]:+.1f} % |",
                "a median κ of {gaussian[2]:.1f} to {gaussian[16]:.1f} at fixed head dimension, and "
                "{gaussian_total:.1f} at",
                "where the first table has {error[0]:.1f} and {error[1]:.1f} %",
            ],
        },
    ),
    Passage(
        peak_values,
        {
            RESULTS: [
                "| measured log10 κ | {kappa[2]:.2f} | {kappa[3]:.2f} | {kappa[4]:.2f} | {kappa[8]:.2f} | "
                "{kappa[16]:.2f} |",
                "| log10 of the median κ of Gaussian matrices | {gaussian[2]:.2f} | {gaussian[3]:.2f} | "
                "{gaussian[4]:.2f} | {gaussian[8]:.2f} | {gaussian[16]:.2f} |",
                "3 heads minus 2 heads: {above[2]:+.2f}; 3 heads minus 4 heads: {above[4]:+.2f}.",
                "median over {images} crops of photographs",
                "matrices ({gaussian_above[2]:.2f} and {gaussian_above[4]:.2f})",
                "{exists}",
                "log10 κ is {trained[2]:.2f} with 2 heads, {trained[3]:.2f} with 3 heads and {trained[4]:.2f} with 4 "
                "heads: 3 heads minus 2 heads {trained_above[2]:+.2f}, minus 4 heads {trained_above[4]:+.2f}. By the "
                "rule the claim {trained_exists}",
            ],
        },
    ),
    Passage(
        causes_values,
        {
            RESULTS: [
                "{runs} runs",
                *(f"| {text} | {{score[{name}]:+.1f}} | {{kappa[{name}]:+.2f}} |" for name, text in NAMES.items()),
                "heads change top-1 by {slope[heads]:+.2f points} per tenfold fall of κ, interventions by "
                "{slope[interventions]:+.2f}. The second minus half of the first is {slope[beyond]:+.2f}",
                "the cause of what heads gain is {verdict}",
                "Without λ = 2, whose attention has {entropy:.2f} of the largest entropy, the interventions give "
                "{without:.2f}, without any other {others[0]:.2f} to {others[1]:.2f}, and without all that lose "
                "accuracy, graying and λ = 2, {gaining:.2f}",
                "singular in up to {bounds:.0f} % of images",
                "where it is at most {low_bounds:.0f} %, heads give {low[heads].value:+.2f} and interventions "
                "{low[interventions].value:+.2f}, and the claim is {low_verdict} too",
            ],
        },
    ),
    Passage(
        mediation_values,
        {
            RESULTS: [
                "| {score[heads]:+.1f points}, 8 heads instead of 2 |",
                "the first five, heads gain ({five.value:+.1f} points, {five.low:.1f} to {five.high:.1f}), but whether "
                "graying gains half as much stayed {five_word}",
                "nearly equal, {two_rates[0]:.1f} and {two_rates[1]:.1f} %, and each seed got the one at which it was "
                "worse itself: {chosen:.1f} %.",
                "changes top-1 by {mlp:+.1f points}.",
                "With σReparam, 8 heads instead of 2 gain {under_sigma:+.1f points}, with QK-norm "
                "{under_qk_norm:+.1f}.",
                "by the rule: no gain is shown, so nothing to explain | {score[heads]:+.1f} |",
                "at each of the three learning rates | {rates[0]:+.1f} to {rates[1]:+.1f} |",
                "mean over the three learning rates, chosen after the runs | {mean:+.1f} |",
                "κ does not explain it | {one_rate:+.1f} |",
                "lower κ {factor:.0f}-fold",
                "the control | {score[control]:+.1f} | {kappa[control]:+.2f} | {share[control]:.0f} % |",
                *(
                    f"| {text} | {{score[{name} beside base]:+.1f}} | {{kappa[{name} beside base]:+.2f}} | "
                    f"{{share[{name}]:.0f}} % |"
                    for name, text in LEVERS.items()
                ),
            ],
        },
    ),
]
