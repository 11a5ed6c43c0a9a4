"""leanformer: how should a transformer's budget be spent on heads, head rank, depth and MLP?

`leanformer.load("runs/quickstart")` is a trained model with its config and preprocessing (`training.inference`).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`load`, imported when it is asked for: a command that only counts need not wait for all of it."""
    if name == "load":
        from leanformer.training.inference import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
