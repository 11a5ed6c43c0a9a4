"""Measuring a model's conditioning outside training: readers, the examples they look at, and the sweep over heads."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from leanformer import conditioning, tasks
from leanformer import config as configs
from leanformer.conditioning import ACTIVATIONS, WEIGHTS, tables
from leanformer.errors import ConfigError
from leanformer.layers import levers
from leanformer.runtime import peers
from leanformer.tasks import Objective
from leanformer.training import model_setup
from leanformer.training.model_setup import ModelSetup
from leanformer.training.step import make_probe_step


PROJECTIONS = ("query_weights", "key_weights", "value_weights", "output_weights")
SWEPT = "attention_output"  # what the paper's Figure 2 shows
HEAD_WIDTH, TOTAL_WIDTH = "fixed head width", "fixed total width"


def split_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Measures of activations and of weights. Raises ConfigError for what is neither."""
    unknown = [name for name in names if name not in ACTIVATIONS | WEIGHTS]
    if unknown or not names:
        known = "\n  ".join([", ".join(ACTIVATIONS), ", ".join(WEIGHTS)])
        raise ConfigError(f"--measures: {', '.join(unknown) or 'nothing'} is no measure here. Known:\n  {known}")
    return [name for name in names if name in ACTIVATIONS], [name for name in names if name in WEIGHTS]


def make_reader(
    model: ModelSetup, objective: Objective, names: Sequence[str]
) -> Callable[[Any, dict[str, jax.Array] | None], dict[str, Any]]:
    """Jitted `(weights, batch) -> {name: Reading or (singular values, Summary)}`, leading axis L, reduced in it."""
    activations, own = split_names(names)
    look = make_probe_step(model.graphdef, objective, activations, reduce=conditioning.with_spectrum)

    def read(weights: Any, batch: dict[str, jax.Array] | None) -> dict[str, Any]:
        found = look(weights, batch) if activations else {}
        stacks = levers.applied(model.graphdef, weights).measured()
        return found | conditioning.by_name(conditioning.weights(stacks, own, reduce=conditioning.with_spectrum), own)

    return jax.jit(read)


def projections(model: ModelSetup) -> list[str]:
    """The measures of whole projections that apply: latent attention makes keys and values of no single matrix."""

    def measured(weights: Any) -> dict[str, Any]:
        return conditioning.weights(levers.applied(model.graphdef, weights).measured(), PROJECTIONS)

    found = jax.eval_shape(measured, model.weights)
    return [name for name in PROJECTIONS if any(name in measures for measures in found.values())]


def head_plans(m: ConfigDict, heads: Sequence[int]) -> list[tuple[str, dict[str, int]]]:
    """Both trades: what of `model` changes with each number of heads. Raises ConfigError for one that cannot be."""
    if heads and not isinstance(m.num_heads, int):
        raise ConfigError(
            f"--heads: this model has heads by stage, model.num_heads={m.num_heads}; one number is wanted."
        )
    widths = {name: m[name] for name in ("head_dim", "value_dim") if m.get(name)}
    for n, (name, width) in itertools.product(heads, widths.items()):
        if n < 1 or (m.num_heads * width) % n:
            divisors = [d for d in range(1, m.num_heads * width + 1) if m.num_heads * width % d == 0]
            raise ConfigError(
                f"--heads: {n} heads cannot share the total width num_heads={m.num_heads} x {name}={width} = "
                f"{m.num_heads * width} evenly. Heads that can: {', '.join(map(str, divisors))}."
            )
    fixed = [(HEAD_WIDTH, {"num_heads": n, **widths}) for n in heads]
    shared = [{"num_heads": n} | {name: m.num_heads * w // n for name, w in widths.items()} for n in heads]
    return fixed + [(TOTAL_WIDTH, changes) for changes in shared]


def sweep(
    c: ConfigDict,
    mesh: Mesh,
    batch: dict[str, jax.Array],
    heads: Sequence[int],
    seeds: int,
    weights: Callable[[ModelSetup, int], Any] = ModelSetup.random_weights,
    when: str = "at initialisation",
) -> dict[str, Any]:
    """SWEPT for both trades: pooled over seeds, layers and examples, and the median of each seed.

    `weights(model, seed)` gives those to look at, `when` says in words what they are.
    """
    chosen, known, points = [c.seed + i for i in range(seeds)], {}, []
    for trade, changes in head_plans(c.model, heads):
        key = tuple(changes.items())
        if key not in known:  # both trades meet at the configured number of heads
            changed = c.copy_and_resolve_references()
            changed.unlock()
            changed.model.update(changes)
            configs.check(changed)
            model = model_setup.build(changed, mesh=mesh)
            read = make_reader(model, tasks.of(changed).objective, [SWEPT])
            found = [_swept(peers.fetch(read(weights(model, seed), batch))) for seed in chosen]
            pooled = jax.tree.map(lambda *x: np.stack(x).reshape(1, -1), *found)
            by_seed = [
                float(np.median(x)) if np.size(x) else None for x in (f.condition_number[f.finite] for f in found)
            ]
            (digest,) = conditioning.digest(pooled)
            shape = digest["shape"]
            known[key] = {"shape": shape, "pooled": digest, "by_seed": by_seed, "theory": tables.theory(SWEPT, shape)}
        widths = {name: value for name, value in changes.items() if name != "num_heads"}
        points.append({"trade": trade, "heads": changes["num_heads"], **widths, **known[key]})
    return {"measure": SWEPT, "what": ACTIVATIONS[SWEPT].what, "when": when, "seeds": chosen, "points": points}


def _swept(found: dict[str, Any]) -> Any:
    """The summary of SWEPT; of two stacks in a block (TNT), of the outer one, whose heads are `num_heads`."""
    return found[SWEPT if SWEPT in found else f"blocks.outer.{SWEPT}"][1]
