"""One training step and one evaluation step, as functions of arrays for `jax.jit`, and exact evaluation."""

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from leanformer import conditioning
from leanformer.errors import ConfigError
from leanformer.runtime.mesh import keep_whole
from leanformer.tasks import Batch, Objective
from leanformer.training.optim import settled
from leanformer.training.state import TrainState


IN_FLIGHT = 2  # steps sent ahead to the device: enough to keep it busy, few enough to hold few batches in memory
LARGEST = float(np.finfo(np.float32).max) / 16  # of a parameter: the average of two such is finite too


def make_loss(
    graphdef: Any, objective: Objective, hold: Callable[[Any], Any]
) -> Callable[[Any, Any, dict[str, Array], Any, Any], tuple[Float[Array, ""], Any]]:
    """Return the function `(params, statistics, part, batch_aux, denominator) -> (loss, new statistics)`.

    `part` and `batch_aux` are those of `Objective.prepare_train_batch`.
    """

    def loss_of(
        params: Any, statistics: Any, part: dict[str, Array], batch_aux: Any, denominator: Any
    ) -> tuple[Float[Array, ""], Any]:
        model = nnx.merge(graphdef, hold(params), statistics)
        key = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part["key"], 1)  # 0 is the objective's own
        loss = objective.loss(model, part, batch_aux, key) / denominator
        return loss, nnx.as_pure(nnx.state(model, nnx.BatchStat))

    return loss_of


def make_gradient(
    graphdef: Any, objective: Objective, *, hold: Callable[[Any], Any] = lambda params: params, accumulate: int = 1
) -> Callable[[tuple[Any, Any], Batch, Key[Array, ""]], tuple[Array, Any, Any]]:
    """Return the function `(weights, batch, key) -> (loss, gradients, new statistics)`; `key` is that of the step."""
    loss_of = make_loss(graphdef, objective, hold)

    def gradient(weights: tuple[Any, Any], batch: Batch, key: Key[Array, ""]) -> tuple[Array, Any, Any]:
        batch_key, shared_key = jax.random.split(key)
        parts, batch_aux = objective.prepare_train_batch(batch, batch_key, shared_key)
        loss = functools.partial(loss_of, denominator=objective.loss_denominator(batch))
        return _gradient(loss, weights, parts, batch_aux, accumulate)

    return gradient


