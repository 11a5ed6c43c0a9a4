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


PASSAGES = [
    Passage(
        values,
        {
            README: [
                "dimension 128 to 64 {step[128 to 64]:+.3f}, 64 to 32 {step[64 to 32]:+.3f}, worse in all "
                "{narrow[worse]} pairs",
                "to {end[0]} or below {archai[33]:+.3f}",
            ],
            FINDINGS: [
                "| open_lm, {shapes} shapes | archai, {models} Transformer-XL on",
                "| to {high[16]} | {openlm[16]:+.3f}, worse in {worse[16]} of {pairs[16]} pairs | {archai[33]:+.3f}, "
                "to {end[0]} |",
                "| {low[32]} to {high[32]} | {openlm[32]:+.3f}, {worse[32]} of {pairs[32]} | |",
                "| {low[48]} to {high[48]} | {openlm[48]:+.3f}, {worse[48]} of {pairs[48]} | {archai[67]:+.3f}, "
                "{low[67]} to {end[1]} |",
                "| {low[64]} to {high[64]} | {openlm[64]:+.3f}, {worse[64]} of {pairs[64]} | |",
                "| {low[96]} to {high[96]} | {openlm[96]:.3f}, {worse[96]} of {pairs[96]} | {archai[157]:+.3f}, "
                "{low[157]} to {end[2]} |",
                "| {low[128]} to {high[128]} | {openlm[128]:+.3f}, {worse[128]} of {pairs[128]} | |",
                "from 256 to 128 {step[256 to 128]:+.3f}, from 128 to 64 {step[128 to 64]:+.3f}, from 64 to 32 "
                "{step[64 to 32]:+.3f}",
                "all {narrow[worse]} pairs get worse",
                "({equal_dims[0]} to {equal_dims[1]}: {equal.value:.3f}, {equal.low:.3f} to {equal.high:.3f}) shows",
                "| {step[64 to 32].value:+.3f} nats when heads of 64 become",
            ],
        },
    ),
]
