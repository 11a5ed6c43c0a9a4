"""Workbench for the budget of a transformer: number of heads, query/key dimension, depth and MLP.

`leanformer.load("runs/quickstart")` returns a trained model with its config and preprocessing (`training.inference`);
`leanformer.conditioning.condition(array)` measures any matrices. `leanformer.watch(model)` measures a model of PyTorch,
Flax or Equinox while it is called, `leanformer.watch_weights(path)` the matrices of a file.
"""

import importlib
import importlib.util
import itertools
import sys
from typing import Any


PUBLIC = {  # module of each public name
    "load": "leanformer.training.inference",
    "watch": "leanformer.watching",
    "watch_weights": "leanformer.watching.weights",
}


def require_training() -> None:
    """Exit with status 2 and the command to install if the packages that every command needs are missing."""
    if missing := [name for name in ("jax", "flax", "ml_collections") if importlib.util.find_spec(name) is None]:
        print(f"Error: {', '.join(missing)}: not installed. Run: pip install 'leanformer[train]'", file=sys.stderr)
        sys.exit(2)


if any(a == "-m" and b.split(".")[0] == "leanformer" for a, b in itertools.pairwise(sys.orig_argv)):
    require_training()  # here, since the modules of commands import these packages first


def __getattr__(name: str) -> Any:
    """Import the public names on first access, so that commands that only count start fast."""
    if name == "conditioning":
        return importlib.import_module("leanformer.conditioning")
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
