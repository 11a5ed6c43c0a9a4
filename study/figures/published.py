"""Figures on published tables of trained models: heads at fixed total width, updates, reruns, and depth."""

import functools
from collections.abc import Mapping
from typing import Any

from study import tables
from study.figures.passages import PUBLISHED, Passage
from study.published import atlas, published, published_scaling, reruns, updates
from study.published.effects import DEPTH, HEADS, STEP, Effect
from study.tables import Estimate


SEARCH = "archai TransXL lm1b"
ENDS = {33: "narrow", 67: "middle"}  # upper ends of archai's ranges of the head dimension; beyond them "wide"
ARCHAI = ("GPT2 lm1b", "GPT2 wt103", "TransXL lm1b", "TransXL wt103", "TransXL wt103 homogeneous", "six searches lm1b")
DECODERS = ("open_lm", "Gemstones FineWeb-Edu", "Gemstones DCLM", *(f"archai {name}" for name in ARCHAI))
HELD = {published.PARAMS: "params", published.BLOCKS: "blocks", published.FLOPS: "flops"}
effects = functools.cache(atlas.effects)


def values() -> Mapping[str, Any]:
    """Return changes of the score per doubling of heads and of depth, by table.

    `heads` has the ranges of the head dimension by upper end, of archai by the names of ENDS; `mark` says which are
    clear after correction. `step` are single steps of the head dimension in open_lm.
    """
    ranges = [e for e in effects() if e.question == HEADS and e.main and not e.at]
    found, depth = {}, {}
    for e in ranges:
        found.setdefault(e.table, {})[ENDS.get(e.dims[1], "wide") if "archai" in e.table else e.dims[1]] = e
    for e in effects():
        if e.question == DEPTH and e.main:
            depth.setdefault(e.table, {})[HELD[e.at]] = _estimate(e)
    steps = {" to ".join(map(str, e.dims)): e for e in effects() if e.question == STEP}
    encoders = [e for e in ranges if e.kind != "decoder"]
    (linear,) = (
        e for e in effects() if (e.table, e.question, e.form, e.at) == (SEARCH, HEADS, "linear", "") and e.dims[1] == 33
    )
    blocks = [depth[name]["blocks"] for name in DECODERS]
    return {
        "count": _count_models(),
        "heads": {table: {key: _estimate(e) for key, e in x.items()} for table, x in found.items()},
        "mark": {t: {key: " †" if e.p_corrected < 0.05 else "" for key, e in x.items()} for t, x in found.items()},
        "low": {key: e.dims[0] for key, e in found["open_lm"].items()},
        "high": {key: e.dims[1] for key, e in found["open_lm"].items()},
        "pairs": {key: e.models for key, e in found["open_lm"].items()},
        "worse": {key: e.worse for key, e in found["open_lm"].items()},
        "archai": [(*e.dims, _estimate(e)) for e in found[SEARCH].values()],
        "linear": _estimate(linear),
        "step": {name: _estimate(e) for name, e in steps.items()},
        "step_worse": {name: f"{e.worse} of {e.models}" for name, e in steps.items()},
        "encoders": len(encoders),
        "clear": sum(e.p_corrected < 0.05 for e in encoders),
        "depth": depth,
        "tables": len(blocks),
        "lose": sum(e.low > 0 for e in blocks),
        "gain": sum(e.high < 0 for e in blocks),
    }


def _count_models() -> int:
    grid = published_scaling.openlm().cells.values()
    names = ("language_models", "bert", "vision_autoformer", "vision_pit")
    return (
        sum(len(tables.read(name)) for name in names) + sum(map(len, grid)) + len(published_scaling.gemstones().score)
    )


def _estimate(effect: Effect) -> Estimate:
    return Estimate(effect.value, effect.low, effect.high)


def reruns_and_updates() -> Mapping[str, Any]:
    """Return what updates change in open_lm, and 22 reruns of one change by strangers."""
    cells = [cell.updates for cell in updates.read_cells().values()]
    pairs, held = updates.narrow_pairs(), ((), ("depth",), ("depth", "tokens"))
    perfect, other = updates.by_updates(64, 32), updates.by_updates(24, 8)
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
        "lm1b": archai["random_TransXL_lm1b"],
        "wt103": archai["random_TransXL_wt103"],
        **reruns.heads(),
    }


def _open_lm(high: int) -> str:
    change, counts = "{heads[open_lm][N]:+.3f}{mark[open_lm][N]}", "{worse[N]} of {pairs[N]}"
    row = f"| {{low[N]}} to {{high[N]}} | {change} | {counts}{' pairs' if high == 16 else ''} |"
    return row.replace("[N]", f"[{high}]")


def _archai(name: str) -> str:
    table, cells = f"archai {name}", ("narrow", "middle", "wide")
    only = {"TransXL wt103 homogeneous": "narrow", "six searches lm1b": "wide"}.get(name)
    texts = [f" {{heads[{table}][{x}]:+.3f}}{{mark[{table}][{x}]}} |" if only in (None, x) else " |" for x in cells]
    return f"| {name} |{''.join(texts)}"


PASSAGES = [
    Passage(
        values,
        {
            PUBLISHED: [
                "hold {count:,} trained transformers",
                *map(_open_lm, (16, 32, 48, 64, 96, 128)),
                "| from 64 to 32 | {step[64 to 32]:+.3f} | {step_worse[64 to 32]} |",
                "| from 128 to 64 | {step[128 to 64]:+.3f} | {step_worse[128 to 64]} |",
                *map(_archai, ARCHAI),
                "turns the gain of TransXL lm1b into {linear:+.3f}",
                "{clear} of {encoders} effects are clear",
                *(f"| {name} | {{depth[{name}][params]:+.3f}} | {{depth[{name}][blocks]:+.3f}} |" for name in DECODERS),
                "without embeddings {lose} of {tables} tables clearly lose and {gain} gain",
                "open_lm changes by {depth[open_lm][flops]:+.3f}, Gemstones by "
                "{depth[Gemstones FineWeb-Edu][flops]:+.3f} and {depth[Gemstones DCLM][flops]:+.3f}",
                "FlexiBERT without embeddings, {depth[FlexiBERT GLUE][blocks]:.1f %} of the error",
            ],
        },
    ),
    Passage(
        reruns_and_updates,
        {
            PUBLISHED: [
                "| open_lm | {fewest:,} to {most:,} | `batch`",
                "Transformer-XL lm1b; wt103 | {lm1b:,}; {wt103:,} |",
                "({count} pairs, {cells} cells)",
                "before and after | {fits[0][updates]:+.3f} | - | - |",
                "| and depth | {fits[1][updates]:+.3f} | {fits[1][depth]:+.3f} | - |",
                "| and tokens | {fits[2][updates]:+.3f} | {fits[2][depth]:+.3f} | {fits[2][tokens]:+.3f} |",
                "perfect, {perfect[0]:+.3f} to {perfect[4]:+.3f} with {counts[0]:,} to {counts[1]:,} updates; from 24 "
                "to 8 it is reversed, {other[0]:+.3f} to {other[4]:+.3f} with {counts[2]:,} to {counts[3]:,}.",
                "{runs} logs change the head dimension",
                "| {runs} logs, {studies} studies |",
                "| worse | {worse} of {runs} runs, {worse_studies} of {studies} studies |",
                "| median of runs | {median:+.4f} | | least and most | {ends[0]:+.4f}, {ends[1]:+.4f} |",
                "| mean over studies | {mean:+.4f} |",
                "about {nats:+.3f nats per token}, if",
            ],
        },
    ),
]
