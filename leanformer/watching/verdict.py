"""What the rows of a watch say, in sentences: each judgement names its reference, and none is "good" or "bad"."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.conditioning.spectrum import FLOOR, beyond_float32


WORST = 3  # layers that are named
# Share of the head dimension that heads use in two trained models and in fresh ones of their shapes (docs/results.md).
USUAL = "Trained models in docs/results.md: 32 % (MiniLM, 32 dimensions), 15 % (ViT-S/14, 64); fresh ones: 5 and 2 %."


class Verdict(dict[str, Any]):
    """Findings on a watched model: a dictionary ready for JSON, which prints as its sentences.

    Keys: sentences; measure (which one the layers are judged by); layers (how many); worst (layer, condition_number,
    at_least, times_gaussian); median_times_gaussian; singular (number of layers); change (layers that are higher,
    lower, and the most changed) if there is a reference; heads (median, lowest and highest share of the head dimension
    that is used).
    """

    def __str__(self) -> str:
        return " ".join(self["sentences"])

    __repr__ = __str__


def judge(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Return the verdict on the rows of a watch or of `watch_weights`."""
    result = Verdict(sentences=[], layers=0)
    of_layers = [row for row in rows if row["head"] is None and row["median"] is not None and row["gaussian"]]
    if not of_layers:
        result["sentences"].append("No condition number was measured.")
        return result
    names = [row["measure"] for row in of_layers]
    measure = next((name for name in ("attention_output", "head_output", "tokens") if name in names), None)
    chosen = [row for row in of_layers if measure in (None, row["measure"])]
    result |= {"measure": measure, "layers": len(chosen)}
    _judge_by_gaussian(result, chosen)
    _judge_by_reference(result, chosen)
    _judge_heads(result, [row for row in rows if row["measure"] == "head_output" and row["head"] is not None])
    return result


def _name(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return row["layer"] if result["measure"] else f"{row['layer']}, {row['measure']}"


def _judge_by_gaussian(result: Verdict, rows: Sequence[Mapping[str, Any]]) -> None:
    times = [row["median"] / row["gaussian"]["median"] for row in rows]
    worst = sorted(zip(times, rows, strict=True), key=lambda pair: -pair[0])[:WORST]
    result["worst"] = [
        {
            "layer": _name(row, result),
            "condition_number": row["median"],
            "at_least": "median" in row["bounds"],
            "times_gaussian": x,
        }
        for x, row in worst
    ]
    result["median_times_gaussian"] = float(np.median(times))
    result["singular"] = sum(row["median"] >= 0.99 / FLOOR for row in rows)
    named = [
        f"{x['layer']} {'≥' * x['at_least']}{x['condition_number']:.3g} ({x['times_gaussian']:,.3g} times)"
        for x in result["worst"]
    ]
    what = f"κ of {result['measure']}" if result["measure"] else "κ"
    result["sentences"].append(
        f"{what}, and how many times that of a Gaussian matrix of the same shape, highest first: {', '.join(named)}; "
        f"the median of {len(rows)} is {result['median_times_gaussian']:,.3g} times."
    )
    if result["singular"]:
        result["sentences"].append(f"κ is {beyond_float32(result['singular'], len(rows))}.")


def _judge_by_reference(result: Verdict, rows: Sequence[Mapping[str, Any]]) -> None:
    changed = [(row["median"] / row["reference"]["median"], row) for row in rows if row.get("reference")]
    if not changed:
        return
    most, row = max(changed, key=lambda pair: abs(np.log(pair[0])))
    result["change"] = {
        "higher": sum(x > 1 for x, _ in changed),
        "lower": sum(x < 1 for x, _ in changed),
        "most": {"layer": _name(row, result), "from": row["reference"]["median"], "to": row["median"], "times": most},
    }
    result["sentences"].append(
        f"Against the reference it is higher in {result['change']['higher']} and lower in {result['change']['lower']} "
        f"of {len(changed)}, most changed in {_name(row, result)}: {row['reference']['median']:.3g} to "
        f"{row['median']:.3g}."
    )


def _judge_heads(result: Verdict, rows: Sequence[Mapping[str, Any]]) -> None:
    used = [(row["effective_rank"] / row["shape"][1], row) for row in rows if row["effective_rank"]]
    if not used:
        return
    used.sort(key=lambda pair: pair[0])
    shares = [share for share, _ in used]
    result["heads"] = {"median": float(np.median(shares)), "lowest": shares[0], "highest": shares[-1]}
    first, last = used[0][1], used[-1][1]
    result["sentences"] += [
        f"Heads use a median of {result['heads']['median']:.0%} of their dimension (effective rank), from "
        f"{shares[0]:.0%} (head {first['head']} of {first['layer']}) to {shares[-1]:.0%} (head {last['head']} of "
        f"{last['layer']}).",
        USUAL,
    ]
