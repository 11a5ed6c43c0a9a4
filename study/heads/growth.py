"""How fast attention logits grow with narrow and wide heads: part E9 of PLAN2.md.

    python -m study.heads.growth train [--arms=NAME,...] [--seeds=0,1,2] [--rows=FILE] [--tiny]
    python -m study.heads.growth                                        # what the rows say

A row is one run at one step, in study/data/growth.csv or --rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer.analysis import statistics
from study.heads import mechanism, trainer
from study.tables import Estimate


ROWS = mechanism.ROWS.with_name("growth.csv")
FIELDS = ("arm", "num_heads", "head_dim", "seed", "step", "spread")
BASELINES, OTHERS = ("1", "4", "16", "32"), ("32 fast", "32 start", "32 rate", "32 rank")
LR, STOP, SEEDS, BATCH, READ = 4e-3, 400, (0, 1, 2), 8, 100  # READ: step of the rule
LOW, HIGH = 0.75, 1.25  # slopes that the rule allows


def spread(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return the standard deviation of q·k over the keys that a query sees, mean over queries, B N from two B T N H.

    The first query sees one key and is left out.
    """
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.std(logits, -1, where=jnp.tril(jnp.ones(logits.shape[-2:], bool)))[..., 1:].mean(-1)


def run(name: str, seed: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Train a run and return its rows, one for each step that is measured."""
    arm, rows = mechanism.ARMS[name], []
    c = mechanism.get_config(arm, LR, seed, tiny=tiny)
    shown = scale_of(name) * c.model.head_dim**0.5  # a block shows q times this

    def observe(setup: Any) -> Callable[[int, Any], None]:
        held_out = setup.task.data.open(c.data.eval_split)
        tokens = np.stack([held_out[i]["tokens"] for i in range(BATCH)])

        @jax.jit
        def probe(weights: Any) -> jax.Array:
            _, taps = nnx.merge(setup.model.graphdef, *weights)(
                jnp.asarray(tokens), tap=lambda arrays: {"spread": spread(arrays["q"], arrays["k"])}
            )
            return jnp.mean(taps["blocks"]["spread"]) / shown

        def observer(step: int, weights: Any) -> None:
            row = {"arm": name, "num_heads": arm.heads, "head_dim": c.model.head_dim, "seed": seed, "step": step}
            rows.append(row | {"spread": f"{probe(weights):.5g}"})

        return observer

    start = functools.partial(mechanism.scale_queries_and_keys, factor=arm.start_scale)
    trainer.train(c, stop=50 if tiny else STOP, start=start, observe=observe)
    return rows


def slope(rows: Sequence[dict[str, Any]], step: int) -> statistics.Difference | None:
    """Return the slope of log q·k on log d over the baselines, by seed; None if a run is missing."""
    found = {(row["arm"], row["seed"]): row for row in rows if row["step"] == step}
    if not all((arm, seed) in found for arm in BASELINES for seed in SEEDS):
        return None
    x = np.log([128 // int(arm) for arm in BASELINES])
    values = [np.polyfit(x, np.log([found[arm, seed]["spread"] for arm in BASELINES]), 1)[0] for seed in SEEDS]
    return statistics.paired(np.array(values), np.zeros(len(values)))


def ratio(rows: Sequence[dict[str, Any]], step: int, arm: str = "32") -> float:
    """Return the scaled logits of one head over those of an arm, means over seeds."""
    one, other = (
        np.mean([r["spread"] for r in rows if (r["arm"], r["step"]) == (name, step)]) * scale_of(name)
        for name in ("1", arm)
    )
    return float(one / other)


def scale_of(name: str) -> float:
    """Return the factor of q·k of an arm of width 128."""
    arm = mechanism.ARMS[name]
    return arm.logit_scale or (128 // arm.heads) ** -0.5


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the mean logits q·k and q·k/√d of each arm by step, the slope on d, and the rule's verdict."""
    for step in sorted({row["step"] for row in rows}):
        yield f"step {step}: q·k, and times the arm's factor"
        for arm in dict.fromkeys(row["arm"] for row in rows):
            some = [row["spread"] for row in rows if (row["arm"], row["step"]) == (arm, step)]
            yield f"  {arm}: {np.mean(some):.4g}, {np.mean(some) * scale_of(arm):.4g}"
        if of_step := slope(rows, step):
            yield f"  slope of log q·k on log d: {Estimate.of(of_step):.2f}"
    if (rule := slope(rows, READ)) is None:
        yield "The premise: not run"
        return
    interval = rule.interval()
    holds = interval.low >= LOW and interval.high <= HIGH
    yield f"The premise: {'holds' if holds else 'refuted' if interval.high < LOW else 'undecided'}"


def main() -> None:
    trainer.command(__doc__, run, report, arms=BASELINES + OTHERS, seeds=SEEDS, path=ROWS, fields=FIELDS)


if __name__ == "__main__":
    main()
