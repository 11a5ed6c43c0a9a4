"""Figures on the models of Leaner Transformers."""

from collections.abc import Mapping
from typing import Any

from study import tables


def counts() -> Mapping[str, Any]:
    """Return what share of parameters the lean models save."""
    rows = tables.read("paper_counts")
    sizes = {(row["model"], row["variant"]): int(row["computed"]) for row in rows}
    large = {row["model"] for row in rows if row["table"] != "3"}
    saved = {
        model: 100 * (1 - sizes[model, "lean"] / sizes[model, "original"]) for model in {row["model"] for row in rows}
    }
    return {
        "saved": [end(saved[model] for model in large) for end in (min, max)],
        "nystromformer": max(saved[model] for model in saved.keys() - large),
    }
