"""Figures on diagnostic tasks: rank or number of heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from study import tables
from study.figures.passages import RESULTS, Passage
from study.heads import language
from study.heads import listops as controls
from study.tables import Estimate


def nearest() -> Mapping[str, Any]:
    """Return errors of nearest neighbour at total width 16, by rank."""
    rows = tables.group(tables.read("rank_nn"), "head_dim")
    return {"rank": {int(rank): Estimate.mean(row["error"] for row in group) for rank, group in rows.items()}}


def diagnostic() -> Mapping[str, Any]:
    """Return geometric means of the errors at total width 48, by number of heads."""
    result = {}
    for task, rows in tables.group(tables.read("diagnostic_tasks"), "task").items():
        by_heads = tables.group(rows, "num_heads")
        result[task.replace(" ", "_")] = {
            int(n): 10 ** float(np.mean([np.log10(float(row["error"])) for row in group]))
            for n, group in by_heads.items()
        }
    return result


def listops() -> Mapping[str, Any]:
    """Return Welch's differences of top-1 on short ListOps, in points."""
    found = controls.contrasts(language.read_rows(controls.ROWS), controls.SHORT)
    rows = tables.group(tables.read("listops"), "depth")
    one, two = (np.array([float(row["top1"]) for row in rows[depth]]) for depth in "12")
    return {name: Estimate.of(x) for name, x in (found | {"older": statistics.welch(one, two)}).items()}


PASSAGES = [
    Passage(nearest, {RESULTS: ["| {rank[16]:.3f ±}, {rank[8]:.3f ±}, {rank[1]:.3f ±} |"]}),
    Passage(
        diagnostic,
        {
            RESULTS: [
                "| {nearest_neighbour[1]:.3f}, {nearest_neighbour[3]:.3f}, {nearest_neighbour[12]:.3f}, "
                "{nearest_neighbour[48]:.3f} |",
                "| {retrieval[1]:.3f}, {retrieval[3]:.3f}, {retrieval[12]:.4f}, {retrieval[48]:.4f} |",
            ],
        },
    ),
    Passage(
        listops,
        {
            RESULTS: [
                "2 x 2 minus 1 x 2, {layers:+.2f}; 1 x 4 minus 1 x 2, {heads:+.2f}; the paper's change, 1 x 4 minus "
                "2 x 2, {paper:+.2f}, in older runs {older:+.2f}.",
            ]
        },
    ),
]
