"""Measurement of a model's conditioning outside training, and the sweep over numbers of heads."""

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
from leanformer.layers import interventions
from leanformer.runtime import multihost
from leanformer.tasks import Objective
from leanformer.training import model_setup
from leanformer.training.model_setup import ModelSetup
from leanformer.training.step import make_probe_step


PROJECTIONS = ("query_weights", "key_weights", "value_weights", "output_weights")
SWEPT = "attention_output"  # measure of the paper's Figure 2
HEAD_WIDTH, TOTAL_WIDTH = "fixed head_dim", "fixed num_heads x head_dim"


def split_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of activations and of weights. Raises ConfigError for an unknown name, or for none."""
    unknown = [name for name in names if name not in ACTIVATIONS | WEIGHTS]
    if unknown or not names:
        choices = "\n  ".join([", ".join(ACTIVATIONS), ", ".join(WEIGHTS)])
        raise ConfigError(f"--measures={','.join(unknown)}: unknown measure. Choose from:\n  {choices}")
    return [name for name in names if name in ACTIVATIONS], [name for name in names if name in WEIGHTS]


def make_reader(
    model: ModelSetup, objective: Objective, names: Sequence[str]
) -> Callable[[Any, dict[str, jax.Array] | None], dict[str, Any]]:
    """Return the jitted function (weights, batch) -> {measure: result}, which also measures weights.

    A result is a Reading, or for matrices a pair (singular values, Summary), with a leading axis L; activations also
    have axes of examples and heads. If the model has several stacks, the name of one precedes the measure. The batch
    may be None, for measures of weights alone.
    """
    activations, of_weights = split_names(names)
    probe = make_probe_step(model.graphdef, objective, activations, reduce=conditioning.with_spectrum)

    def read(weights: Any, batch: dict[str, jax.Array] | None) -> dict[str, Any]:
        result = {} if batch is None or not activations else probe(weights, batch)
        stacks = interventions.with_effective_weights(model.graphdef, weights).measured()
        measured = conditioning.weights(stacks, of_weights, reduce=conditioning.with_spectrum)
        return result | conditioning.by_name(measured, of_weights)

    return jax.jit(read)


def projections(model: ModelSetup) -> list[str]:
    """Return the measures in PROJECTIONS that a model has; latent attention, for example, has no W_K and no W_V."""

    def measure(weights: Any) -> dict[str, Any]:
        return conditioning.weights(
            interventions.with_effective_weights(model.graphdef, weights).measured(), PROJECTIONS
        )

    stacks = jax.eval_shape(measure, model.weights)
    return [name for name in PROJECTIONS if any(name in measures for measures in stacks.values())]


def head_plans(m: ConfigDict, heads: Sequence[int]) -> list[tuple[str, dict[str, int]]]:
    """Return the changes of config.model that give each number of heads, as pairs (trade, {key: value}).

    First come the plans of trade HEAD_WIDTH, which keep the head dimension, so num_heads x head_dim grows; then
    TOTAL_WIDTH, which keeps that product, a multiple of the number.
    """
    several = [key for key in ("num_heads", "head_dim", "value_dim") if isinstance(m.get(key), tuple | list)]
    if heads and several:
        raise ConfigError(
            f"--heads: model.{several[0]}={m[several[0]]} differs between layers or stages. Use one number for all."
        )
    widths = {name: m[name] for name in ("head_dim", "value_dim") if m.get(name)}
    for n, (name, width) in itertools.product(heads, widths.items()):
        if n < 1 or (m.num_heads * width) % n:
            raise ConfigError(f"--heads={n} does not divide num_heads={m.num_heads} x {name}={width}.")
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
) -> dict[str, Any]:
    """Measure SWEPT for models with several numbers of heads, and return the results for the page and JSON.

    A point has trade (see `head_plans`), heads, head_dim, value_dim if the config has it, shape ([rows, columns] of the
    matrices), pooled (`conditioning.digest` over seeds, layers and examples), by_seed (median of each seed, None
    without a finite matrix) and theory (reference for Gaussian matrices, None if not comparable).
    """
    chosen, results, points = [c.seed + i for i in range(seeds)], {}, []
    for trade, changes in head_plans(c.model, heads):
        key = tuple(changes.items())
        if key not in results:  # both trades are equal at the configured number of heads
            changed = c.copy_and_resolve_references()
            changed.unlock()
            changed.model.update(changes)
            configs.check(changed)
            model = model_setup.set_up_model(changed, mesh=mesh)
            read = make_reader(model, tasks.build_task(changed).objective, [SWEPT])
            summaries = [_get_summary(multihost.fetch(read(weights(model, seed), batch))) for seed in chosen]
            pooled = jax.tree.map(lambda *x: np.stack(x).reshape(1, -1), *summaries)
            finite = [one.condition_number[one.finite] for one in summaries]
            by_seed = [float(np.median(x)) if x.size else None for x in finite]
            (digest,) = conditioning.digest(pooled)
            shape = digest["shape"]
            theory = tables.gaussian_prediction(SWEPT, shape)
            results[key] = {"shape": shape, "pooled": digest, "by_seed": by_seed, "theory": theory}
        widths = {name: value for name, value in changes.items() if name != "num_heads"}
        points.append({"trade": trade, "heads": changes["num_heads"], **widths, **results[key]})
    return {"measure": SWEPT, "what": ACTIVATIONS[SWEPT].what, "seeds": chosen, "points": points}


def _get_summary(readings: dict[str, Any]) -> Any:
    """Return the summary of SWEPT; with two stacks per block (TNT), of the outer one, which has `num_heads` heads."""
    return readings[SWEPT if SWEPT in readings else f"blocks.outer.{SWEPT}"][1]
