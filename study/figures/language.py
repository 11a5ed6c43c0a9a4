"""Figures on small language models, and on predictors of the best architecture."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from study import tables
from study.figures.passages import RESULTS, Passage
from study.heads import gpt2, layers
from study.heads.language import read_rows
from study.shapes import planner
from study.tables import Estimate


def language() -> Mapping[str, Any]:
    """Return held-out nats per token of lean, deep and bigram models."""
    rows = tables.group(tables.read("language"), "config")
    lean, deep, bigram = (np.array([float(row["nats_per_token"]) for row in group]) for group in rows.values())
    return {
        "lean": Estimate.mean(lean),
        "deep": Estimate.mean(deep),
        "difference": Estimate.of(statistics.paired(deep, lean)),
        "bigram": bigram[0],
    }


def heads_by_layer() -> Mapping[str, Any]:
    """Return losses of arms with more heads in later or earlier layers, their differences, and verdicts."""
    rows = read_rows(layers.ROWS)
    judged = layers.compare(rows)
    losses = {name: Estimate.mean(by_seed.values()) for name, by_seed in layers.read_values(rows).items()}
    names = {("increasing", "uniform"): "later", ("decreasing", "uniform"): "earlier"}
    names |= {("increasing", "decreasing"): "against"}
    differences = {name: Estimate.of(judged[pair][0]) for pair, name in names.items()}
    verdicts = {f"{name}_verdict": judged[pair][1] for pair, name in names.items()}
    return losses | differences | verdicts | {"claim": layers.decide(judged)}


def gpt2_pair() -> Mapping[str, Any]:
    """Return losses of GPT-2's pair and of its control on prose by seed, and differences to 12x12 in nats."""
    rows = sorted((row for row in read_rows(gpt2.ROWS) if row["texts"] == gpt2.PROSE), key=lambda row: row["seed"])
    loss, fit = ({a: [r[key] for r in rows if r["arm"] == a] for a in gpt2.ARMS} for key in ("loss", "train_loss"))
    lean, deep, wide = "4x16", "12x12", "4x16_wide"
    differences = [b - a for a, b in zip(loss[deep], loss[lean], strict=True)]
    result = {"lean": loss[lean], "deep": loss[deep], "wide": loss[wide], "seeds": WORDS[len(differences)]}
    result |= {"difference": differences, "wide_difference": loss[wide][0] - loss[deep][0]}
    result |= {"published": gpt2.PUBLISHED}
    result |= {"params": {row["arm"]: row["params"] / 1e6 for row in rows}, "margin": gpt2.MARGIN}
    result |= {"mean": Estimate.of(statistics.paired(np.array(loss[lean]), np.array(loss[deep])))}
    result |= {"fewer": 100 * (1 - result["params"][lean] / result["params"][deep])}
    return result | {"fit": [fit[arm][0] for arm in (deep, lean, wide)]}


def predictors() -> Mapping[str, Any]:
    """Return least and most over the published tables of Kendall's τ and of the surface's coverage."""
    metrics = [planner.score_predictors(models) for models in planner.read_published().values()]
    tau = {name: [m[name]["tau"][0] for m in metrics] for name in ("params", "nsc", "surface")}
    result = {name: [f"{end:.2f}".lstrip("0") for end in (min(x), max(x))] for name, x in tau.items()}
    for name in ("covered", "largest_covered"):
        result[name] = [100 * end(m["surface"][name] for m in metrics) for end in (min, max)]
    worse = {f"{name}_loses": sum(a < b for a, b in zip(tau[name], tau["params"], strict=True)) for name in tau}
    return result | {name: WORDS[count] for name, count in worse.items()} | {"tables": WORDS[len(metrics)]}


def coverage() -> Mapping[str, Any]:
    """Return least and most coverage in percent of the intervals of `compare`, and of `plan` inside the sizes."""
    shares: dict[str, list[float]] = {}
    for row in tables.read("coverage"):
        name = row["case"].rpartition(", ")[2] if row["command"] == "plan" else "compare"
        if "wrong" not in row["case"]:
            shares.setdefault(name, []).append(100 * float(row["share"]))
    return {name: [min(values), max(values)] for name, values in shares.items()}


WORDS = ("none", "one", "two", "three", "four", "five", "six")

PASSAGES = [
    Passage(
        language,
        {
            RESULTS: [
                "{lean:.2f ±}; {deep:.2f ±} (deep minus lean {difference.value:.2f}, {difference.low:.2f} to "
                "{difference.high:.2f}: inconclusive); {bigram:.2f} |",
            ],
        },
    ),
    Passage(
        heads_by_layer,
        {
            RESULTS: [
                "{increasing:.2f ±}; {uniform:.2f ±}; {decreasing:.2f ±} (later minus uniform {later:+.3f}: "
                "{later_verdict}; earlier minus uniform {earlier:+.3f}: {earlier_verdict}; later minus earlier "
                "{against:+.3f}: {against_verdict}). That later is better is {claim} by the rule",
            ],
        },
    ),
    Passage(
        gpt2_pair,
        {
            RESULTS: [
                "Table 2 of the paper reports {published[12x12]} nats for GPT-2 of 12 layers and 12 heads on "
                "TinyStories, and {published[4x16]} for",
                "4 layers with {fewer:.0f} % fewer parameters",
                "the planned margin of {margin} nats; their mean, {mean:+.3f}, is",
                "| 12 layers, 12 heads of 42, MLP 2048 | {params[12x12]:.2f} | {deep[0]:.3f}; {deep[1]:.3f} | | "
                "{fit[0]:.3f} |",
                "| 4 layers, 16 heads of 32, MLP 2048 | {params[4x16]:.2f} | {lean[0]:.3f}; {lean[1]:.3f} | "
                "{difference[0]:+.3f}; {difference[1]:+.3f} | {fit[1]:.3f} |",
                "| the same, MLP 8148 | {params[4x16_wide]:.2f} | {wide[0]:.3f} | {wide_difference:+.3f} | "
                "{fit[2]:.3f} |",
            ],
        },
    ),
    Passage(
        predictors,
        {
            RESULTS: [
                "counting is better on {nsc_loses} of {tables} tables",
                "Kendall's τ on {tables} published tables",
                "{params[0]} to {params[1]}; {nsc[0]} to {nsc[1]}; {surface[0]} to {surface[1]}. Capacity loses to "
                "parameters on {nsc_loses} tables, the surface on {surface_loses}.",
                "{covered[0]:.0f} to {covered[1]:.0f} %; {largest_covered[0]:.0f} to {largest_covered[1]:.0f} %",
            ],
        },
    ),
    Passage(
        coverage,
        {
            RESULTS: [
                "{inside[0]:.1f} to {inside[1]:.1f} %; outside",
                "nominal within chance | {compare[0]:.1f} to {compare[1]:.1f} % |",
            ],
        },
    ),
]
