"""Training of small language models for the study, without a workdir.

Nothing is saved: a run takes minutes, and a finished one is a row.
"""

import argparse
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer.config import ConfigDict
from leanformer.training import train_setup
from study.heads import language


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
    config: ConfigDict,
    *,
    stop: int | None = None,
    start: Callable[[Any], Any] = lambda params: params,
    observe: Callable[[Any], Callable[[int, Weights], None]] | None = None,
) -> Result:
    """Train a model of language modelling and return its result.

    Args:
        config: config of the run.
        stop: last step; the end of the schedule if None.
        start: function that changes the initial parameters.
        observe: function from the set-up to a function of the step and the (parameters, statistics), which is called
            before the first step and every WINDOW steps.
    """
    setup = train_setup.set_up_training(config, examples=None)
    params, statistics = setup.model.random_weights(config.seed)
    state, key = setup.make_state((start(params), statistics)), setup.run_key()
    observer = observe(setup) if observe else lambda step, weights: None
    observer(0, state.weights)
    step, curve = jax.jit(setup.train_step, donate_argnums=0), []
    batches = setup.train_batches(setup.task.data.open(config.data.train_split))
    for number in range(1, (stop or setup.intervals.total) + 1):
        host = batches[number - 1]
        state, metrics = step(state, {name: host[name] for name in setup.batch}, key)
        if number % WINDOW == 0:
            curve.append(float(metrics["loss"]))
            observer(number, state.weights)
    return _result(setup, state.weights, curve)


def train_together(
    config: ConfigDict,
    members: Sequence[tuple[float, int]],
    *,
    start: Callable[[Any], Any] = lambda params: params,
) -> list[Result]:
    """Train runs of one shape as one vmapped program, which makes small runs cheap on a GPU; return their results.

    The results equal `train`'s up to rounding.

    Args:
        config: config of the runs.
        members: (learning rate, seed) of each run.
        start: function that changes the initial parameters.
    """

    def build(lr: float, seed: int) -> Any:
        member = config.copy_and_resolve_references().unlock()
        member.seed, member.optim.lr = seed, lr
        return train_setup.set_up_training(member.lock(), examples=None)

    setups = [build(lr, seed) for lr, seed in members]
    first = setups[0]

    def step(state: Any, batch: Any, key: jax.Array, ratio: jax.Array) -> tuple[Any, jax.Array]:
        """Train one member with `ratio` times the learning rate of the first: a change of weights is linear in it."""
        new, metrics = first.train_step(state, batch, key)
        params = jax.tree.map(lambda old, x: old + ratio * (x - old), state.params, new.params)
        return dataclasses.replace(new, params=params), metrics["loss"]

    def begin(setup: Any) -> Any:
        params, statistics = setup.model.random_weights(setup.config.seed)
        return setup.make_state((start(params), statistics))

    def stack(trees: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    total = first.intervals.total
    rates = np.array([[float(setup.schedule.learning_rate(i)) for setup in setups] for i in range(total)])
    ratios = (rates / rates[:, :1]).astype(np.float32)
    states, keys = stack([begin(setup) for setup in setups]), stack([setup.run_key() for setup in setups])
    streams = [s.train_batches(s.task.data.open(s.config.data.train_split)) for s in setups]
    all_steps, curves = jax.jit(jax.vmap(step), donate_argnums=0), []
    for number in range(1, total + 1):
        hosts = [batches[number - 1] for batches in streams]
        batch = {name: np.stack([host[name] for host in hosts]) for name in first.batch}
        states, losses = all_steps(states, batch, keys, ratios[number - 1])
        if number % WINDOW == 0:
            curves.append(losses)
    weights = [jax.tree.map(lambda x, i=i: x[i], states.weights) for i in range(len(setups))]
    return [_result(s, w, c) for s, w, c in zip(setups, weights, np.transpose(curves).tolist(), strict=True)]


def command(
    doc: str | None,
    run: Callable[..., list[dict[str, Any]]],
    report: Callable[[list[dict[str, Any]]], Iterable[str]],
    *,
    arms: Sequence[str],
    seeds: Sequence[int],
    path: Path,
    fields: Sequence[str],
) -> None:
    """Run the command of a part whose runs are measured while they train: train the missing runs, or print a report.

    Args:
        doc: help text.
        run: function from an arm's name, a seed and `tiny` to the rows of a run, one for each step that is measured.
        report: function from rows to lines of text.
        arms: names of the arms, by default all of them are trained.
        seeds: seeds, likewise.
        path: table of rows.
        fields: its columns.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("train",))
    parser.add_argument("--arms", default=",".join(arms))
    parser.add_argument("--seeds", default=",".join(map(str, seeds)))
    parser.add_argument("--rows", type=Path, default=path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.what:
        print(*report(language.read_rows(options.rows)), sep="\n")
        return
    for seed in map(int, options.seeds.split(",")):
        for name in options.arms.split(","):
            if any((row["arm"], row["seed"]) == (name, seed) for row in language.read_rows(options.rows)):
                continue
            rows = run(name, seed, tiny=options.tiny)
            for row in rows:
                language.append_row(row, options.rows, fields)
            print(f"{name}, seed {seed}: {rows[-1]}", flush=True)


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


def _result(setup: Any, weights: Weights, curve: list[float]) -> Result:
    data = setup.task.data
    rows = data.open(setup.config.data.eval_split)
    nats, tokens = chapter_losses(setup.model.graphdef, weights, rows)
    tuning = np.arange(len(tokens)) % TUNING_CHAPTERS == 0
    probe = jax.jit(setup.model.probe_step(setup.task.objective, ("attention_entropy",)))
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
