"""One training step and one evaluation step, as functions of arrays for `jax.jit`, and exact evaluation."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from leanformer import conditioning
from leanformer.optim import settled
from leanformer.state import TrainState
from leanformer.tasks import Inputs
from leanformer.tasks.distillation import Distillation, TokenLabels
from leanformer.tasks.losses import classify, rank_of_label


Batch = Mapping[str, Array]
IN_FLIGHT = 2  # steps sent ahead to the device: enough to keep it busy, few enough to hold few batches in memory
LARGEST = float(np.finfo(np.float32).max) / 16  # of a parameter: the average of two such is finite too


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned from what: the loss, and the inputs' preparation on the device."""

    loss: str
    inputs: Inputs
    lesson: Distillation | TokenLabels | None = None  # the training loss of a model that learns from a teacher too


def make_train_step(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    task: Task,
    schedule: Callable[[Array], tuple[Array, Any]],
    *,
    hold: Callable[[Any], Any],
    accumulate: int,
    clip_norm: float,
    ema: float,
    log_every: int,
    ceiling: float,
) -> Callable[[TrainState, Batch, Key[Array, ""]], tuple[TrainState, dict[str, Array]]]:
    """The step `(state, batch, key) -> (state, metrics)`; jit it with the state donated.

    `batch` has what `task.inputs` says, `label` (B) and what `task.lesson` needs; `key` is the run's key, the same at
    every step; `hold` takes the gradient from parameters that are frozen. Metrics are means over the steps since the
    last train record, those that were skipped left out, and the counters of those. A step whose loss or gradient is not
    finite, or whose loss is over `ceiling`, is skipped: it changes no weights, moments or statistics. One that leaves a
    parameter over LARGEST, or not finite, counts as skipped from then on, so that nobody takes the state for a healthy
    one.
    """

    def loss_of(params: Any, statistics: Any, part: dict[str, Array], mix: Any) -> tuple[Float[Array, ""], Any]:
        fed, targets = task.inputs.training(part, mix)
        model = nnx.merge(graphdef, hold(params), statistics)
        key = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part["key"], 1)  # 0 is the inputs' own
        if task.lesson is None:
            logits, _ = model(*fed, key=key)
            losses = classify(logits, targets, task.loss)
        else:
            heads, _ = model.heads(*fed, key=key)
            losses = task.lesson(heads, targets, part, mix)
        return losses.mean(), nnx.as_pure(nnx.state(model, nnx.BatchStat))

    def train_step(state: TrainState, batch: Batch, key: Key[Array, ""]) -> tuple[TrainState, dict[str, Array]]:
        batch_key, mix_key = jax.random.split(jax.random.fold_in(key, state.step))
        parts, mix = task.inputs.draw(batch, batch_key, mix_key)
        loss, grads, statistics = _mean_gradient(loss_of, state.weights, parts, mix, accumulate)

        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(squares.sum())
        finite = jnp.isfinite(norm) & (loss <= ceiling)
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
        bad = jnp.where(finite, ~fits, ~jnp.isfinite(squares))
        metrics = {
            "loss": window["loss"] / window["steps"],
            "grad_norm": window["grad_norm"] / window["steps"],
            "lr": rate,
            "skipped": state.skipped,
            "skipped_in_row": state.skipped_in_row,
            "last_loss": loss,
            "bad_leaf": jnp.where(bad.any(), jnp.argmax(bad), -1),
        }
        return state, metrics

    return train_step


def _mean_gradient(
    loss_of: Callable[[Any, Any, dict[str, Array], Any], tuple[Array, Any]],
    weights: tuple[Any, Any],
    parts: dict[str, Array],
    mix: Any,
    accumulate: int,
) -> tuple[Array, Any, Any]:
    """Loss and gradient of the mean over the batch, `accumulate` micro-batches one after the other; new statistics.

    Batch statistics are those of a micro-batch, as everywhere; they move once for each.
    """
    params, statistics = weights
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if accumulate == 1:
        (loss, statistics), grads = value_and_grad(params, statistics, parts, mix)
        return loss, grads, statistics
    # Micro-batch a is examples a, a + A, ...: each device's share of the batch then yields its share of every part.
    split = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), parts)

    def add(carry: Any, part: dict[str, Array]) -> tuple[Any, None]:
        total, statistics = carry
        (loss, statistics), grads = value_and_grad(params, statistics, part, mix)
        return (jax.tree.map(jnp.add, total, (loss, grads)), statistics), None

    zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    (total, statistics), _ = jax.lax.scan(add, (zero, statistics), split)
    loss, grads = jax.tree.map(lambda x: x / accumulate, total)
    return loss, grads, statistics


