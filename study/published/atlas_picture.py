"""Picture of `study/published/atlas.py`: effect of a doubling of heads against the head dimension that results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from study.figures.front_picture import DARK, FIRST
from study.published.effects import HEADS, Effect


SECOND, THIRD, FOURTH = "#c9682a", "#7d828b", "#b25fc4"  # contrast of 3 or more on white and on DARK, as FIRST
NAME = "published_models"


class Series(NamedTuple):
    """Sources with one colour and one label, at a place in data coordinates."""

    label: str
    color: str
    place: tuple[float, float]


DECODERS: Mapping[str, Series] = {  # by the beginning of the table's name
    "open_lm": Series("open_lm", FIRST, (13, 0.15)),
    "archai six": Series("archai, searches", FOURTH, (105, -0.085)),
    "archai GPT2 lm1b": Series("archai, One Billion Word", SECOND, (60, 0.075)),
    "archai TransXL lm1b": Series("", SECOND, (0, 0)),
    "archai": Series("archai, WikiText-103", THIRD, (5.2, -0.06)),
}
OTHERS: Mapping[str, Series] = {
    "FlexiBERT": Series("FlexiBERT", SECOND, (68, -8)),
    "AutoFormer": Series("AutoFormer", THIRD, (50, 10.5)),
    "PiT": Series("PiT", FOURTH, (16.5, 2.6)),
    "own": Series("this project's small ViTs", FIRST, (8, -10.5)),
}


def draw(folder: Path, effects: Sequence[Effect]) -> None:
    """Write published_models.png and published_models_dark.png. Bars are 95 % intervals; a step is at its result."""
    main = [effect for effect in effects if effect.question == HEADS and effect.main and not effect.at]
    decoders = [effect for effect in main if effect.kind == "decoder"]
    others = [effect for effect in main if effect.kind != "decoder"]
    for name, style in ((NAME, {}), (f"{NAME}_dark", DARK)):
        with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, **style}):
            figure, (upper, lower) = plt.subplots(2, 1, figsize=(5.2, 6.4), sharex=True, layout="constrained")
            _draw_panel(upper, decoders, DECODERS)
            upper.set(ylim=(-0.16, 0.21), ylabel="change of loss, nats per token")
            upper.set_title("Decoders: twice the heads, half the head dimension", fontsize=10, loc="left")
            _draw_panel(lower, others, OTHERS)
            lower.set(ylim=(-13.5, 13.5), ylabel="change of error, %", xlabel="head dimension after doubling the heads")
            lower.set_title("Image and text encoders", fontsize=10, loc="left")
            lower.set(xscale="log", xlim=(4, 300))
            lower.set_xticks([8, 16, 32, 64, 128, 256], ["8", "16", "32", "64", "128", "256"])
            lower.minorticks_off()
            figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close(figure)


def _draw_panel(axes: Axes, effects: Sequence[Effect], series: Mapping[str, Series]) -> None:
    axes.axhline(0, color=THIRD, linewidth=0.8)
    tables = list(dict.fromkeys(effect.table for effect in effects))
    for table in tables:
        prefix = next(prefix for prefix in series if table.startswith(prefix))
        color = series[prefix].color
        peers = [name for name in tables if series[next(p for p in series if name.startswith(p))].color == color]
        shift = 1.05 ** (peers.index(table) - (len(peers) - 1) / 2)  # apart from others of the same colour
        group = [effect for effect in effects if effect.table == table]
        x = shift * np.array([effect.mean_dim for effect in group])
        y, low, high = (np.array([getattr(effect, name) for effect in group]) for name in ("value", "low", "high"))
        style = {"fmt": "o" if color == THIRD else "o-", "markersize": 4, "linewidth": 1, "capsize": 2}
        axes.errorbar(x, y, yerr=(y - low, high - y), color=color, **style)
        for effect, height in zip(group, y, strict=True):
            if effect.form == "response surface":  # one effect over all head dimensions
                axes.plot(effect.dims, (height, height), color=color, linewidth=1)
    for label, color, place in series.values():
        axes.annotate(label, place, color=color)
