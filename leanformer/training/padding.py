"""Runs whose heads differ in number or rank as runs of one shape: zeros fill their projections up, and stay zeros.

Of a channel that is zero in all four projections and their biases, q, k, v and the output are zero. Its gradient in W_Q
has k as a factor, in W_K q, in W_V its row of W_O, and in W_O the output: zero, whatever the batch. So are the moments
of an optimizer that moves each number by itself, weight decay, averages, and its part in the norm that clips. Heads of
zeros alone weigh all tokens alike, and write nothing. What tells the shapes apart is the scale of the logits, 1/√H:
`read` makes it each run's own. Zeros are multiplied like any number: on a CPU they cost more than one program saves
(`benchmarks/rank.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from ml_collections import ConfigDict

from leanformer import models
from leanformer.training import experiment
from leanformer.training.experiment import Experiment


SIZES = ("model.num_heads", "model.head_dim", "model.value_dim")  # in which runs may differ
# Keys of config.model by which attention does something else with more heads or channels, zero or not.
COUNTING = ("num_kv_heads", "attention_dropout", "qk_norm", "rotary", "spectral", "sigma_reparam")
# That move each number by itself. So does Lion, but by the sign of what may be rounding alone.
OPTIMIZERS = ("adamw", "sgd")


def obstacle(c: ConfigDict) -> str | None:
    """Why heads of a config cannot be filled up with zeros; None where they can."""
    family, kind = models.family(c.model.name), c.model.get("attention")
    if kind not in family.padded:
        return f'model.name="{c.model.name}" does not say that its model.attention={kind!r} stays as it is'
    for name in COUNTING:
        if c.model.get(name):
            return f"model.{name}={c.model[name]!r} depends on how many heads and channels there are"
    if c.optim.name not in OPTIMIZERS:
        return f'optim.name="{c.optim.name}" is none of {", ".join(OPTIMIZERS)}, which are known to leave zeros exact'
    return None


def common(runs: Sequence[Experiment]) -> Experiment:
    """One of a shape that has room for all; the first run, where all have its shape."""
    first, *others = runs
    if all(_sizes(run.config) == _sizes(first.config) for run in others):
        return first
    c = first.config.copy_and_resolve_references()
    heads, queries, values = zip(*(_sizes(run.config) for run in runs), strict=True)
    values = [own or head_dim for own, head_dim in zip(values, queries, strict=True)]
    c.model.update(num_heads=max(heads), head_dim=max(queries), value_dim=max(values))
    return experiment.build(c, examples=first.examples, mesh=first.mesh, device=first.device, task=first.task)


def _sizes(c: ConfigDict) -> list[Any]:
    return [c.model.get(name.removeprefix("model.")) for name in SIZES]


def scale(run: Experiment, wide: Experiment) -> float:
    """What queries of `run` are multiplied by in `wide`, which divides logits by the root of more channels."""
    own, padded = run.config.model, wide.config.model
    if own.get("head_dim") == padded.get("head_dim") or own.logit_scale is not None:
        return 1.0
    return (padded.head_dim / own.head_dim) ** 0.5


def read(params: Any, scale: Any) -> Any:
    """The parameters as the forward pass is to read them, with queries times `scale`."""
    return jax.tree.map_with_path(lambda path, x: x * scale if _of_queries(path) else x, params)


def _of_queries(path: Any) -> bool:
    return "query" in jax.tree_util.keystr(path, simple=True, separator=".").split(".")


def pad(state: Any, like: Any) -> Any:
    """A state in the first corner of one of the shapes of `like`, zeros elsewhere."""

    def padded(x: Array, to: Any) -> Array:
        more = [(0, wide - own) for own, wide in zip(x.shape, to.shape, strict=True)]
        return x if x.shape == to.shape else jnp.pad(x, more)

    return jax.tree.map(padded, state, like)


def cut(state: Any, like: Any) -> Any:
    """What `pad` was given: the corner that has the shapes of `like`."""
    return jax.tree.map(lambda x, to: x if x.shape == to.shape else x[tuple(map(slice, to.shape))], state, like)
