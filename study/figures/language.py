"""Figures on small language models, and on predictors of the best architecture."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from study import tables
from study.figures.passages import RESULTS, WORDS, Passage
from study.heads import gpt2
from study.heads.language import read_rows
from study.shapes import planner
from study.tables import Estimate


def bigram() -> Mapping[str, Any]:
    """Return held-out nats per token of the bigram model."""
    rows = tables.group(tables.read("language"), "config")
    return {"bigram": float([*rows.values()][-1][0]["nats_per_token"])}


def gpt2_pair() -> Mapping[str, Any]:
    """Return differences of GPT-2's pair on prose, in nats by seed and on average, and million parameters."""
    rows = sorted((row for row in read_rows(gpt2.ROWS) if row["texts"] == gpt2.PROSE), key=lambda row: row["seed"])
    lean, deep = (np.array([row["loss"] for row in rows if row["arm"] == arm]) for arm in ("4x16", "12x12"))
    return {
        "difference": lean - deep,
        "mean": Estimate.of(statistics.paired(lean, deep)),
        "seeds": WORDS[len(lean)],
        "margin": gpt2.MARGIN,
        "params": {row["arm"]: row["params"] / 1e6 for row in rows},
    }


def predictors() -> Mapping[str, Any]:
    """Return least and most over the published tables of Kendall's τ and of the surface's coverage."""
    metrics = [planner.score_predictors(models) for models in planner.read_published().values()]
    tau = {name: [m[name]["tau"][0] for m in metrics] for name in ("params", "nsc", "surface")}
    result = {name: [f"{end:.2f}".lstrip("0") for end in (min(x), max(x))] for name, x in tau.items()}
    result["covered"] = [100 * end(m["surface"]["covered"] for m in metrics) for end in (min, max)]
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


PASSAGES = [
    Passage(bigram, {RESULTS: ["near the {bigram:.2f} of a bigram model"]}),
    Passage(
        gpt2_pair,
        {
            RESULTS: [
                "4 layers x 16 heads ({params[4x16]:.2f} million parameters) end {difference[0]:+.3f} and "
                "{difference[1]:+.3f} nats behind 12 x 12 ({params[12x12]:.2f} million), {mean:+.3f} on average; the "
                "planned margin is {margin}.",
                "In the {seeds} that ran",
            ],
        },
    ),
    Passage(
        predictors,
        {
            RESULTS: [
                "| Kendall's τ on {tables} published tables, parameter count | {params[0]} to {params[1]} |",
                "| {nsc[0]} to {nsc[1]} |",
                "priors chosen on these tables | {surface[0]} to {surface[1]} |",
                "| coverage of its 90 % intervals | {covered[0]:.0f} to {covered[1]:.0f} % |",
                "Capacity loses to the parameter count on {nsc_loses} tables, the surface on {surface_loses}.",
            ],
        },
    ),
    Passage(
        coverage,
        {
            RESULTS: [
                "simulated sweeps | {inside[0]:.1f} to {inside[1]:.1f} % |",
                "intervals, simulated | {compare[0]:.1f} to {compare[1]:.1f} % |",
            ],
        },
    ),
]
