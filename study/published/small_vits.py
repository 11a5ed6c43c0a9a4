"""Effect of heads at fixed total width in this project's small ViTs, as `study/published/atlas.py` prints it."""

import itertools
import math

import numpy as np

from leanformer.analysis import statistics
from study.heads import heads
from study.published import published
from study.published.effects import HEADS, Effect, extent, to_percent
from study.published.published import PERCENT
from study.shapes import surface


def estimate() -> list[Effect]:
    """Return the effect of heads at fixed total width in this project's small ViTs.

    First 20 shapes of each parameter budget, by the response surface of study/shapes/surface.py at equal parameters;
    then neighbouring head counts of study/heads/heads.py, with Welch's interval over three seeds each.
    """
    result = []
    rows = surface.read_table(published.EVIDENCE / "quickstart.csv")
    for budget in sorted({row["budget"] for row in rows}):
        part = [row for row in rows if row["budget"] == budget]
        shapes = {tuple(row[axis] for axis in surface.AXES): row["head_dim"] for row in part}
        effect = surface.effects(part, "params", "top1")[surface.NARROW]
        mean = float(2 ** np.log2([*shapes.values()]).mean())
        place = {"dims": extent(shapes.values()), "mean_dim": mean, "widths": extent(row["width"] for row in part)}
        name = f"own ViTs, {budget:,.0f} parameters"
        result.append(_make_effect(name, "response surface", effect, models=len(part), units=len(shapes), **place))
    errors: dict[tuple[int, int], list[float]] = {}
    for row in published.read("heads"):
        if row["trade"] == "fixed total width":
            shape = int(row["num_heads"]), int(row["head_dim"])
            errors.setdefault(shape, []).append(math.log(1 - float(row["top1"]) / 100))
    shapes = sorted(errors)
    for before, after in itertools.pairwise(shapes):
        difference = statistics.welch(np.array(errors[after]), np.array(errors[before]))
        interval, dim = difference.interval(), after[1]
        effect = tuple(map(to_percent, (difference.value, interval.low, interval.high)))
        count = len(errors[before]) + len(errors[after])
        place = {"dims": (dim, dim), "mean_dim": float(dim), "widths": (heads.WIDTH, heads.WIDTH)}
        name = f"own ViTs, total width {heads.WIDTH}"
        result.append(_make_effect(name, "pairs", effect, models=count, units=count, **place))
    return result


def _make_effect(table: str, form: str, effect: tuple[float, float, float], **rest: object) -> Effect:
    kind = {"kind": "image encoder", "unit": PERCENT, "at": "", "p": math.nan}
    value, low, high = effect
    return Effect(table, question=HEADS, form=form, main=True, value=value, low=low, high=high, **kind, **rest)