def make_eval_step(
    graphdef: Any, task: Task, *, confusion: bool = False
) -> Callable[[tuple[Any, Any], Batch], dict[str, Array]]:
    """The step `(weights, batch) -> sums` over the examples that `batch["mask"]` marks as present.

    With `confusion` also a matrix of counts, V V: rows are labels, columns what was taken for them.
    """

    def eval_step(weights: tuple[Any, Any], batch: Batch) -> dict[str, Array]:
        logits, _ = nnx.merge(graphdef, *weights)(*task.inputs.plain(batch))
        losses = classify(logits, jax.nn.one_hot(batch["label"], task.inputs.num_classes), task.loss)
        rank = rank_of_label(logits, batch["label"])
        mask = batch["mask"]
        counted = {"confusion": _confusion(logits, batch["label"], rank, mask)} if confusion else {}
        return {
            "loss": jnp.where(mask, losses, 0).sum(),
            "top1": jnp.sum(mask & (rank < 1)),
            "examples": jnp.sum(mask),
            **({"top5": jnp.sum(mask & (rank < 5))} if task.inputs.num_classes > 5 else {}),
            **counted,
        }

    return eval_step


def _confusion(
    logits: Float[Array, "b v"], labels: Int[Array, "b"], rank: Int[Array, "b"], mask: Bool[Array, "b"]
) -> Int[Array, "v v"]:
    """Right is what top-1 calls right; else an example is taken for the best of the other classes."""
    others = jnp.where(jax.nn.one_hot(labels, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    taken = jnp.where(rank < 1, labels, jnp.argmax(others, axis=-1))
    counts = jnp.zeros((logits.shape[-1],) * 2, jnp.int32)
    return counts.at[labels, taken].add(mask.astype(jnp.int32))


def make_probe_step(
    graphdef: Any, task: Task, measures: Sequence[str], reduce: Callable[[Array], Any] = conditioning.condition
) -> Callable[[tuple[Any, Any], Batch], dict[str, Any]]:
    """The step `(weights, batch) -> {measure: Summary or Reading}`, leading axes L B, reduced inside each layer.

    Raises:
        ConfigError: a measure that is not known; when traced, one that applies to no layer of the model.
    """
    tap = conditioning.tap(measures, reduce)

    def probe_step(weights: tuple[Any, Any], batch: Batch) -> dict[str, Any]:
        _, taps = nnx.merge(graphdef, *weights)(*task.inputs.plain(batch), tap=tap)
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
    eval_step: Callable[[Any, Batch], dict[str, Array]], weights: Mapping[str, Any], batches: Iterable[Batch]
) -> dict[str, Any]:
    """Exact means over all examples for each named set of weights: {"": state.weights, "ema_": state.ema}.

    Sums leave the device once a batch and are added in float64, so neither the batch size nor padding shows. A batch is
    asked for when all but the last IN_FLIGHT before it are done. A matrix of counts stays one, int64.
    """
    running, sums = collections.deque(), []
    for batch in batches:
        running.append({prefix: eval_step(chosen, batch) for prefix, chosen in weights.items()})
        if len(running) > IN_FLIGHT:
            sums.append(jax.device_get(running.popleft()))
    sums += jax.device_get(list(running))
    result: dict[str, Any] = {}
    for prefix in weights:
        parts = [batch[prefix] for batch in sums]
        counts = {name: sum(part[name].astype(np.int64) for part in parts) for name in parts[0] if parts[0][name].ndim}
        totals = {
            name: np.sum([part[name] for part in parts], dtype=np.float64) for name in parts[0] if name not in counts
        }
        examples = totals.pop("examples")
        result |= {f"{prefix}{name}": float(total / examples) for name, total in totals.items()}
        result |= {f"{prefix}{name}": total for name, total in counts.items()}
        result["examples"] = int(examples)
    return result
