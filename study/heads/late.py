"""What is late in models with narrow heads: part E2 of PLAN2.md.

    python -m study.heads.late train [--arms=NAME,...] [--seeds=0,1,2] [--rows=FILE] [--tiny]
    python -m study.heads.late                                        # what the rows say

Every run is measured each 25 steps: the largest previous-token mass of a head, the prefix matching of a head and the
loss on the second half of random tokens that are repeated, and the loss with one token of context. Every finished run
adds its rows, a row for each measurement, to study/data/late.csv, or to --rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import stats

from leanformer import conditioning
from leanformer.analysis import statistics
from study.heads import mechanism, trainer
from study.tables import Estimate


Steps = dict[tuple[str, int], dict[str, float]]  # of each run, (arm, seed), by what passes its level
ROWS = mechanism.ROWS.with_name("late.csv")
FIELDS = ("arm", "seed", "step", "train_loss", "previous", "prefix", "repeated_loss", "short_loss")
NAMES = ("1", "32", "32 fast", "rotary 1", "rotary 32", "rotary 32 fast", "1 fast", "rotary 1 fast")
ARMS = {
    name: arm._replace(steps=4000)
    for name, arm in (mechanism.ARMS | {"rotary 1 fast": mechanism.Arm(1, 0.5, rotary=True)}).items()
    if name in NAMES
}
LR, STOP, SEEDS, BATCH = 4e-3, 1200, (0, 1, 2), 64  # rate, steps of a schedule of 4,000, seeds, rows measured
LATE, BEGUN = 3.3, 0.1  # nats whose step is the lateness; least prefix matching that speaks of induction


def head_masses(offset: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function from attention (B, N, T, T) to the mean mass (B, N) of the key `offset` tokens before."""

    def reduce(probabilities: jax.Array) -> jax.Array:
        return jnp.diagonal(probabilities, -offset, -2, -1).mean(-1)

    return reduce


def make_probe(graphdef: Any, rows: np.ndarray, vocabulary: int) -> Callable[[Any], dict[str, jax.Array]]:
    """Return the function from weights to the measures of a model.

    Args:
        graphdef: static definition of the model.
        rows: held-out tokens, B T+1.
        vocabulary: number of tokens.
    """
    tokens, targets = rows[:, :-1], rows[:, 1:]
    half = tokens.shape[1] // 2
    repeated = np.random.default_rng(0).integers(0, vocabulary, (len(rows), half))
    repeated = np.concatenate([repeated, repeated], 1)
    after = np.where(np.arange(2 * half) < half - 1, -1, np.roll(repeated, -1, 1))
    after[:, -1] = -1  # what follows the last token is not known
    pairs = np.stack([tokens[:, :-1], tokens[:, 1:]], -1).reshape(-1, 2)
    pair_targets = np.stack([np.full(len(pairs), -1), targets[:, 1:].ravel()], -1)

    def largest_mass(weights: Any, batch: np.ndarray, offset: int) -> jax.Array:
        tap = conditioning.tap(["attention_probabilities"], head_masses(offset))
        _, taps = nnx.merge(graphdef, *weights)(jnp.asarray(batch), tap=tap)
        masses = conditioning.by_name(taps, ["attention_probabilities"])["attention_probabilities"]
        return jnp.mean(masses, 1).max()  # over layers and heads, of the mean over rows

    def mean_loss(weights: Any, batch: np.ndarray, targets: np.ndarray) -> jax.Array:
        return trainer.token_losses(graphdef, weights, batch, targets).sum() / (targets >= 0).sum()

    def probe(weights: Any) -> dict[str, jax.Array]:
        return {
            "previous": largest_mass(weights, tokens, 1),
            "prefix": largest_mass(weights, repeated, half - 1),
            "repeated_loss": mean_loss(weights, repeated, after),
            "short_loss": mean_loss(weights, pairs, pair_targets),
        }

    return jax.jit(probe)


