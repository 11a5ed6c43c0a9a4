"""Figures on heads, head dimension, depth and MLP of the small ViTs."""

import json
import re
from collections.abc import Mapping
from typing import Any

from study.figures.passages import RESULTS, Passage
from study.heads import language, vision
from study.shapes import surface
from study.tables import EVIDENCE, Estimate


SMALL, LARGE = 120e3, 270e3  # budgets of parameters
CHANGES = {"heads": "num_heads", "depth": "depth", "head dimension": "head_dim"}
CHANGES |= {"heads, at fixed total width": surface.NARROW, "heads, with half the layers": surface.LEAN}


def values() -> Mapping[str, Any]:
    """Return the effects on the error, by budget; `sizes` are those at both budgets together, other sizes held."""
    rows = surface.read_table(EVIDENCE / "quickstart.csv")
    parts = [[row for row in rows if row["budget"] == budget] for budget in (SMALL, LARGE)]
    sizes, (lean, margin, verdict) = (
        surface.effects_at_equal_sizes(rows),
        zip(*map(surface.equivalence, parts), strict=True),
    )
    return {
        "params": [surface.effects(part, "params", "top1") for part in parts],
        "seconds": [surface.effects(part, "step_s", "top1")[surface.LEAN] for part in parts],
        "sizes": sizes
        | dict(zip(("lean", "vit_b", "dim", "total"), [*sizes.values()][len(surface.SIZES) :], strict=True)),
        "lean": lean,
        "margin": margin,
        "verdict": verdict,
        "explained": [100 * surface.explained(part, "params") for part in parts],
        "form": [surface.test_form(part) for part in parts],
        "interaction": [surface.test_form(part, [("depth", "num_heads")]) for part in parts],
    }


def budget() -> Mapping[str, Any]:
    """Return what one layer gains over six at 100,000 parameters, in points, as stored in budget.ipynb."""
    cells = json.loads((EVIDENCE.parents[1] / "notebooks" / "budget.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}).get("text/html", ()) for cell in cells for output in cell.get("outputs", ())]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", line) for html in outputs for line in html]
    (row,) = [row for row in rows if row and row[0] == "depth=1 - depth=6"]
    low, _, high = row[2].split()
    return {"gain": Estimate(*map(float, (row[1], low, high)))}


def trade() -> Mapping[str, Any]:
    """Return figures of the study's ViTs by arm: of width 48, `short` after 5 epochs and `long` after 15 epochs, and
    `wide` of width 96 after 5 epochs."""
    short = read_trade(5)
    added = 100 * (short["params"]["lean, MLP kept"] / short["params"]["layers halved"] - 1)
    tuned = language.rows_of(language.read_rows(vision.ROWS), vision.make_arm("original", 96, 5), language.TUNING_SEED)
    errors = [100 * row["error"] for row in sorted(tuned, key=lambda row: row["lr"])]
    settings = {"short": short, "long": read_trade(15), "wide": read_trade(5, 96)}
    judged = [x["verdict"][name] for x in settings.values() for name in vision.CONTROLS]
    about = {"margin": vision.MARGIN, "added": added, "tuned": errors}
    return settings | about | {"good": judged.count("holds"), "arms": len(judged)}


def read_trade(epochs: float, width: int = 48) -> dict[str, Any]:
    """Return errors in percent, log10 κ, parameters and verdicts of the study's ViTs of a width, by arm.

    `heads` is what the added heads change: each lean arm minus the one with as many layers and the same MLP.
    """
    rows = language.read_rows(vision.ROWS)
    errors, kappa = (vision.read_errors(rows, width, epochs, key) for key in ("error", "log10_condition"))
    arms = {name: language.rows_of(rows, vision.make_arm(name, width, epochs)) for name in errors}
    judged = vision.compare(errors)
    return {
        "error": {name: Estimate.mean(100 * values) for name, values in errors.items()},
        "kappa": {name: values.mean() for name, values in kappa.items()},
        "params": {name: runs[0]["params"] for name, runs in arms.items()},
        "share": {name: 100 * runs[0]["params"] / arms["original"][0]["params"] for name, runs in arms.items()},
        "rates": ", ".join(f"{language.best_rate(vision.make_arm(n, width, epochs), rows, 'error'):g}" for n in arms),
        "change": {name: Estimate.of(change) for name, (change, _) in judged.items()},
        "verdict": {name: word for name, (_, word) in judged.items()},
        "heads": {name: Estimate.of(change) for name, change in vision.compare_heads(errors).items()},
    }


