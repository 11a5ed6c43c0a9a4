"""Training of small language models for the study: runs of one shape that differ in seed and learning rate.

On an accelerator all runs are one vmapped program, since small steps cost launches and not arithmetic; on a CPU they
train one after another, which is faster there. Nothing is saved: a run takes minutes, and a finished one is a row.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer.config import ConfigDict
from leanformer.training import train_setup


WINDOW = 25  # steps over which a training loss is averaged
TUNING_CHAPTERS = 3  # every third held-out chapter chooses learning rates, the others give the result
Weights = Any


class Result(NamedTuple):
    """What a run leaves.

    Attributes:
        tuning_loss: nats per token of the held-out chapters that choose the learning rate.
        loss: nats per token of the other held-out chapters.
        curve: mean training loss of each WINDOW steps.
        entropy: median over layers, rows and heads of the entropy of attention in nats, on 8 held-out rows.
        params: number of parameters.
        date: end of the run, UTC.
        device: kind of device.
    """

    tuning_loss: float
    loss: float
    curve: list[float]
    entropy: float
    params: int
    date: str
    device: str


def train(
    configs: Sequence[ConfigDict],
    *,
    stop: int | None = None,
    start: Callable[[Any], Any] = lambda params: params,
    on_window: Callable[[int, Sequence[Weights]], None] | None = None,
) -> list[Result]:
    """Train runs that differ in `seed` and `optim.lr` only, and return their results in the same order.

    Args:
        configs: configs of language modelling on one text.
        stop: last step; the end of the schedule if None.
        start: function that changes the initial parameters.
        on_window: called every WINDOW steps with the step and the (parameters, statistics) of each run.
    """
    if jax.default_backend() == "cpu" and len(configs) > 1:
        return [train([c], stop=stop, start=start, on_window=on_window)[0] for c in configs]
    runs = [train_setup.build(c, examples=None) for c in configs]
    first, last = runs[0], stop or runs[0].intervals.total
    states = [_initial(run, start) for run in runs]
    keys = [jax.random.split(jax.random.key(c.seed))[1] for c in configs]
    step = jax.jit(_step(runs), donate_argnums=0)
    state, key = (states[0], keys[0]) if len(runs) == 1 else (_stack(states), jnp.stack(keys))
    curve = []
    for number, batch in enumerate(_batches(runs, last), 1):
        state, metrics = step(state, batch, key)
        if number % WINDOW == 0:
            curve.append(np.atleast_1d(jax.device_get(metrics["loss"])))
            if on_window:
                on_window(number, [_member(state, i, len(runs)).weights for i in range(len(runs))])
    losses = np.array(curve).T
    finals = [_member(state, i, len(runs)).weights for i in range(len(runs))]
    return [_result(first, weights, [float(x) for x in line]) for weights, line in zip(finals, losses, strict=True)]


def token_losses(graphdef: Any, weights: Weights, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of every target in nats, B T; 0 where a target is negative."""
    logits, _ = nnx.merge(graphdef, *weights)(tokens)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, nats, 0.0)


def chapter_losses(graphdef: Any, weights: Weights, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed nats and the number of tokens of each held-out chapter, both float64 (chapters,)."""
    read, nats = jax.jit(lambda *args: token_losses(graphdef, *args)), []
    for first in range(0, len(rows), 64):
        some = [rows[i] for i in range(first, min(first + 64, len(rows)))]
        tokens, targets = (np.stack([row[name] for row in some]) for name in ("tokens", "targets"))
        nats.append(np.asarray(read(weights, tokens, targets)).ravel())
    flat, ends = np.concatenate(nats)[: len(rows.corpus)].astype(np.float64), rows.corpus.ends
    starts = np.concatenate([[0], ends[:-1]])
    return np.add.reduceat(flat, starts), (ends - starts).astype(np.float64)


def _result(run: Any, weights: Weights, curve: list[float]) -> Result:
    data = run.task.data
    rows = data.open(run.config.data.eval_split)
    nats, tokens = chapter_losses(run.model.graphdef, weights, rows)
    tuning = np.arange(len(tokens)) % TUNING_CHAPTERS == 0
    probe = jax.jit(run.model.probe_step(run.task.objective, ("attention_entropy",)))
    batch = {"tokens": np.stack([rows[i]["tokens"] for i in range(8)])}
    return Result(
        tuning_loss=float(nats[tuning].sum() / tokens[tuning].sum()),
        loss=float(nats[~tuning].sum() / tokens[~tuning].sum()),
        curve=curve,
        entropy=float(np.median(jax.device_get(probe(weights, batch)["attention_entropy"].value))),
        params=sum(x.size for x in jax.tree.leaves(weights[0])),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        device=jax.devices()[0].device_kind,
    )


def _initial(run: Any, start: Callable[[Any], Any]) -> Any:
    params, statistics = run.model.random_weights(run.config.seed)
    return run.make_state((start(params), statistics))


def _batches(runs: Sequence[Any], last: int) -> Iterator[dict[str, np.ndarray]]:
    sources = [run.train_batches(run.task.data.open(run.config.data.train_split)) for run in runs]
    for step in range(last):
        hosts = [source[step] for source in sources]
        yield {
            name: hosts[0][name] if len(hosts) == 1 else np.stack([h[name] for h in hosts]) for name in runs[0].batch
        }


def _step(runs: Sequence[Any]) -> Callable[..., Any]:
    if len(runs) == 1:
        return runs[0].train_step

    def one(state: Any, batch: Any, key: Any, rate: Any, b1: Any) -> Any:
        return runs[0].make_step(lambda _: (rate, b1))(state, batch, key)

    def step(states: Any, batches: Any, keys: Any) -> Any:
        rates, moments = zip(*(run.schedule(states.step[0]) for run in runs), strict=True)
        return jax.vmap(one, in_axes=(0, 0, 0, 0, None))(states, batches, keys, jnp.stack(rates), moments[0])

    return step


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _member(tree: Any, index: int, number: int) -> Any:
    return tree if number == 1 else jax.tree.map(lambda leaf: leaf[index], tree)
