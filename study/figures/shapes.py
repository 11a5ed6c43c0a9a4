"""Figures on heads, head dimension, depth and MLP of the small ViTs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from study.figures.passages import FINDINGS, README, RESULTS, Passage
from study.heads import language, vision, vision_length
from study.shapes import surface
from study.tables import EVIDENCE, Estimate


SMALL, LARGE = 120e3, 270e3  # budgets of parameters
CHANGES = {"heads": "num_heads", "depth": "depth", "head dimension": "head_dim"}
CHANGES |= {"heads, with half the layers": surface.LEAN}
ARMS = {  # rows of the table of half the layers
    "no heads added": "layers halved",
    "a third more heads": "lean, MLP kept",
    "none, half the MLP": "layers and MLP halved",
    "a third more, half the MLP": "lean, MLP halved",
    "twice the heads, half as wide, half the MLP": "lean, fixed width",
}
SETTINGS = {"short": (48, 5), "long": (48, 15), "wide": (96, 5)}  # width and epochs


def values() -> Mapping[str, Any]:
    """Return the effects on the error, by budget; `mlp` is the MLP's at both together, other sizes held."""
    rows = surface.read_table(EVIDENCE / "quickstart.csv")
    parts = [[row for row in rows if row["budget"] == budget] for budget in (SMALL, LARGE)]
    return {
        "params": [surface.effects(part, "params", "top1") for part in parts],
        "mlp": surface.effects_at_equal_sizes(rows)["mlp_dim"],
    }


def trade() -> Mapping[str, Any]:
    """Return figures of the study's ViTs by setting and arm."""
    found = {name: read_trade(*setting) for name, setting in SETTINGS.items()}
    judged = [x["verdict"][name] for x in found.values() for name in vision.CONTROLS]
    shares = [share for x in found.values() for share in x["share"].values()]
    about = {"margin": vision.MARGIN, "good": judged.count("holds"), "arms": len(judged)}
    return found | about | {"shares": [min(shares), max(shares)]}


def read_trade(width: int, epochs: float) -> dict[str, Any]:
    """Return the original's error in percent, and by arm the share of its parameters, the change and its verdict."""
    rows = language.read_rows(vision.ROWS)
    errors = vision.read_errors(rows, width, epochs)
    params = {n: language.rows_of(rows, vision.make_arm(n, width, epochs))[0]["params"] for n in errors}
    judged = vision.compare(errors)
    return {
        "error": Estimate.mean(100 * errors["original"]),
        "share": {name: 100 * params[name] / params["original"] for name in judged},
        "change": {name: Estimate.of(change) for name, (change, _) in judged.items()},
        "verdict": {name: word for name, (_, word) in judged.items()},
    }


def length() -> Mapping[str, Any]:
    """Return mean errors of ViTs in percent by updates and heads, and the change from 2 to 16 heads."""
    rows = language.read_rows(vision_length.ROWS)
    lengths = {steps: x for steps in vision_length.STEPS if (x := vision_length.change(rows, steps))}
    errors = {steps: vision_length.errors_of(rows, steps) for steps in lengths}
    return {
        "error": {steps: {n: np.mean([*e.values()]) for n, e in found.items()} for steps, found in errors.items()},
        "change": {steps: Estimate.of(x) for steps, x in lengths.items()},
    }


def _row(name: str, arm: str, cell: str) -> str:
    return " | ".join([f"| {name}", *(cell.format(setting=setting, arm=arm) for setting in SETTINGS)]) + " |"


CHANGE = "{{{setting}[change][{arm}]:+.1f}} {{{setting}[verdict][{arm}]}}"
LENGTH = " | ".join(f"{{error[STEPS][{n}]:.2f}}" for n in vision_length.HEADS)
PASSAGES = [
    Passage(
        length,
        {
            README: ["16 heads instead of 2, equal total width | {change[14060]:+.1f %} |"],
            FINDINGS: [f"| {n:,} updates | {{change[{n}]:+.1f %}} |" for n in (390, 2344, 14060)],
            RESULTS: [
                *(f"| {n:,} updates | {LENGTH.replace('STEPS', str(n))} | {{change[{n}]:+.1f}} |" for n in (390, 2344)),
                "| 14,060 updates | {error[14060][2]:.2f} | | | {error[14060][16]:.2f} | {change[14060]:+.1f} |",
            ],
        },
    ),
    Passage(
        trade,
        {
            RESULTS: [
                "have {shares[0]:.0f} to {shares[1]:.0f} % of the parameters",
                *(_row(name, arm, CHANGE) for name, arm in ARMS.items()),
                "originals err {short[error]:.2f ±}, {long[error]:.2f ±} and {wide[error]:.2f ±} %",
                "interval ends below +{margin:.0f} %",
            ],
        },
    ),
    Passage(
        values,
        {
            RESULTS: [
                *(
                    f"| {name} | {{params[0][{key}]:+.1f %}} | {{params[1][{key}]:+.1f %}} |"
                    for name, key in CHANGES.items()
                ),
                "its doubling changes the error by {mlp:+.1f %}",
            ],
        },
    ),
]
