"""Full tables of the effects of `study/published/atlas.py`; docs/published_models.md has a part of them."""

from collections.abc import Sequence

from study.paper.paper_tables import table
from study.published.effects import DEPTH, HEADS, MLP, Effect
from study.published.published import BLOCKS, FLOPS, NATS, PARAMS


def format_effect(effect: Effect) -> str:
    """Format the change and its interval, in nats or in percent."""
    digits, unit = (3, "") if effect.unit == NATS else (1, " %")
    value, low, high = (f"{x:+.{digits}f}" for x in (effect.value, effect.low, effect.high))
    return f"{value} ({low} to {high}){unit}"


def format_p(effect: Effect) -> str:
    """Format the corrected p value; empty without one."""
    if effect.p_corrected != effect.p_corrected:
        return ""
    return f"{effect.p_corrected:.2g}" if effect.p_corrected >= 0.001 else "< .001"


def format_range(effect: Effect) -> str:
    """Format the range of the head dimension after a doubling of heads."""
    low, high = effect.dims
    return f"{low}" if low == high else f"{low} to {high}"


def head_table(effects: Sequence[Effect]) -> str:
    """Return the effects of heads by range, in the main form and in the second."""
    rows = []
    for effect in effects:
        if effect.question == HEADS and effect.main and not effect.at:
            peers = (e for e in effects if (e.table, e.dims, e.form) == (effect.table, effect.dims, _second(effect)))
            other = next((format_effect(e) for e in peers if e.question == HEADS), "")
            worse = "" if effect.worse is None else f", {effect.worse} worse"
            row = [effect.table, format_range(effect), format_effect(effect), other, f"{effect.models}{worse}"]
            rows.append([*row, format_p(effect)])
    return table("models|head dimension after|change per doubling of heads|second form|n|p, corrected", rows)


def _second(effect: Effect) -> str:
    return {"pairs": "quadratic", "squares": "curved"}.get(effect.form, "")


def trade_table(effects: Sequence[Effect]) -> str:
    """Return the effects of depth and MLP at equal cost, in the main form."""
    main = {(e.table, e.question, e.at): format_effect(e) for e in effects if e.main and e.question in (DEPTH, MLP)}
    columns = [(DEPTH, PARAMS), (DEPTH, BLOCKS), (DEPTH, FLOPS), (MLP, BLOCKS)]
    names = dict.fromkeys(name for name, _, _ in main)
    rows = [[name, *(main.get((name, *column), "-") for column in columns)] for name in names]
    titles = "models|depth, equal parameters|depth, equal without embeddings|depth, equal FLOPs"
    return table(f"{titles}|MLP, equal without embeddings", rows)