def run(name: str, seed: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Train a run and return its rows."""
    measured = []
    c = mechanism.get_config(ARMS[name], LR, seed, tiny=tiny)

    def observe(setup: Any) -> Callable[[int, Any], None]:
        held_out = setup.task.data.open(c.data.eval_split)
        some = [held_out[i] for i in range(4 if tiny else BATCH)]
        rows = np.stack([np.append(row["tokens"], row["targets"][-1]) for row in some])
        probe = make_probe(setup.model.graphdef, rows, c.model.vocabulary)

        def observer(step: int, weights: Any) -> None:
            if step:  # no training loss belongs to the start
                values = {key: f"{x:.4f}" for key, x in probe(weights).items()}
                measured.append({"arm": name, "seed": seed, "step": step} | values)

        return observer

    result = trainer.train(c, stop=50 if tiny else STOP, observe=observe)
    return [row | {"train_loss": f"{loss:.4f}"} for row, loss in zip(measured, result.curve, strict=True)]


def first_step(steps: Sequence[float], values: Sequence[float], level: float) -> float:
    """Return the interpolated step at which values first pass a level, upwards or downwards; infinite if never."""
    side = np.sign(np.asarray(values) - level)
    crossed = np.flatnonzero(side != side[0])
    if not len(crossed):
        return float("inf")
    i = int(crossed[0])
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def lateness(rows: Sequence[dict[str, Any]]) -> Steps:
    """Return of each (arm, seed) the step of LATE nats, and the steps at which masses pass half of their last value."""
    result = {}
    for key in dict.fromkeys((row["arm"], row["seed"]) for row in rows):
        of_run = sorted((r for r in rows if (r["arm"], r["seed"]) == key), key=lambda r: r["step"])
        steps = [r["step"] for r in of_run]
        found = {"loss": first_step([x - trainer.WINDOW / 2 for x in steps], [r["train_loss"] for r in of_run], LATE)}
        for name in ("previous", "prefix"):
            values = [r[name] for r in of_run]
            found[name] = first_step(steps, values, values[-1] / 2) if values[-1] > BEGUN else float("nan")
        result[key] = found
    return result


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the steps of each arm, the rank correlations over runs, and the delays of 32 heads."""
    found = lateness(rows)
    for arm in dict.fromkeys(arm for arm, _ in found):
        of_arm = [steps for key, steps in found.items() if key[0] == arm]
        yield f"{arm}: " + ", ".join(f"{name} {np.mean([x[name] for x in of_arm]):.0f}" for name in of_arm[0])
    for name in ("previous", "prefix"):
        for positions in (None, "learned", "rotary"):
            rank, count = correlation(found, name, positions)
            if count > 3:
                yield f"rank correlation of {name} and loss, {positions or 'all'} positions, {count} runs: {rank:.2f}"
    for name in ("loss", "previous", "prefix"):
        for positions in ("", "rotary "):
            if late := delay(found, name, positions):
                yield f"delay of {positions}32 behind {positions}1, {name}: {Estimate.of(late):.0f}"


def delay(found: Steps, name: str, positions: str) -> statistics.Difference | None:
    """Return how many steps later 32 heads pass the level of `name` than one head; None if a run never does."""
    many, one = ([found.get((f"{positions}{n}", seed), {}).get(name, np.nan) for seed in SEEDS] for n in (32, 1))
    return statistics.paired(np.array(many), np.array(one)) if np.isfinite([many, one]).all() else None


def correlation(found: Steps, name: str, positions: str | None = None) -> tuple[float, int]:
    """Return Spearman's correlation of the steps of `name` and of the loss over runs, and their number.

    `positions`, "learned" or "rotary", selects runs.
    """
    chosen = [x for (arm, _), x in found.items() if positions in (None, "rotary" if "rotary" in arm else "learned")]
    pairs = [(x[name], x["loss"]) for x in chosen if np.isfinite([x[name], x["loss"]]).all()]
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic) if len(pairs) > 3 else np.nan, len(pairs)


def main() -> None:
    trainer.command(__doc__, run, report, arms=NAMES, seeds=SEEDS, path=ROWS, fields=FIELDS)


if __name__ == "__main__":
    main()
