"""Figures on the models of Leaner Transformers."""

from collections.abc import Mapping
from typing import Any

from experiments import tables
from experiments.figures.passages import FINDINGS, README, Passage


def counts() -> Mapping[str, Any]:
    """Return how many reported parameter counts agree, how pairs add heads, and what share of parameters they save."""
    rows = tables.read("paper_counts")
    agree = [row for row in rows if row["agrees"] == "True"]
    sizes = {(row["model"], row["variant"]): int(row["computed"]) for row in rows}
    large = {row["model"] for row in rows if row["table"] != "3"}
    saved = {
        model: 100 * (1 - sizes[model, "lean"] / sizes[model, "original"]) for model in {row["model"] for row in rows}
    }
    tables_of = {number: [row for row in rows if row["table"] in number] for number in ("12", "3", "45")}
    return {
        "models": len(rows),
        "agree": len(agree),
        "other_mlp": WORDS[sum(row["mlp"] == "other" for row in agree)],
        "tables": {number: len(group) for number, group in tables_of.items()},
        "agree_in": {number: sum(row in agree for row in group) for number, group in tables_of.items()},
        "saved": [end(saved[model] for model in large) for end in (min, max)],
        "nystromformer": max(saved[model] for model in saved.keys() - large),
    }


WORDS = ("none", "one", "two", "three", "four", "five", "six")

PASSAGES = [
    Passage(
        counts,
        {
            README: ["{agree} of {models} | {other_mlp} only with another MLP width"],
            FINDINGS: [
                "{saved[0]:.0f} to {saved[1]:.0f} % fewer parameters (Nyströmformer: at most {nystromformer:.0f} %)",
            ],
        },
    ),
]
