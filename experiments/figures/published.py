"""Figures on published tables of trained decoders: heads at fixed total width."""

from collections.abc import Mapping
from typing import Any

from experiments import effects, published, published_scaling
from experiments.effects import HEADS, STEP, Effect
from experiments.figures.passages import FINDINGS, README, Passage
from experiments.tables import Estimate


SEARCH = "archai TransXL lm1b"
EQUAL = "archai TransXL wt103 homogeneous"


def values() -> Mapping[str, Any]:
    """Return changes of the loss per doubling of heads, by the upper end of a range of the head dimension.

    `openlm` and `archai` are ranges, `worse` and `pairs` the counts of open_lm's pairs, `step` single steps.
    """
    grid = published_scaling.openlm()
    ranges, steps = [], {}
    for effect in effects.estimate_openlm(grid, published_scaling.openlm_cells(grid)):
        if effect.main and effect.question == HEADS:
            ranges.append(effect)
        elif effect.question == STEP:
            steps[" to ".join(map(str, effect.dims))] = _estimate(effect)
    (search,) = (table for table in published.language_models() if table.name == SEARCH)
    archai = [e for e in effects.estimate_heads(search) if e.main and not e.at]
    equal_layers = (table for table in published.language_models() if table.name == EQUAL)
    (equal,) = (e for table in equal_layers for e in effects.estimate_heads(table) if e.main and not e.at)
    narrow = [e for e in ranges if e.dims[1] <= effects.NARROW]
    return {
        "openlm": {e.dims[1]: _estimate(e) for e in ranges},
        "high": {e.dims[1]: e.dims[1] for e in ranges},
        "low": {e.dims[1]: e.dims[0] for e in (*ranges, *archai)},
        "worse": {e.dims[1]: e.worse for e in ranges},
        "pairs": {e.dims[1]: e.models for e in ranges},
        "narrow": {"worse": sum(e.worse or 0 for e in narrow), "pairs": sum(e.models for e in narrow)},
        "step": steps,
        "archai": {e.dims[1]: _estimate(e) for e in archai},
        "end": [e.dims[1] for e in archai],
        "equal": _estimate(equal),
        "equal_dims": equal.dims,
        "models": len(search.score),
        "shapes": sum(len(cell) for cell in grid.cells.values()),
    }


def _estimate(effect: Effect) -> Estimate:
    return Estimate(effect.value, effect.low, effect.high)


OPENLM = "| {low[HIGH]} to {high[HIGH]} | {openlm[HIGH]:+.3f}, {worse[HIGH]} of {pairs[HIGH]} |"  # a row on findings

PASSAGES = [
    Passage(
        values,
        {
            README: [
                "dimension 128 to 64 {step[128 to 64]:+.3f nats}, 64 to 32 {step[64 to 32]:+.3f}, worse in all "
                "{narrow[worse]} pairs",
                "to {end[0]} or below: {archai[33]:+.3f nats}",
            ],
            FINDINGS: [
                "| open_lm, {shapes} shapes |",
                "| {low[16]} to {high[16]} | {openlm[16]:+.3f}, worse in {worse[16]} of {pairs[16]} pairs of models |",
                *(OPENLM.replace("HIGH", str(high)) for high in (32, 48, 64, 128)),
                OPENLM.replace("HIGH", "96").replace("+", ""),
                "| archai, {models} Transformer-XL on",
                *(
                    f"| {{low[{high}]}} to {{end[{i}]}} | {{archai[{high}]:+.3f}} |"
                    for i, high in enumerate((33, 67, 157))
                ),
                "from 256 to 128 {step[256 to 128]:+.3f}, from 128 to 64 {step[128 to 64]:+.3f}, from 64 to 32 "
                "{step[64 to 32].value:+.3f} ({step[64 to 32].low:.3f} to {step[64 to 32].high:.3f}; five",
                "in all {narrow[worse]} pairs",
                "({equal_dims[0]} to {equal_dims[1]}: {equal.value:.3f}, {equal.low:.3f} to {equal.high:.3f}) shows "
                "no loss either",
                "| {step[64 to 32].value:+.3f} nats when heads of 64 become",
            ],
        },
    ),
]
