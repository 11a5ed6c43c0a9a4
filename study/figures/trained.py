"""Figures on trained models of others: two that ship in Python packages."""

import csv
import statistics
from collections.abc import Mapping
from typing import Any

from study.figures.passages import RESULTS, Passage
from study.tables import round_to
from study.trained.trained_models import EVIDENCE, MODELS


def _read() -> list[dict[str, str]]:
    with EVIDENCE.open(newline="") as file:
        return list(csv.DictReader(file))


def trained_values() -> Mapping[str, Any]:
    """Return medians by layer, and the median effective rank of heads as a share of their dimension."""
    rows, result = _read(), {}
    for name, label in zip(("bert", "vit"), MODELS, strict=True):
        for trained in ("1", "0"):
            chosen = [row for row in rows if (row["model"], row["trained"]) == (label, trained)]
            whole = [row for row in chosen if not row["head"]]
            heads = [row for row in chosen if row["head"] and row["measure"] == "head_output"]
            values: dict[str, Any] = {
                measure: [round_to(float(row["median"]), 3) for row in whole if row["measure"] == measure]
                for measure in ("attention_output", "tokens")
            }
            values["unresolved"] = sum(
                "median" in row["bounds"] for row in whole if row["measure"] == "attention_output"
            )
            values["layers"] = len(values["tokens"])
            values["rank"] = statistics.median(
                float(row["effective_rank"]) / int(row["shape"].split("x")[1]) for row in heads
            )
            result[name if trained == "1" else f"{name}_fresh"] = values
    worse = [a > b for a, b in zip(result["vit"]["tokens"], result["vit_fresh"]["tokens"], strict=True)]
    return result | {"worse": sum(worse)}


PASSAGES = [
    Passage(
        trained_values,
        {
            RESULTS: [
                "| {bert[attention_output][1]:.1f}, {bert[attention_output][5]:,.0f} | "
                "{bert_fresh[attention_output][1]:,.0f}, {bert_fresh[attention_output][5]:,.0f} |",
                "| {bert[tokens][1]:.1f}, {bert[tokens][5]:.0f} | {bert_fresh[tokens][1]:.1f}, "
                "{bert_fresh[tokens][5]:.1f} |",
                "| ViT-S, of {vit[layers]} layers singular in float32 | {vit[unresolved]} | {vit_fresh[unresolved]} |",
                "| {bert[rank]:.2f}, {vit[rank]:.2f} | {bert_fresh[rank]:.2f}, {vit_fresh[rank]:.2f} |",
                "are worse in {worse} of {vit[layers]} layers",
            ],
        },
    ),
]
