"""How many heads attend to the previous token, and how alike heads are: the line of 2026-11-29, 15:43, of PLAN2.md.

    python -m study.heads.patterns train [--arms=NAME,...] [--seeds=0,1,2] [--rows=FILE] [--tiny]
    python -m study.heads.patterns                                        # what the rows say

A row is one run at one step, in study/data/patterns.csv or --rows: the previous-token mass of the head that has most,
and the mean mass over heads of the layer that has most, on 64 held-out rows; the cosine of W_Q W_Kᵀ of two heads, mean
over layers and pairs within a group of heads / 4, and of different groups.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer import conditioning
from leanformer.analysis import statistics
from study.heads import late, mechanism, trainer
from study.tables import Estimate


ROWS = mechanism.ROWS.with_name("patterns.csv")
FIELDS = ("arm", "seed", "step", "train_loss", "first", "mean", "within", "between")
NAMES = ("32", "4 low rank", "32 tied until 500", "32 alike")
LR, SEEDS, BATCH, GROUPS = 4e-3, (0, 1, 2), 64, 4


def masses(graphdef: Any, weights: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean mass of the previous token by layer and head."""
    tap = conditioning.tap(["attention_probabilities"], late.head_masses(1))
    _, taps = nnx.merge(graphdef, *weights)(tokens, tap=tap)
    return jnp.mean(conditioning.by_name(taps, ["attention_probabilities"])["attention_probabilities"], 1)


def cosines(query: jax.Array, key: jax.Array) -> dict[str, float]:
    """Return the mean cosine of W_Q W_Kᵀ of pairs of heads within a group, NaN without pairs, and between groups.

    Args:
        query: kernels of the projections to queries, layers D N H; the heads are in GROUPS groups.
        key: those to keys.
    """
    inner = np.einsum("ldnh,ldmg->lnmhg", query, query), np.einsum("ldnh,ldmg->lnmhg", key, key)
    products = np.einsum("lnmhg,lnmhg->lnm", *inner)  # of W_Q W_Kᵀ, without forming it
    norms = np.sqrt(np.einsum("lnn->ln", products))
    found = (products / norms[:, :, None] / norms[:, None]).mean(0)
    group = np.arange(len(found)) * GROUPS // len(found)
    same, pairs = group[:, None] == group, ~np.eye(len(found), dtype=bool)
    return {
        "within": float(found[same & pairs].mean()) if (same & pairs).any() else float("nan"),
        "between": float(found[~same].mean()),
    }


def run(name: str, seed: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Train a run and return its rows, one for each step that is measured."""
    arm, measured = mechanism.ARMS[name], []
    c = mechanism.get_config(arm, LR, seed, tiny=tiny)

    def observe(end: Callable[[int, Any], None], setup: Any) -> Callable[[int, Any], None]:
        held_out = setup.task.data.open(c.data.eval_split)
        tokens = np.stack([held_out[i]["tokens"] for i in range(4 if tiny else BATCH)])
        read = jax.jit(functools.partial(masses, setup.model.graphdef))

        def observer(step: int, weights: Any) -> None:
            end(step, weights)
            found = np.asarray(read(weights, tokens))
            attention = weights[0]["blocks"]["layers"]["attention"]
            values = {"first": found.max(), "mean": found.mean(1).max()}
            values |= cosines(*(np.asarray(attention[part]["kernel"], np.float64) for part in ("query", "key")))
            if step:  # no training loss belongs to the start
                measured.append({"arm": name, "seed": seed, "step": step} | {k: f"{x:.4f}" for k, x in values.items()})

        return observer

    with mechanism.intervention(arm) as end:
        start = functools.partial(mechanism.start_of, arm)
        result = trainer.train(c, start=start, observe=functools.partial(observe, end))
    return [row | {"train_loss": f"{loss:.4f}"} for row, loss in zip(measured, result.curve, strict=True)]


def spans(rows: Sequence[dict[str, Any]], arm: str) -> dict[int, float]:
    """Return by seed the steps from half of the last mass of the first head to half of the last mean over heads."""
    result = {}
    for seed in SEEDS:
        of_run = sorted((r for r in rows if (r["arm"], r["seed"]) == (arm, seed)), key=lambda r: r["step"])
        if of_run:
            steps = [r["step"] for r in of_run]
            first, mean = (
                late.first_step(steps, [r[name] for r in of_run], of_run[-1][name] / 2) for name in ("first", "mean")
            )
            result[seed] = mean - first
    return result


def longer(rows: Sequence[dict[str, Any]]) -> statistics.Difference | None:
    """Return how much longer that takes 32 heads than 4 with queries and keys as small; None if a run is missing."""
    many, few = (spans(rows, arm) for arm in NAMES[:2])
    if not set(many) == set(few) == set(SEEDS):
        return None
    return statistics.paired(*(np.array([x[seed] for seed in SEEDS]) for x in (many, few)))


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the measures by arm and step, means over seeds, and the rule's verdict."""
    for arm, step in itertools.product(dict.fromkeys(r["arm"] for r in rows), range(100, 1001, 100)):
        some = [r for r in rows if (r["arm"], r["step"]) == (arm, step)]
        yield f"{arm}, step {step}: " + ", ".join(f"{x} {np.mean([r[x] for r in some]):.3f}" for x in FIELDS[3:])
    rule = longer(rows)
    if rule:
        yield f"From the first head to the mean, 32 heads after 4: {Estimate.of(rule):+.0f} steps"
    yield f"Heads of a split find a pattern one after the other: {verdict(rule)}"


def verdict(rule: statistics.Difference | None) -> str:
    """Return "holds" if the interval is above 0, "refuted" if it is below 25 steps."""
    if rule is None:
        return "not run"
    interval = rule.interval()
    return "holds" if interval.low > 0 else "refuted" if interval.high < trainer.WINDOW else "undecided"


def main() -> None:
    trainer.command(__doc__, run, report, arms=NAMES, seeds=SEEDS, path=ROWS, fields=FIELDS)


if __name__ == "__main__":
    main()
