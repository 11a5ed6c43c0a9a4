"""Figures on heads at fixed total width in small GPTs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from study.figures.passages import RESULTS, Passage
from study.heads import curves, verdicts
from study.heads.language import BLOCKS, SHORT, TUNING_SEED, read_rows
from study.tables import Estimate


MEASURES = (  # name, column and format
    ("log10 κ", "log10_condition", ".2f"),
    ("effective rank of head outputs", "output_rank", ".0f"),
    ("effective rank of attention", "attention_rank", ".0f"),
    ("entropy of attention", "attention_entropy", ".2f"),
)
DIMENSIONS = (256, 128, 64, 32, 16, 8, 4)  # of heads, columns of the table


def measure(block: str) -> dict[str, dict[int, Any]]:
    """Return loss and measures of a block's arms by head dimension."""
    rows, width = read_rows(), BLOCKS[block].width
    result = {"loss": {width // n: Estimate.mean(x) for n, x in verdicts.read_values(rows, block, "loss").items()}}
    for _, key, _ in MEASURES:
        result[key] = {width // n: x.mean() for n, x in verdicts.read_values(rows, block, key).items()}
    return result


def name_block(block: str) -> str:
    """Return the name of a block's rows in the table of results."""
    width, steps = BLOCKS[block].width, BLOCKS[block].steps
    return f"width {width}" if steps == SHORT else f"width {width}, {steps:,} steps"


def longer() -> Mapping[str, Any]:
    """Return losses and differences after 4,000 steps: at width 128, at width 64, and of single runs at width 256."""
    rows = read_rows()
    losses = {block: verdicts.read_values(rows, block, "loss") for block in BLOCKS}
    wide, narrow, short = losses["D"], losses["I"], losses["F"]
    single = {n: min(r["loss"] for r in rows if (r["block"], r["num_heads"]) == ("J", n)) for n in (4, 32)}
    rates = {n: verdicts.language.best_rate(verdicts.language.Arm("I", n), rows) for n in narrow}
    tuning = [row for row in rows if (row["block"], row["seed"], row["lr"]) == ("I", TUNING_SEED, rates[1])]
    return {
        "loss": {n: Estimate.mean(x) for n, x in wide.items()},
        "from_one": {n: Estimate.of(statistics.paired(wide[n], wide[1])) for n in wide if n > 1},
        "narrow": {n: Estimate.mean(x) for n, x in narrow.items()},
        "narrow_four": Estimate.of(statistics.paired(narrow[4], narrow[1])),
        "narrow_apart": np.ptp(narrow[4]),
        "narrow_rates": rates,
        "narrow_tuning": {row["num_heads"]: row["loss"] for row in tuning},
        "narrow_change": Estimate.of(statistics.paired(narrow[16], narrow[1])),
        "narrow_before": Estimate.of(statistics.paired(short[16], short[1])),
        "narrow_takes": Estimate.of(statistics.paired(narrow[16] - narrow[1], short[16] - short[1])),
        "narrow_halves": verdicts.halves_loss(losses, "F", *verdicts.LENGTH["F"]),
        "single": single,
        "single_change": single[32] - single[4],
    }


def delay() -> Mapping[str, Any]:
    """Return how far the training loss of more heads is behind that of one, by heads and step."""
    rows = read_rows(curves.ROWS)
    return {"behind": {n: {t: Estimate.of(d) for t, d in x.items()} for n, x in curves.behind(rows).items()}}


def heads_at_fixed_width() -> Mapping[str, Any]:
    """Return losses by total width and head dimension, their changes per doubling of heads, and verdicts."""
    rows, result = read_rows(), {"table": {block: measure(block) for block in TRAINED}}
    for block in ("A", "F", "G"):
        width = BLOCKS[block].width
        loss = verdicts.read_values(rows, block, "loss")
        slopes = np.polyfit(np.log2(sorted(loss)), [loss[n] for n in sorted(loss)], 1)[0]  # one per seed
        turn, arms = verdicts.find_turn(loss, width), [verdicts.language.Arm(block, n) for n in loss]
        result[f"w{width}"] = {
            "step": {width // few: Estimate.of(d) for (few, _), (d, _) in verdicts.doublings(loss).items()},
            "verdict": {width // few: word for (few, _), (_, word) in verdicts.doublings(loss).items()},
            "slope": Estimate.mean(slopes),
            "minimum": "a minimum" if not turn.bound else "no minimum",
            "ends": turn.interval,
            "rates": " or ".join(f"{x:g}" for x in sorted({verdicts.language.best_rate(arm, rows) for arm in arms})),
        }
    by_block = {verdicts.BLOCKS[b].width: verdicts.read_values(rows, b, "loss") for b in "FAG"}
    lost = {width: Estimate.of(statistics.paired(x[width // 8], x[width // 64])) for width, x in by_block.items()}
    result["lost"] = lost
    fewest = all(min(x, key=lambda n, x=x: x[n].mean()) == min(x) for x in by_block.values())
    result["best"] = "the fewest heads" if fewest else "others"
    same = {result[f"w{width}"]["minimum"] for width in by_block}
    result["minimum"] = same.pop() if len(same) == 1 else "different ends"
    rotary = {verdicts.language.best_rate(verdicts.language.Arm("C", n), rows) for n in (4, 32)}
    result["rotary_rates"] = " or ".join(f"{x:g}" for x in sorted(rotary))
    words = verdicts.verdicts(rows)
    rules = {"narrow": verdicts.narrow_heads_lose, "moves": verdicts.width_moves_it}
    return result | {name: words[(rule.__doc__ or "").strip()] for name, rule in rules.items()}


def narrow_heads() -> Mapping[str, Any]:
    """Return what 32 heads lose to 8 at width 128, and what other queries and keys, or a wider MLP, change of it."""
    rows = read_rows()
    losses = {block: verdicts.read_values(rows, block, "loss") for block in ("A", "B", "C", "D", "E", "E2")}
    words, lost_with_norm = verdicts.verdicts(rows), losses["B"][32] - losses["B"][8]
    a, c, d, e = (losses[block] for block in ("A", "C", "D", "E"))
    fit = verdicts.read_values(rows, "D", "train_loss")
    params = {row["block"]: row["params"] for row in rows if row["num_heads"] == 32}
    return {
        "loss": {block: Estimate.mean(values[32]) for block, values in losses.items()},
        "change": {b: Estimate.of(statistics.paired(losses[b][32], a[32])) for b in ("B", "C", "E", "E2")},
        "lost": Estimate.of(statistics.paired(a[32], a[8])),
        "lost_repaired": Estimate.of(statistics.paired(e[32], e[8])),
        "eight": Estimate.of(statistics.paired(a[8], a[32])),
        "qk_norm_at_8": Estimate.of(statistics.paired(losses["B"][8], a[8])),
        "lost_with_qk_norm": Estimate.of(statistics.paired(losses["B"][32], losses["B"][8])),
        "qk_norm_halves": verdicts.halves_loss(losses, "A", "B", 8),
        "beyond": Estimate.of(statistics.paired(e[32], losses["E2"][32])),
        "params": {block: params[block] / 1e6 for block in ("A", "C", "E", "E2")},
        "rule": words[(verdicts.rank_explains.__doc__ or "").strip()],
        "rotary": {n: Estimate.mean(c[n]) for n in (4, 32)},
        "lost_from_4": Estimate.of(statistics.paired(a[32], a[4])),
        "lost_with_rotary": Estimate.of(statistics.paired(c[32], c[4])),
        "rotary_moves": Estimate.of(statistics.paired(c[32] - c[4], a[32] - a[4])),
        "long": {n: Estimate.mean(d[n]) for n in (4, 32)},
        "rates": [verdicts.language.best_rate(verdicts.language.Arm(b, n), rows) for b in "DA" for n in (4, 32)],
        "lost_long": Estimate.of(statistics.paired(d[32], d[4])),
        "planned_p": statistics.paired(d[32], d[4]).p_differs(),
        "fit_long": Estimate.of(statistics.paired(fit[32], fit[4])),
        "length_takes": Estimate.of(statistics.paired(d[32] - d[4], a[32] - a[4])),
        "optimisation": words[(verdicts.optimisation_explains.__doc__ or "").strip()],
        "halved": Estimate.of(statistics.paired(a[32] - a[8] - lost_with_norm, 0.5 * (a[32] - a[8]))),
        "conditioning": words[(verdicts.conditioning_coincides.__doc__ or "").strip()],
        "positions": words[(verdicts.positions_move_it.__doc__ or "").strip()],
    }


LOST = (
    "the loss changes by {lost[64]:+.3f} at width 64, {lost[128]:+.3f} at width 128 and {lost[256]:+.3f} at width 256"
)
TRAINED = {  # head dimensions by block
    block: {BLOCKS[block].width // n for n in verdicts.read_values(read_rows(), block, "loss")} for block in "GADFI"
}

PASSAGES = [
    Passage(
        heads_at_fixed_width,
        {
            RESULTS: [
                "the learning rate of each arm: {w128[rates]} at width 128 ({rotary_rates} with rotary positions), "
                "{w64[rates]} at width 64, {w256[rates]} at width 256",
                *(
                    f"| {name_block(block)}: {name} |"
                    + "".join(f" {{table[{block}][{key}][{n}]:{spec}}} |" if n in dims else " |" for n in DIMENSIONS)
                    for block, dims in TRAINED.items()
                    if dims
                    for name, key, spec in (("loss", "loss", ".3f ±"), *MEASURES)
                ),
                "dimension 128 to 64 {w128[step][128]:+.3f}, 64 to 32 {w128[step][64]:+.3f}, 32 to 16 "
                "{w128[step][32]:+.3f}, 16 to 8 {w128[step][16]:+.3f}, 8 to 4 {w128[step][8]:+.3f}. These",
                "the last is {w128[verdict][8]} and the others are {w128[verdict][16]}. The planned rule that heads "
                "below a dimension of 16 lose needs both steps, so it is {narrow}",
                "by {w256[slope]:+.3f} per doubling at width 256, {w128[slope]:+.3f} at width 128 and "
                "{w64[slope]:+.3f} at width 64",
                "At width 64 every corrected verdict is {w64[verdict][64]}",
                "At width 256: 256 to 128 {w256[step][256]:+.3f}, {w256[verdict][256]} after the correction; 128 to 64 "
                "{w256[step][128]:+.3f}, {w256[verdict][128]}; 64 to 32 {w256[step][64]:+.3f}, {w256[verdict][64]}; "
                "32 to 16 {w256[step][32]:+.3f}, {w256[verdict][32]}; 16 to 8 {w256[step][16]:+.3f}, "
                "{w256[verdict][16]}",
                "has {minimum} inside the range at any width: {best} have the lowest mean loss",
                LOST,
                "({w256[ends]} at width 256, {w128[ends]} at width 128, and {w64[ends]} at width 64;",
                "That the end moves with width is {moves}",
            ],
        },
    ),
    Passage(
        narrow_heads,
        {
            RESULTS: [
                "is {rule}",
                "coincides with where heads stop paying is {conditioning} by the plan's rule",
                "32 heads of dimension 4 lose {lost:.3f nats} to 8 heads of 16",
                "| queries and keys of dimension 32 in each head (block E) | {params[E]:.2f} | {loss[E]:.3f ±} | "
                "{change[E]:+.3f} |",
                "| instead, as many parameters in the MLP (E2) | {params[E2]:.2f} | {loss[E2]:.3f ±} | "
                "{change[E2]:+.3f} |",
                "| instead, QK-norm (B) | {params[A]:.2f} | {loss[B]:.3f ±} | {change[B]:+.3f} |",
                "| instead, rotary positions (C) | {params[C]:.2f} | {loss[C]:.3f ±} | {change[C]:+.3f} |",
                "E minus E2 is {beyond:+.3f}",
                "with 4 heads it is {rotary[4]:.3f ±}, with 32 heads {rotary[32]:.3f ±}",
                "32 heads lose {lost_with_rotary:.3f} to 4 heads, with learned positions {lost_from_4:.3f}, "
                "{rotary_moves:+.3f} of difference. The rule, that positions move it, {positions}",
                "they still lose {lost_repaired:.3f} to 8 heads",
                "raises the loss of 8 heads as much, by {qk_norm_at_8:.3f}, so that 32 heads lose "
                "{lost_with_qk_norm:.3f} to 8 heads, as without it. That it halves this loss is {qk_norm_halves}, "
                "narrowly: what it takes off, minus half of the loss, is {halved:+.3f}",
                "4 heads end at {long[4]:.3f ±}, 32 heads at {long[32]:.3f ±}, a change of {lost_long.value:+.3f} "
                "({lost_long.low:.3f} to {lost_long.high:.3f}; p = {planned_p:.4f}) instead of {lost_from_4:+.3f}; the "
                "two changes differ by {length_takes:+.3f}",
                "on the training text too: {fit_long:+.3f}",
                "That temperature or optimisation explains the loss {optimisation}, by length",
                "rates are {rates[0]:g} and {rates[1]:g} (after 1,000 steps: {rates[2]:g} and {rates[3]:g})",
            ],
        },
    ),
    Passage(
        longer,
        {
            RESULTS: [
                "One head ends at {loss[1]:.3f ±}, 16 heads at {loss[16]:.3f ±}; minus one head, 4 heads are at "
                "{from_one[4]:+.3f}, 16 heads at {from_one[16]:+.3f} and 32 heads at {from_one[32]:+.3f}",
                "one head of 64 ends at {narrow[1]:.3f ±}, 16 heads of 4 at {narrow[16]:.3f ±}, a change of "
                "{narrow_change:+.3f} instead of {narrow_before:+.3f}; the two changes differ by {narrow_takes:+.3f}",
                "that length halves what heads lose is {narrow_halves}",
                "4 heads of 16 end at {narrow[4]:.3f ±}, {narrow_four:+.3f} to one head",
                "their rate by the rule is {narrow_rates[4]:g}, at which the seeds are up to {narrow_apart:.3f} apart",
                "at {narrow_rates[1]:g}, the rate of the others, the tuning seed ends at {narrow_tuning[1]:.3f} with "
                "one head, {narrow_tuning[4]:.3f} with 4 heads and {narrow_tuning[16]:.3f} with 16 heads",
                "{single[4]:.3f} and {single[32]:.3f} at the best of two learning rates, {single_change:+.3f}",
            ],
        },
    ),
    Passage(
        delay,
        {
            RESULTS: [
                "is {behind[32][300]:+.3f} after 300 steps, {behind[32][600]:+.3f} after 600 steps,",
                "{behind[32][2000]:+.3f} after 2,000 steps and {behind[32][4000]:+.3f} after 4,000 steps; that "
                "of 16 heads {behind[16][300]:+.3f}, {behind[16][600]:+.3f}, {behind[16][1000]:+.3f}, "
                "{behind[16][2000]:+.3f} and {behind[16][4000]:+.3f}",
            ],
        },
    ),
]
