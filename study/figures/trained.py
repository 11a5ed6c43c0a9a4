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
    """Return medians by layer with the 10 and 90 % quantiles over examples, and effective ranks of heads."""
    rows, result = _read(), {}
    for name, label in zip(("bert", "vit"), MODELS, strict=True):
        for trained in ("1", "0"):
            chosen = [row for row in rows if (row["model"], row["trained"]) == (label, trained)]
            whole = [row for row in chosen if not row["head"]]
            heads = [row for row in chosen if row["head"] and row["measure"] == "head_output"]
            values: dict[str, Any] = {
                measure: [
                    tuple(round_to(float(row[key]), 3) for key in ("median", "q10", "q90"))
                    for row in whole
                    if row["measure"] == measure
                ]
                for measure in ("attention_output", "tokens", "attention_entropy")
            }
            values["unresolved"] = sum(
                "median" in row["bounds"] for row in whole if row["measure"] == "attention_output"
            )
            values["layers"] = len(values["tokens"])
            values["rank"] = statistics.median(
                float(row["effective_rank"]) / int(row["shape"].split("x")[1]) for row in heads
            )
            result[name if trained == "1" else f"{name}_fresh"] = values
    worse = [a[0] > b[0] for a, b in zip(result["vit"]["tokens"], result["vit_fresh"]["tokens"], strict=True)]
    return result | {"worse": sum(worse)}


PASSAGES = [
    Passage(
        trained_values,
        {
            RESULTS: [
                "κ of MiniLM's heads side by side is {bert[attention_output][1][0]:.1f} "
                "({bert[attention_output][1][1]:.1f} to {bert[attention_output][1][2]:.1f} over the middle 80 % of "
                "examples) in its second layer and {bert[attention_output][5][0]:,.0f} "
                "({bert[attention_output][5][1]:,.0f} to {bert[attention_output][5][2]:,.0f}) in its last, "
                "{bert_fresh[attention_output][1][0]:,.0f} and {bert_fresh[attention_output][5][0]:,.0f} in a fresh "
                "model. That of the tokens is {bert[tokens][1][0]:.1f} and {bert[tokens][5][0]:.0f}, "
                "{bert_fresh[tokens][1][0]:.1f} and {bert_fresh[tokens][5][0]:.1f} in a fresh one",
                "singular in float32 in {vit_fresh[unresolved]} of {vit_fresh[layers]} layers of the fresh model, and "
                "in {vit[unresolved]} of the trained one; its tokens are worse in {worse} of {vit[layers]}",
                "{bert[rank]:.2f} of the head dimension in MiniLM and {vit[rank]:.2f} in the ViT, "
                "{bert_fresh[rank]:.2f} and {vit_fresh[rank]:.2f} in the fresh models",
            ],
        },
    ),
]
