"""Training, evaluation and probe steps as functions of arrays for `jax.jit`, and exact evaluation over a split."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer import conditioning
from leanformer.errors import ConfigError
from leanformer.runtime.mesh import constrain_replicated
from leanformer.tasks import Batch, Objective


IN_FLIGHT = 2  # steps dispatched ahead: enough to keep the device busy, with few batches in memory
LARGEST = float(np.finfo(np.float32).max) / 16  # largest valid parameter, so that averages of parameters are finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state that a step reads and writes. Leaves are arrays, shapes or shardings, so they have no types."""

    step: Any  # int32, number of steps so far, including skipped ones; the next batch is number `step`
    params: Any
    statistics: Any  # of batch normalisation and σReparam, updated by the forward pass; empty in models without them
    moments: Any  # state of the optimizer
    ema: Any  # EMA of (parameters, statistics); None if the run keeps none
    skipped: Any  # int32, number of steps so far that were skipped, or left a parameter too large or not finite
    skipped_in_row: Any  # int32, number of consecutive such steps up to now
    window: dict[str, Any]  # sums since the last multiple of log_every, which survive a resume

    @property
    def weights(self) -> tuple[Any, Any]:
        """Weights of a forward pass, for `nnx.merge(graphdef, *weights)`."""
        return self.params, self.statistics


def init_state(weights: tuple[Any, Any], optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """Return the state at step 0. Call this under `jit`, so that arrays get their shardings, or under `eval_shape`."""
    params, statistics = weights
    return TrainState(
        step=jnp.int32(0),
        params=params,
        statistics=statistics,
        moments=optimizer.init(params),
        ema=jax.tree.map(jnp.copy, weights) if ema else None,
        skipped=jnp.int32(0),
        skipped_in_row=jnp.int32(0),
        window={name: jnp.float32(0) for name in ("loss", "grad_norm", "steps")},
    )


def make_gradient(
    graphdef: Any, objective: Objective, *, freeze: Callable[[Any], Any] = lambda params: params, accumulate: int = 1
) -> Callable[[tuple[Any, Any], Batch, Key[Array, ""]], tuple[Array, Any, Any]]:
    """Return the function `(weights, batch, key of the step) -> (loss, gradients, new statistics)`, to be jitted.

    Weights are (parameters, batch statistics); the loss is the mean over the batch. `freeze` stops the gradients of
    frozen parameters; the gradients of `accumulate` micro-batches are summed.
    """

    def loss_of(
        params: Any, statistics: Any, part: dict[str, Array], batch_aux: Any, denominator: Any
    ) -> tuple[Float[Array, ""], Any]:
        model = nnx.merge(graphdef, freeze(params), statistics)
        key = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part["key"], 1)  # the objective uses 0
        loss = objective.loss(model, part, batch_aux, key) / denominator
        return loss, nnx.as_pure(nnx.state(model, nnx.BatchStat))

    def gradient(weights: tuple[Any, Any], batch: Batch, key: Key[Array, ""]) -> tuple[Array, Any, Any]:
        batch_key, shared_key = jax.random.split(key)
        parts, batch_aux = objective.prepare_train_batch(batch, batch_key, shared_key)
        loss = functools.partial(loss_of, denominator=objective.loss_denominator(batch))
        return _gradient(loss, weights, parts, batch_aux, accumulate)

    return gradient


