"""Figures on published tables of trained decoders: heads at fixed total width."""

from collections.abc import Mapping
from typing import Any

from study import tables
from study.published import effects, published, published_scaling, reruns, updates
from study.published.effects import HEADS, STEP, Effect
from study.tables import Estimate


SEARCH = "archai TransXL lm1b"


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
    estimates = [*effects.estimate_heads(search)]
    archai = [e for e in estimates if e.main and not e.at]
    (linear,) = (e for e in estimates if e.form == "linear" and not e.at and e.dims == archai[0].dims)
    return {
        "openlm": {e.dims[1]: _estimate(e) for e in ranges},
        "high": {e.dims[1]: e.dims[1] for e in ranges},
        "low": {e.dims[1]: e.dims[0] for e in (*ranges, *archai)},
        "worse": {e.dims[1]: e.worse for e in ranges},
        "pairs": {e.dims[1]: e.models for e in ranges},
        "step": steps,
        "archai": {e.dims[1]: _estimate(e) for e in archai},
        "linear": _estimate(linear),
        "end": [e.dims[1] for e in archai],
    }


def _estimate(effect: Effect) -> Estimate:
    return Estimate(effect.value, effect.low, effect.high)


def reruns_and_updates() -> Mapping[str, Any]:
    """Return what updates change in open_lm, and 22 reruns of one change by strangers."""
    cells = [cell.updates for cell in updates.read_cells().values()]
    pairs, held = updates.narrow_pairs(), ((), ("depth",), ("depth", "tokens"))
    perfect, other = updates.by_updates(64, 32), updates.by_updates(24, 8)
    deeper = {"_".join(key[0:2] + key[3:4]): x for key, x in reruns.depth().items() if key[2] + key[4] == "falsefalse"}
    shallow, deep = updates.contrast().values()
    archai = {row["set"]: int(row["updates"]) for row in tables.read("language_models") if row["updates"]}
    return {
        "fewest": min(cells),
        "most": max(cells),
        "held": [updates.fit(pairs, *names)["updates"] for names in held],
        "fits": [updates.fit(pairs, *names) for names in held],
        "count": len(pairs),
        "cells": len({(pair.width, pair.depth) for pair in pairs}),
        "perfect": [change for _, change in perfect],
        "other": [change for _, change in other],
        "counts": [perfect[0][0], perfect[-1][0], other[0][0], other[-1][0]],
        "deeper": deeper,
        "shallow": [[row[i] for row in shallow] for i in (1, 2)],
        "deep": [[row[i] for row in deep] for i in (1, 2)],
        "lm1b": archai["random_TransXL_lm1b"],
        "wt103": archai["random_TransXL_wt103"],
        **reruns.heads(),
    }
