"""Verdicts of the study's rules of decision, from its committed rows.

    python -m study.heads.verdicts

Prints for each block of PLAN.md the loss and the conditioning by number of heads, the change per doubling of heads with
its verdict, the head dimension at which heads stop paying, and each rule's verdict: "holds", "refuted", "undecided", or
"not run" with what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from leanformer import cli
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from study.heads import language
from study.heads.language import BLOCKS, SEEDS, TUNING_SEED


MARGIN = 0.01  # nats per doubling of heads, stated in PLAN.md
POSITIONS_MARGIN = 0.03  # of three doublings
DRAWS, QUANTILES = 2000, (0.025, 0.975)
LENGTH = {"F": ("I", 1, 16), "A": ("D", 4, 32), "G": ("J", 4, 32)}  # block of 4,000 steps, few and many heads
Values = Mapping[int, np.ndarray]  # by number of heads: one value per seed, in the order of the seeds


class Turn(NamedTuple):
    """Head dimension at which heads stop paying: minimum of a quadratic in log2(head dimension), 95 % interval.

    `low` is 0 and `high` infinite where the interval reaches an end of the range, beyond which nothing was trained.
    """

    value: float
    low: float
    high: float
    bound: bool  # True if the quadratic has no minimum inside the range: `value` is the end with the lower loss

    @property
    def interval(self) -> str:
        """The interval in words."""
        if self.high == np.inf:
            return f"at least {self.low:.0f}" if self.low else "not determined"
        return f"{self.low:.0f} to {self.high:.0f}" if self.low else f"at most {self.high:.0f}"


def read_values(rows: Sequence[Mapping[str, Any]], block: str, key: str) -> Values:
    """Return the values of a block's arms with at least three seeds, of the seeds that all of them have.

    Tuning runs are not counted, and an arm with fewer seeds is left out until it has them.
    """
    table: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["block"] == block and row["seed"] != TUNING_SEED:
            table.setdefault(row["num_heads"], {})[row["seed"]] = row[key]
    table = {heads: by_seed for heads, by_seed in sorted(table.items()) if len(by_seed) >= len(SEEDS)}
    seeds = sorted(set.intersection(*map(set, table.values()))) if table else []
    return {heads: np.array([by_seed[seed] for seed in seeds]) for heads, by_seed in table.items()}


def change(values: Values, few: int, many: int) -> Difference | None:
    """Return the paired difference of the arm with many heads to the arm with few; None if one was not run."""
    return statistics.paired(values[many], values[few]) if few in values and many in values else None


def judge(difference: Difference, p: float, margin: float = MARGIN) -> str:
    """Return the verdict on one doubling, `p` being its p value after Holm's correction over the block's doublings."""
    if p < 0.05:
        return "worse" if difference.value > 0 else "better"
    inside = difference.interval(0.9)
    return "equivalent" if inside.low > -margin and inside.high < margin else "inconclusive"


def doublings(values: Values) -> dict[tuple[int, int], tuple[Difference, str]]:
    """Return the change and its verdict for each pair of arms of which one has twice the heads of the other."""
    pairs = {(n, 2 * n): change(values, n, 2 * n) for n in values if 2 * n in values}
    differences = {pair: d for pair, d in pairs.items() if d is not None}
    corrected = statistics.holm([d.p_differs() for d in differences.values()])
    return {pair: (d, judge(d, p)) for (pair, d), p in zip(differences.items(), corrected, strict=True)}


def find_turn(values: Values, width: int) -> Turn:
    """Return where heads stop paying, with a bootstrap over seeds. Needs at least three arms."""
    heads = sorted(values)
    x = np.log2(width / np.array(heads))
    losses = np.array([values[n] for n in heads])  # arms x seeds

    def minimum(mean: np.ndarray) -> float:
        curve, slope, _ = np.polyfit(x, mean, 2)
        if curve > 0 and x.min() < -slope / (2 * curve) < x.max():
            return float(-slope / (2 * curve))
        return np.inf if mean[x.argmax()] < mean[x.argmin()] else -np.inf

    value = minimum(losses.mean(1))
    rng = np.random.default_rng(0)
    draws = rng.integers(losses.shape[1], size=(DRAWS, losses.shape[1]))
    minima = [minimum(losses[:, draw].mean(1)) for draw in draws]
    low, high = np.quantile(minima, QUANTILES, method="inverted_cdf")  # interpolates between no two infinities
    inside, low, high = np.clip(value, x.min(), x.max()), min(low, x.max()), max(high, x.min())
    return Turn(float(2**inside), float(2**low), float(2**high), bool(np.isinf(value)))


def narrow_heads_lose(loss: Mapping[str, Values]) -> str:
    """Heads below a dimension of 16 lose, as in open_lm: in A the steps from 16 to 8 and from 8 to 4 are both worse."""
    verdicts = [v for pair, (_, v) in doublings(loss["A"]).items() if pair in ((8, 16), (16, 32))]
    if len(verdicts) < 2:
        return "not run"
    good = set(verdicts) <= {"better", "equivalent"}
    return "holds" if set(verdicts) == {"worse"} else "refuted" if good else "undecided"


def rank_explains(loss: Mapping[str, Values]) -> str:
    """Rank explains the loss: E at 32 heads recovers at least half of what A loses from 8 to 32, and more than E2."""
    a, e, e2 = loss["A"], loss["E"], loss["E2"]
    if not (8 in a and all(32 in block for block in (a, e, e2))):
        return "not run"
    recovered = statistics.paired(a[32] - e[32], 0.5 * (a[32] - a[8]))
    beyond = statistics.paired(e2[32], e[32])
    both = recovered.value >= 0 and statistics.paired(a[32], e[32]).interval().low > 0 and beyond.interval().low > 0
    return "holds" if both else "refuted" if recovered.interval().high < 0 else "undecided"


def halves_loss(loss: Mapping[str, Values], base: str, block: str, few: int, many: int = 32) -> str:
    """Return whether a block at least halves what the block `base` loses from `few` to `many` heads."""
    if not all(n in loss[b] for b in (base, block) for n in (few, many)):
        return "not run"
    lost, rest = (loss[b][many] - loss[b][few] for b in (base, block))
    halved = statistics.paired(lost - rest, 0.5 * lost)
    holds = halved.value >= 0 and statistics.paired(lost, rest).interval().low > 0
    return "holds" if holds else "refuted" if halved.interval().high < 0 else "undecided"


def optimisation_explains(loss: Mapping[str, Values]) -> str:
    """Temperature or optimisation explains it: QK-norm (B) or length (D) at least halves what A loses."""
    words = {halves_loss(loss, "A", "B", 8), halves_loss(loss, "A", *LENGTH["A"])}
    return next(word for word in ("holds", "not run", "undecided", "refuted") if word in words)


def positions_move_it(loss: Mapping[str, Values]) -> str:
    """Positions move it: C's change from 4 to 32 heads differs from A's."""
    a, c = loss["A"], loss["C"]
    if not all(n in block for block in (a, c) for n in (4, 32)):
        return "not run"
    difference = statistics.paired(c[32] - c[4], a[32] - a[4])
    inside = difference.interval(0.9)
    if not difference.interval().contains(0.0):
        return "holds"
    return "refuted" if inside.low > -POSITIONS_MARGIN and inside.high < POSITIONS_MARGIN else "undecided"


def find_sign_change(values: Values, width: int) -> Turn:
    """Return the arm at which the change of the mean per doubling of heads changes its sign, of several the lowest.

    A bound if there is none: the end with the lower mean.
    """
    heads = sorted(values)
    means = np.array([values[n].mean() for n in heads])
    turns = [n for i, n in enumerate(heads[1:-1], 1) if (means[i] - means[i - 1]) * (means[i + 1] - means[i]) < 0]
    best = min(turns or (heads[0], heads[-1]), key=lambda n: values[n].mean())
    return Turn(width / best, 0.0, np.inf, not turns)


def coincide(a: Turn, b: Turn) -> bool | None:
    """Return whether two turns are within one doubling; None if bounds leave it open."""
    apart = abs(np.log2(a.value / b.value)) > 1  # bounds at two ends are further apart than their values
    if a.bound and b.bound and a.value == b.value:
        return None
    return False if apart else None if a.bound or b.bound else True


def conditioning_coincides(loss: Mapping[str, Values], kappa: Mapping[str, Values]) -> str:
    """Conditioning coincides with the turn: log10 κ turns within one doubling of where the loss does, in A, F and G."""
    blocks = [b for b in ("A", "F", "G") if len(loss[b]) >= 3]
    turns = ((find_turn(loss[b], BLOCKS[b].width), find_sign_change(kappa[b], BLOCKS[b].width)) for b in blocks)
    near = [coincide(*pair) for pair in turns]
    if near.count(False) >= 2:
        return "refuted"
    return "not run" if len(blocks) < 3 else "holds" if near.count(True) == 3 else "undecided"


def width_moves_it(loss: Mapping[str, Values]) -> str:
    """The turn moves with width: the minima of F and G differ."""
    if min(len(loss["F"]), len(loss["G"])) < 3:
        return "not run"
    small, large = (find_turn(loss[b], BLOCKS[b].width) for b in ("F", "G"))
    if small.high < large.low or large.high < small.low:
        return "holds"
    return "refuted" if max(small.high, large.high) <= 2 * min(small.low, large.low) else "undecided"


RULES: tuple[Callable[..., str], ...] = (
    *(narrow_heads_lose, rank_explains, optimisation_explains, positions_move_it, width_moves_it),
)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the verdict of each rule, by its sentence."""
    loss, kappa = ({block: read_values(rows, block, key) for block in BLOCKS} for key in ("loss", "log10_condition"))
    result = {(rule.__doc__ or "").strip(): rule(loss) for rule in RULES}
    return result | {(conditioning_coincides.__doc__ or "").strip(): conditioning_coincides(loss, kappa)}