def make_train_step(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    schedule: Callable[[Array], tuple[Array, Any]],
    *,
    hold: Callable[[Any], Any],
    accumulate: int,
    clip_norm: float,
    ema: float,
    log_every: int,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The step `(state, batch, key) -> (state, metrics)`; jit it with the state donated.

    `batch` has the task's inputs and targets; `key` is the run's key, the same at every step; `hold` takes the gradient
    from parameters that are frozen. Metrics are means over the steps since the last train record, those that were
    skipped left out, and the counters of those. A step whose loss or gradient is not finite, or whose loss is over the
    objective's `ceiling`, is skipped: it changes no weights, moments or statistics. One that leaves a parameter over
    LARGEST, or not finite, counts as skipped from then on, so that nobody takes the state for a healthy one.
    """
    gradient = make_gradient(graphdef, objective, hold=hold, accumulate=accumulate)

    def train_step(state: TrainState, batch: Batch, key: Key[Array, ""]) -> tuple[TrainState, dict[str, Array]]:
        loss, grads, statistics = gradient(state.weights, batch, jax.random.fold_in(key, state.step))

        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(squares.sum())
        finite = jnp.isfinite(norm) & (loss <= objective.ceiling)
        # Scalars are worked out once, not inside the loops over all parameters.
        rate, b1 = schedule(state.step)
        rate, norm, finite = jax.lax.optimization_barrier((rate, norm, finite))
        if clip_norm:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        direction, moments = optimizer.update(grads, state.moments, state.params, finite=finite, b1=b1)
        params = settled(keep(jax.tree.map(lambda p, d: p - rate * d, state.params, direction), state.params))
        # A fixed decay would keep the random start in the average for its first 1 / (1 - decay) steps.
        decay = jnp.minimum(ema, (1 + state.step) / (10 + state.step))
        average = ema and jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), state.ema, (params, statistics))

        fits = jnp.stack([jnp.all(jnp.abs(x) <= LARGEST) for x in jax.tree.leaves(params)])
        healthy = finite & fits.all()
        fresh = state.step % log_every == 0
        seen = {"loss": loss, "grad_norm": norm, "steps": jnp.float32(1)}
        window = {
            name: jnp.where(fresh, 0, total) + jnp.where(healthy, seen[name], 0) for name, total in state.window.items()
        }
        state = TrainState(
            step=state.step + 1,
            params=params,
            statistics=keep(statistics, state.statistics),
            moments=moments,
            ema=keep(average, state.ema) if ema else None,
            skipped=state.skipped + ~healthy,
            skipped_in_row=jnp.where(healthy, 0, state.skipped_in_row + 1),
            window=window,
        )
        return state, _metrics(state, rate, loss, jnp.where(finite, ~fits, ~jnp.isfinite(squares)))

    return train_step


def _metrics(state: TrainState, rate: Array, loss: Array, bad: Bool[Array, " leaves"]) -> dict[str, Array]:
    """What a step says of itself; `bad` are the leaves that are not as they should be."""
    return {
        "loss": state.window["loss"] / state.window["steps"],
        "grad_norm": state.window["grad_norm"] / state.window["steps"],
        "lr": rate,
        "skipped": state.skipped,
        "skipped_in_row": state.skipped_in_row,
        "last_loss": loss,
        "bad_leaf": jnp.where(bad.any(), jnp.argmax(bad), -1),
    }


def _gradient(
    loss_of: Callable[[Any, Any, dict[str, Array], Any], tuple[Array, Any]],
    weights: tuple[Any, Any],
    parts: dict[str, Array],
    batch_aux: Any,
    accumulate: int,
) -> tuple[Array, Any, Any]:
    """Loss and gradient of the batch, the sums of those of `accumulate` micro-batches, one after the other; and new
    statistics.

    Batch statistics are those of a micro-batch, as everywhere; they move once for each.
    """
    params, statistics = weights
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if accumulate == 1:
        (loss, statistics), grads = value_and_grad(params, statistics, parts, batch_aux)
        return loss, grads, statistics
    # Micro-batch a is examples a, a + A, ...: each device's share of the batch then yields its share of every part.
    split = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), parts)

    def add(carry: Any, part: dict[str, Array]) -> tuple[Any, None]:
        total, statistics = carry
        (loss, statistics), grads = value_and_grad(params, statistics, part, batch_aux)
        return (jax.tree.map(jnp.add, total, (loss, grads)), statistics), None

    zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    ((loss, grads), statistics), _ = jax.lax.scan(add, (zero, statistics), split)
    return loss, grads, statistics


def make_eval_step(
    graphdef: Any, objective: Objective, *, detail: bool = False
) -> Callable[[tuple[Any, Any], Batch], dict[str, Array]]:
    """Return the step `(weights, batch) -> sums` of `Objective.statistics`, with the mask added to "each"."""

    def eval_step(weights: tuple[Any, Any], batch: Batch) -> dict[str, Array]:
        found = objective.statistics(nnx.merge(graphdef, *weights), batch, detail=detail)
        if "each" in found:
            found |= {"each": keep_whole(dict(found["each"]) | {"mask": batch["mask"]})}
        return found

    return eval_step


def make_probe_step(
    graphdef: Any,
    objective: Objective,
    measures: Sequence[str],
    reduce: Callable[[Array], Any] = conditioning.condition,
) -> Callable[[tuple[Any, Any], Batch], dict[str, Any]]:
    """The step `(weights, batch) -> {measure: Summary or Reading}`, leading axes L B, reduced inside each layer.

    Raises:
        ConfigError: a measure that is not known; when traced, one that applies to no layer of the model, or a model
            whose taps come back under other names than its `stacks` have.
    """
    tap = conditioning.tap(measures, reduce)

    def probe_step(weights: tuple[Any, Any], batch: Batch) -> dict[str, Any]:
        model = nnx.merge(graphdef, *weights)
        _, taps = model(*objective.inputs(batch), tap=tap)
        if taps.keys() != (declared := model.stacks()).keys():
            raise ConfigError(
                f"{type(model).__module__} returns taps of {', '.join(taps) or 'nothing'}, and its stacks are "
                f"{', '.join(declared)}. Return those, or say others: `stacks` of layers/families.py."
            )
        return conditioning.by_name(taps, measures)

    return probe_step


def probe_record(found: dict[str, Any]) -> dict[str, dict[str, list]]:
    """{measure: {figure: [one a layer]}} for metrics.jsonl; `conditioning.digest` says what the figures are."""
    layers = {name: conditioning.digest(values) for name, values in found.items()}
    figures = ("median", "q10", "q90", "singular", "not_finite", "shape")
    return {
        name: {key: [layer[key] for layer in digest] for key in figures if key in digest[0]}
        for name, digest in layers.items()
    }


def evaluate(
    eval_step: Callable[[Any, Batch], dict[str, Array]],
    metrics: Callable[[Mapping[str, Any]], dict[str, Any]],
    weights: Mapping[str, Any],
    batches: Iterable[Batch],
) -> dict[str, Any]:
    """Return `metrics` over all examples for each named set of weights: {"": state.weights, "ema_": state.ema}.

    Sums leave the device once a batch and are added in float64, counts in int64, so neither the batch size nor padding
    shows. A batch is asked for when all but the last IN_FLIGHT before it are done.
    """
    running: collections.deque[dict[str, Any]] = collections.deque()
    found: dict[str, list[dict[str, np.ndarray]]] = {prefix: [] for prefix in weights}

    def fetch() -> None:
        for prefix, sums in jax.device_get(running.popleft()).items():
            found[prefix].append(sums)

    for batch in batches:
        running.append({prefix: eval_step(chosen, batch) for prefix, chosen in weights.items()})
        if len(running) > IN_FLIGHT:
            fetch()
    while running:
        fetch()
    result: dict[str, Any] = {}
    for prefix, sums in found.items():
        totals = {name: _total([part[name] for part in sums]) for name in sums[0] if name != "each"}
        if "each" in sums[0]:
            totals["each"] = _present([part["each"] for part in sums])
        result |= {f"{prefix}{name}": value for name, value in metrics(totals).items()}
        result["examples"] = int(totals["examples"])
    return result


def _total(parts: Sequence[np.ndarray]) -> Any:
    wide = np.float64 if np.issubdtype(parts[0].dtype, np.floating) else np.int64
    return np.sum(parts, axis=0, dtype=wide)


def _present(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Of each example that is no padding."""
    names = parts[0].keys() - {"mask"}
    return {name: np.concatenate([part[name][part["mask"]] for part in parts]) for name in names}
