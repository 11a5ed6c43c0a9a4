"""Figures on heads at fixed total width in small GPTs."""

from collections.abc import Mapping
from typing import Any

from leanformer.analysis import statistics
from study.figures.passages import RESULTS, Passage
from study.heads import curves, verdicts
from study.heads.language import BLOCKS, SHORT, read_rows
from study.tables import Estimate


DIMENSIONS = (256, 128, 64, 32, 16, 8, 4)  # of heads, columns of the table
TRAINED = {  # head dimensions by block
    block: {BLOCKS[block].width // n for n in verdicts.read_values(read_rows(), block, "loss")} for block in "GAFDI"
}


def name_block(block: str) -> str:
    """Return the name of a block's row in the table of losses."""
    width, steps = BLOCKS[block].width, BLOCKS[block].steps
    return f"width {width}" if steps == SHORT else f"width {width}, {steps:,} steps"


def values() -> Mapping[str, Any]:
    """Return losses by block and head dimension, differences between heads, and the plan's verdicts."""
    rows = read_rows()
    losses = {block: verdicts.read_values(rows, block, "loss") for block in BLOCKS}
    words = verdicts.verdicts(rows)
    rules = {
        "below": verdicts.narrow_heads_lose,
        "rank": verdicts.rank_explains,
        "optimisation": verdicts.optimisation_explains,
        "positions": verdicts.positions_move_it,
        "moves": verdicts.width_moves_it,
        "conditioning": verdicts.conditioning_coincides,
    }
    single = {n: min(r["loss"] for r in rows if (r["block"], r["num_heads"]) == ("J", n)) for n in (4, 32)}
    a, d = (losses[block] for block in "AD")
    judged = {  # verdicts by width and head dimension after a doubling
        width: {width // many: word for (_, many), (_, word) in verdicts.doublings(losses[block]).items()}
        for block, width in ((block, BLOCKS[block].width) for block in "AFG")
    }

    def minus(many: Any, few: Any) -> Estimate:
        return Estimate.of(statistics.paired(many, few))

    return {
        "loss": {b: {BLOCKS[b].width // n: Estimate.mean(x) for n, x in losses[b].items()} for b in TRAINED},
        "from_4": minus(a[32], a[4]),
        "from_4_wide": minus(losses["G"][32], losses["G"][4]),
        "from_1_long": minus(d[32], d[1]),
        "narrow": minus(losses["F"][16], losses["F"][1]),
        "narrow_long": minus(losses["I"][16], losses["I"][1]),
        "single": single[32] - single[4],
        "eight": minus(a[8], a[32]),
        "change": {block: minus(losses[block][32], a[32]) for block in ("B", "C", "E", "E2")},
        "better": "some" if any(found[32] == "better" for found in judged.values()) else "no",
        "worse": ", ".join(str(width) for width, found in judged.items() if found[32] == "worse"),
        "lower": "some" if any("better" in found.values() for found in judged.values()) else "no",
        "qk_norm": verdicts.halves_loss(losses, "A", "B", 8),
        "behind": {t: Estimate.of(x) for t, x in curves.behind(read_rows(curves.ROWS))[32].items()},
        **{name: words[(rule.__doc__ or "").strip()] for name, rule in rules.items()},
    }


PASSAGES = [
    Passage(
        values,
        {
            RESULTS: [
                "and {behind[4000]:+.3f} at 4,000",
                *(
                    f"| {name_block(block)} |"
                    + "".join(f" {{loss[{block}][{n}]:.3f ±}} |" if n in dims else " |" for n in DIMENSIONS)
                    for block, dims in TRAINED.items()
                ),
                "| width 128, 32 minus 4 (planned) | {from_4:+.3f} |",
                "| {from_1_long:+.3f} |",
                "| width 64, 16 minus one | {narrow:+.3f} | {narrow_long:+.3f} |",
                "| width 256, 32 minus 4 | {from_4_wide:+.3f} | {single:+.3f}, one seed |",
                "| 8 heads of 16 | {eight:+.3f} |",
                "| rotary positions | {change[C]:+.3f} |",
                "| as many parameters in the MLP instead | {change[E2]:+.3f} |",
                "| QK-norm | {change[B]:+.3f} |",
                "| heads below a dimension of 16 lose | {below}; holds without",
                "| the rank of narrow heads explains their loss | {rank} |",
                "| temperature or optimisation explains it | {optimisation}, by length; by QK-norm {qk_norm}, narrowly",
                "| positions change it | {positions} |",
                "| where heads stop paying moves with width | {moves}; by code",
                "| conditioning coincides with it | {conditioning}, on",
                "After 1,000 steps {lower} doubling of heads is shown",
            ],
        },
    ),
]