@cli.command()
def main(_: cli.Values) -> None:
    rows = language.read_rows()
    for block, about in BLOCKS.items():
        loss, kappa = read_values(rows, block, "loss"), read_values(rows, block, "log10_condition")
        print(f"\nBlock {block}: width {about.width}, {len(loss)} of {len(about.heads)} arms with three seeds")
        for heads, values in loss.items():
            half = statistics.mean_interval(values).high - values.mean()
            print(
                f"  {heads:>3} heads of {about.width // heads:<4} {values.mean():.4f} ± {half:.4f} nats/token   "
                f"log10 κ {kappa[heads].mean():.2f}"
            )
        for (few, many), (d, verdict) in doublings(loss).items():
            inside = d.interval()
            print(f"  {few} to {many} heads: {d.value:+.4f} ({inside.low:+.4f} to {inside.high:+.4f})  {verdict}")
        if len(loss) >= 3:
            turn = find_turn(loss, about.width)
            word = "no minimum inside the range; best end" if turn.bound else "heads stop paying at a dimension of"
            print(f"  {word} {turn.value:.0f} (95 % interval: {turn.interval})")
    values = {block: read_values(rows, block, "loss") for block in BLOCKS}
    print("\n4,000 instead of 1,000 steps halve what heads lose; a rule at width 128 only")
    for short, (block, few, many) in LENGTH.items():
        word, about = halves_loss(values, short, block, few, many), BLOCKS[block]
        print(f"  {word:<10} width {about.width}, {few} to {many} heads")
    print(f"\n{len(RULES) + 1} rules, not corrected for their number")
    for sentence, word in verdicts(rows).items():
        print(f"  {word:<10} {sentence}")


if __name__ == "__main__":
    cli.run(main)
