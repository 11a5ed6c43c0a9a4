"""What an experiment on mediation found: a table with the verdict and its rule, and a chart."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import mediation_verdict as mediation
from experiments.mediation_verdict import KAPPA, Records, Verdict
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Scores


def spread(values: Scores) -> str:
    """Mean and half of the 95 % interval."""
    interval = statistics.mean_interval(values)
    return f"{np.mean(values):.2f} ± {interval.high - np.mean(values):.2f}"


def table(arms: Records, found: Verdict, figures: Sequence[str]) -> str:
    """Markdown: arms, then differences, then the verdict and its rule. `figures`: of the records, besides κ."""
    lines = ["| arm, heads | parameters | rates | top-1, % | κ of attention output | stable rank | entropy / ln N |"]
    lines[0] += " self-weight | largest logit |"
    lines.append("|---" * 9 + "|")
    for name, arm in arms.items():
        runs = mediation.chosen(arm["runs"])
        cells = [name, f"{arm['parameters']:,}", ", ".join(sorted({f"{run['rate']:g}" for run in runs}))]
        cells.append(spread(mediation.arm(arm).score))
        for key in (KAPPA, "attention_output.stable_rank", *figures):
            pair = [np.mean([run[when][key] for run in runs]) for when in ("before", "after")]
            pair = [10**x for x in pair] if key == KAPPA else pair
            cells.append(" → ".join(f"{x:.3g}" for x in pair))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| difference | mean and 95 % interval |", "|---|---|"]
    lines += [f"| {name} | {mediation.shown(d)} |" for name, d in found.effects.items()]
    return "\n".join([*lines, "", f"**{found.sentence}**", "", f"Rule. {mediation.RULE}"])


def as_numbers(found: Verdict) -> dict[str, Any]:
    """The verdict for a file."""
    intervals = {name: (d.value, d.interval()) for name, d in found.effects.items()}
    effects = {name: {"mean": mean, "interval": [i.low, i.high]} for name, (mean, i) in intervals.items()}
    return {"word": found.word, "sentence": found.sentence, "rule": mediation.RULE, "effects": effects}


def chart(arms: Records, found: Verdict, heads: Mapping[str, int]) -> Figure:
    """Top-1 against κ after training, an arm a point with its 95 % interval. `heads`: how many few and many are."""
    figure = Figure(figsize=(7.5, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, record in arms.items():
        (lever, many), arm = name.split(", "), mediation.arm(record)
        kappa, error = 10 ** arm.kappa.mean(), statistics.mean_interval(arm.score).high - arm.score.mean()
        color = {"few": "#b5541c", "many": "#1f5fa8"}[many]
        marker = "s" if lever.startswith("as ") else "^" if lever in ("base", "mlp") else "o"
        style = {"fmt": marker, "color": color, "capsize": 2, "markersize": 5, "lw": 1}
        axes.errorbar(kappa, arm.score.mean(), error, **style)
        place = {"textcoords": "offset points", "xytext": (5, 3), "fontsize": 7, "color": color}
        axes.annotate(lever, (kappa, arm.score.mean()), **place)
    axes.set(xscale="log", xlabel="condition number of the attention output after training", ylabel="top-1, %")
    title = f"{heads['few']} (orange) and {heads['many']} heads (blue); squares: equal entropy, no lever"
    axes.set_title(title, fontsize=9)
    figure.suptitle(found.word, fontsize=10)
    axes.grid(alpha=0.25)
    axes.margins(x=0.12)  # room for the words on the right
    return figure
