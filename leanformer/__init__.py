"""Workbench for the budget of a transformer: number of heads, query/key dimension, depth and MLP.

`leanformer.load("runs/quickstart")` returns a trained model with its config and preprocessing (`training.inference`).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `load` on first access, so that commands that only count start fast."""
    if name == "load":
        from leanformer.training.inference import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
