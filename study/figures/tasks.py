"""Figures on diagnostic tasks: rank or number of heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from study import tables
from study.figures.passages import RESULTS, Passage
from study.tables import Estimate


def read_means(name: str, column: str, key: str) -> dict[int, Estimate]:
    """Return the mean of a column of a table with its interval, by an integer key."""
    return {
        int(k): Estimate.mean(row[column] for row in rows) for k, rows in tables.group(tables.read(name), key).items()
    }


def nearest() -> Mapping[str, Any]:
    """Return errors of nearest neighbour at total width 16, by rank."""
    return {"rank": read_means("rank_nn", "error", "head_dim")}


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


def retrieval() -> Mapping[str, Any]:
    """Return for 3 heads, 4 heads and 4 narrower heads the runs that found four items, and the others' errors."""
    result = {}
    for (heads, head_dim), rows in tables.group(tables.read("retrieval"), "num_heads", "head_dim").items():
        errors = [float(row["unexplained"]) for row in rows]
        failed = [error for error in errors if error > 0.1]
        result[f"h{heads}x{head_dim}"] = {
            "solved": sum(error < 1e-3 for error in errors),
            "failed": len(failed),
            "runs": len(errors),
            "error": float(np.mean(failed)),
        }
    return result


def listops() -> Mapping[str, Any]:
    """Return top-1 on ListOps by depth, and Welch's difference."""
    rows = tables.group(tables.read("listops"), "depth")
    scores = {int(n): np.array([float(row["top1"]) for row in group]) for n, group in rows.items()}
    gain = Estimate.of(statistics.welch(scores[1], scores[2]))
    return {"depth": {n: Estimate.mean(values) for n, values in scores.items()}, "gain": gain}


PASSAGES = [
    Passage(
        nearest,
        {
            RESULTS: ["error {rank[16]:.3f ±}, {rank[8]:.3f ±}, {rank[1]:.3f ±}, 3 seeds"],
        },
    ),
    Passage(
        diagnostic,
        {
            RESULTS: [
                "{nearest_neighbour[1]:.3f}, {nearest_neighbour[3]:.3f}, {nearest_neighbour[12]:.3f}, "
                "{nearest_neighbour[48]:.3f}, 3 seeds",
                "{retrieval[1]:.3f}, {retrieval[3]:.3f}, {retrieval[12]:.4f}, {retrieval[48]:.4f}, 3 seeds",
            ],
        },
    ),
    Passage(
        retrieval,
        {
            RESULTS: [
                "{h3x8[error]:.2f} in {h3x8[failed]} seeds; below 1e-3 in {h4x8[solved]} of {h4x8[runs]} seeds, "
                "{h4x8[error]:.2f} in {h4x8[failed]}; below 1e-3 in {h4x6[solved]} of {h4x6[runs]} seeds, "
                "{h4x6[error]:.2f} in {h4x6[failed]} |",
            ],
        },
    ),
    Passage(
        listops,
        {
            RESULTS: [
                "{depth[2]:.2f ± %}; {depth[1]:.2f ± %} ({gain.value:+.2f} points, {gain.low:.2f} to {gain.high:.2f})",
            ],
        },
    ),
]