def make_train_step(
    gradient: Callable[..., tuple[Array, Any, Any]],  # result of `make_gradient`
    optimizer: optax.GradientTransformation,  # without learning rate
    schedule: Callable[[Array], tuple[Array, Any]],  # from the step to (learning rate, beta1)
    *,
    divergence_loss: float,  # above which a step is skipped
    clip_norm: float,  # 0 for no limit
    ema: float,  # decay; 0 for no EMA weights
    log_every: int,  # steps
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Return the training step (state, batch, key of the run) -> (state, metrics), to be jitted with the state donated.

    A step whose loss or gradient is not finite, or whose loss is above `divergence_loss`, is skipped: it changes no
    weights, moments or statistics. A step after which a parameter is above LARGEST or not finite also counts as
    skipped, and so do the steps after it, because the state is not healthy.

    Metrics are scalars on the device: loss and grad_norm, means over the steps since the last multiple of `log_every`
    without skipped ones; lr; skipped, the number of skipped steps so far; skipped_in_row, of consecutive ones;
    last_loss, the loss of this step; and bad_leaf, the index of the first parameter whose gradient is not finite, or
    which has become too large, -1 if there is none.
    """

    def train_step(state: TrainState, batch: Batch, key: Key[Array, ""]) -> tuple[TrainState, dict[str, Array]]:
        loss, grads, statistics = gradient(state.weights, batch, jax.random.fold_in(key, state.step))

        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(squares.sum())
        finite = jnp.isfinite(norm) & (loss <= divergence_loss)
        # The barrier makes XLA compute scalars once, and not inside the loops over all parameters.
        rate, b1 = schedule(state.step)
        rate, norm, finite = jax.lax.optimization_barrier((rate, norm, finite))
        if clip_norm:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        update: Any = optimizer.update  # with extra arguments
        direction, moments = update(grads, state.moments, state.params, b1=b1)
        params = keep(jax.tree.map(lambda p, d: p - rate * d, state.params, direction), state.params)
        # With a fixed decay, the random initial weights would dominate the EMA for 1 / (1 - decay) steps.
        decay = jnp.minimum(ema, (1 + state.step) / (10 + state.step))
        average = ema and jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), state.ema, (params, statistics))

        fits = jnp.stack([jnp.all(jnp.abs(x) <= LARGEST) for x in jax.tree.leaves(params)])
        healthy = finite & fits.all()
        fresh = state.step % log_every == 0
        new = {"loss": loss, "grad_norm": norm, "steps": jnp.float32(1)}
        window = {
            name: jnp.where(fresh, 0, total) + jnp.where(healthy, new[name], 0) for name, total in state.window.items()
        }
        state = TrainState(
            step=state.step + 1,
            params=params,
            statistics=keep(statistics, state.statistics),
            moments=keep(moments, state.moments),
            ema=keep(average, state.ema) if ema else None,
            skipped=state.skipped + ~healthy,
            skipped_in_row=jnp.where(healthy, 0, state.skipped_in_row + 1),
            window=window,
        )
        bad = jnp.where(finite, ~fits, ~jnp.isfinite(squares))
        return state, {
            **{name: state.window[name] / state.window["steps"] for name in ("loss", "grad_norm")},
            "lr": rate,
            "skipped": state.skipped,
            "skipped_in_row": state.skipped_in_row,
            "last_loss": loss,
            "bad_leaf": jnp.where(bad.any(), jnp.argmax(bad), -1),
        }

    return train_step


def _gradient(
    loss_of: Callable[[Any, Any, dict[str, Array], Any], tuple[Array, Any]],
    weights: tuple[Any, Any],
    parts: dict[str, Array],
    batch_aux: Any,
    accumulate: int,
) -> tuple[Array, Any, Any]:
    """Return the loss and gradient of a batch, summed over `accumulate` micro-batches, and the new statistics."""
    params, statistics = weights
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if accumulate == 1:
        (loss, statistics), grads = value_and_grad(params, statistics, parts, batch_aux)
        return loss, grads, statistics
    # Micro-batch a has examples a, a + A, ..., so that each device's shard of the batch has its shard of every part.
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
    """Return the step (weights, batch) -> sums of `Objective.statistics`, to be jitted.

    Values of single examples under "per_example" have the `mask` of the batch added, False for padding. `detail` adds
    statistics that are too expensive for evaluations during training.
    """

    def eval_step(weights: tuple[Any, Any], batch: Batch) -> dict[str, Array]:
        sums = objective.statistics(nnx.merge(graphdef, *weights), batch, detail=detail)
        if "per_example" in sums:
            sums |= {"per_example": constrain_replicated(dict(sums["per_example"]) | {"mask": batch["mask"]})}
        return sums

    return eval_step


def make_probe_step(
    graphdef: Any,
    objective: Objective,
    measures: Sequence[str],
    reduce: Callable[[Array], Any] = conditioning.condition,
) -> Callable[[tuple[Any, Any], Batch], dict[str, Any]]:
    """Return the probe step (weights, batch) -> {measure of activations: Summary or Reading}, with leading axes L B.

    `reduce` is applied to matrices inside each layer. Raises ConfigError if a measure is unknown, or during tracing if
    one applies to no layer.
    """
    tap = conditioning.tap(measures, reduce)

    def probe_step(weights: tuple[Any, Any], batch: Batch) -> dict[str, Any]:
        model = nnx.merge(graphdef, *weights)
        with jax.default_matmul_precision("highest"):  # TF32 would hide small singular values
            _, taps = model(*objective.inputs(batch), tap=tap)
        if taps.keys() != (declared := model.stacks()).keys():
            raise ConfigError(
                f"{type(model).__module__} returns taps of {', '.join(taps) or 'nothing'}, but declares the stacks "
                f"{', '.join(declared)}. Return taps of these stacks, or override `stacks` (layers/model_base.py)."
            )
        return conditioning.by_name(taps, measures)

    return probe_step


def probe_record(summaries: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return the record of a probe for metrics.jsonl, {measure: {statistic: [one value per layer]}}.

    A Summary or Reading has a leading axis L, or is a list of them by group of layers; Readings have no singular and
    shape.
    """
    layers = {name: conditioning.digest(values) for name, values in summaries.items()}
    statistics = ("median", "q10", "q90", "singular", "not_finite", "shape")
    return {
        name: {key: [layer[key] for layer in digest] for key in statistics if key in digest[0]}
        for name, digest in layers.items()
    }


def evaluate(
    eval_step: Callable[[Any, Batch], dict[str, Array]],
    metrics: Callable[[Mapping[str, Any]], dict[str, Any]],
    weights: Mapping[str, Any],
    batches: Iterable[Batch],
) -> dict[str, Any]:
    """Return {name: metric} over all examples of a split for each set of weights, and the number of them as "examples".

    Sums are fetched once per batch and added in float64, counts in int64, so the result does not depend on the batch
    size or on padding.
    Sets of weights are named by the prefix of their metrics: {"": state.weights, "ema_": state.ema}.
    """
    running: collections.deque[dict[str, Any]] = collections.deque()
    fetched: dict[str, list[dict[str, Any]]] = {prefix: [] for prefix in weights}

    def fetch() -> None:
        for prefix, sums in jax.device_get(running.popleft()).items():
            fetched[prefix].append(sums)

    for batch in batches:
        running.append({prefix: eval_step(chosen, batch) for prefix, chosen in weights.items()})
        if len(running) > IN_FLIGHT:
            fetch()
    while running:
        fetch()
    result: dict[str, Any] = {}
    for prefix, sums in fetched.items():
        totals = {name: _total([part[name] for part in sums]) for name in sums[0] if name != "per_example"}
        if "per_example" in sums[0]:
            totals["per_example"] = _drop_padding([part["per_example"] for part in sums])
        result |= {f"{prefix}{name}": value for name, value in metrics(totals).items()}
        result["examples"] = int(totals["examples"])
    return result


def _total(parts: Sequence[np.ndarray]) -> Any:
    wide = np.float64 if np.issubdtype(parts[0].dtype, np.floating) else np.int64
    return np.sum(parts, axis=0, dtype=wide)


def _drop_padding(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the concatenated values of all examples that are not padding."""
    names = parts[0].keys() - {"mask"}
    return {name: np.concatenate([part[name][part["mask"]] for part in parts]) for name in names}