ARM = "| {{short[params][{0}]:,}} | {{short[error][{0}]:.2f ±}} | "
CHANGED = ARM + "{{short[change][{0}]:+.1f}} | {{short[verdict][{0}]}} | "
LONG = "{{long[error][{0}]:.2f ±}} | "
LEAN_ARM = CHANGED + LONG + "{{long[change][{0}]:+.1f}} | {{long[verdict][{0}]}} | "
WIDE = "| {{wide[params][{0}]:,}} | {{wide[error][{0}]:.2f ±}} | "
WIDE_ARM = WIDE + "{{wide[change][{0}]:+.1f}} | {{wide[verdict][{0}]}} | {{wide[kappa][{0}]:.2f}} |"
KAPPAS = "{{short[kappa][{0}]:.2f}}; {{long[kappa][{0}]:.2f}} |"
PASSAGES = [
    Passage(budget, {RESULTS: ["1 layer over 6 by {gain:.1f points} |"]}),
    Passage(
        trade,
        {
            RESULTS: [
                "ends below +{margin:.0f} % of the error",
                "learning rate of each arm by the test error ({short[rates]} after 5 epochs, {long[rates]} after "
                "15 epochs",
                "a third more heads change it by {short[heads][lean, MLP kept]:+.1f} with the MLP kept and by "
                "{short[heads][lean, MLP halved]:+.1f} with the MLP halved; twice the heads of half the dimension, at "
                "exactly the control's parameters, by {short[heads][lean, fixed width]:+.1f}",
                "half the layers alone lose, {short[change][layers halved]:+.1f}; they add {added:.0f} % of the "
                "control's",
                f"{ARM}| | {LONG}| | {KAPPAS}".format("original"),
                *((LEAN_ARM + KAPPAS).format(name) for name in vision.ARMS if name != "original"),
                f"{WIDE}| | {{{{wide[kappa][{{0}}]:.2f}}}} |".format("original"),
                *(WIDE_ARM.format(name) for name in vision.ARMS if name != "original"),
                "the rates are {wide[rates]}",
                "half the layers alone are as good, {wide[change][layers halved]:+.1f}, and so are half the layers "
                "with half the MLP, {wide[change][layers and MLP halved]:+.1f}; to these the added heads change the "
                "error by {wide[heads][lean, MLP kept]:+.1f}, {wide[heads][lean, MLP halved]:+.1f} and "
                "{wide[heads][lean, fixed width]:+.1f}",
                "with {wide[share][lean, MLP kept]:.0f}, {wide[share][lean, MLP halved]:.0f} and "
                "{wide[share][lean, fixed width]:.0f} % of the parameters, and two",
                "its errors at its three lowest rates are {tuned[0]:.2f}, {tuned[1]:.2f} and {tuned[2]:.2f} %",
                "after 15 epochs half the layers alone are as good, {long[change][layers halved]:+.1f}, and the heads "
                "change the error by {long[heads][lean, MLP kept]:+.1f}, {long[heads][lean, MLP halved]:+.1f} and "
                "{long[heads][lean, fixed width]:+.1f}",
                "with {short[share][lean, MLP kept]:.0f} and {short[share][lean, fixed width]:.0f} % of the parameters",
            ],
        },
    ),
    Passage(
        values,
        {
            RESULTS: [
                "| {params[0][narrower heads].value:.1f} and {params[1][narrower heads].value:.1f} % of the error per",
                *(
                    f"| {name} | {{params[0][{key}]:+.1f %}} | {{params[1][{key}]:+.1f %}} |"
                    for name, key in CHANGES.items()
                ),
                "| the same at equal seconds | {seconds[0]:+.1f %} | {seconds[1]:+.1f %} |",
                "doubling the MLP changes the error by {sizes[mlp_dim]:+.1f %}, heads by {sizes[num_heads]:+.1f %}, "
                "layers by {sizes[depth]:+.1f %}, the head dimension by {sizes[head_dim]:+.1f %}.",
                "the MLP held**: {sizes[lean]:+.1f %}",
                "the MLP halved): {sizes[vit_b]:+.1f %}",
                "applied afterwards ({margin[0]:.1f} and {margin[1]:.1f} % of the error)",
                "{verdict[0]} at 120,000 parameters (90 % interval {lean[0].low:.1f} to {lean[0].high:.1f}) and "
                "{verdict[1]} at 270,000 parameters ({lean[1].low:.1f} to {lean[1].high:.1f})",
                "It explains {explained[0]:.0f} and {explained[1]:.0f} % of the variance",
                "F test p = {form[0]:.3f} and {form[1]:.3f}; heads x depth alone, uncorrected: p = "
                "{interaction[0]:.3f} and {interaction[1]:.3f}",
                "the held fit gives {sizes[dim].value:.1f} % of the error at fixed head dimension and "
                "{sizes[total].value:.1f} % at",
            ],
        },
    ),
]
