"""Communication volume, FLOPs and lower bounds on the time of a partitioned program."""

import math
from typing import Any

from leanformer.costs import hardware
from leanformer.programs.communication import Collective, Loop


def describe(loops: list[Loop]) -> dict[str, Any]:
    """Return FLOPs and communication volume per device of a program, and bounds on its time by type of device.

    The keys are flops_per_device, collectives, bytes_moved, bytes_moved_scattering, loops and floors;
    `programs.read_communication` explains them.

    Args:
        loops: loops of the program, from `communication.read`.
    """
    everything = [x for loop in loops for x in loop.collectives]
    return {
        "flops_per_device": sum(loop.flops * loop.turns for loop in loops),
        "collectives": _sum_collectives(everything),
        "bytes_moved": sum(x.moved() for x in everything),
        "bytes_moved_scattering": sum(x.moved(scatter=True) for x in everything),
        "loops": [_loop(loop) for loop in loops],
        "floors": {name: lower_bounds(name, loops) for name in hardware.LINKED},
    }


def _sum_collectives(collectives: list[Collective]) -> list[dict[str, Any]]:
    """Return one row per type of collective and axes, the largest communication volume first."""
    rows: dict[Any, dict[str, Any]] = {}
    for x in collectives:
        row = rows.setdefault((x.kind, x.axes, x.sliced), {"kind": x.kind, "axes": x.axes, "sliced": x.sliced})
        row["times"] = row.get("times", 0) + x.times
        row["bytes_moved"] = row.get("bytes_moved", 0) + x.moved()
    return sorted(rows.values(), key=lambda row: -row["bytes_moved"])


def _loop(loop: Loop) -> dict[str, Any]:
    sent = dict.fromkeys((x.kind for x in loop.collectives), 0.0)
    for x in loop.collectives:
        sent[x.kind] += x.moved(scatter=True) / loop.turns
    return {
        "name": loop.name,
        "turns": loop.turns,
        "flops_per_iteration": loop.flops,
        "bytes_moved_per_iteration": sent,
    }


def lower_bounds(name: str, loops: list[Loop]) -> dict[str, Any]:
    """Return lower bounds on the time of a step, in seconds, and the ratio of communication to matmul time per loop.

    The bounds are products_s (matmuls), sending_s (communication), overlapped_s (the larger of both) and
    one_after_the_other_s (their sum). The key loops has a dict per loop with matmuls: name, turns (iterations per step)
    and sending_to_products (the ratio). If the ratio is below 1, the collectives of the loop can be overlapped with the
    matmuls of the previous or the next iteration.

    Args:
        name: device, one of `hardware.LINKED`.
        loops: loops of the program, from `communication.read`.
    """
    peak = hardware.DATA_SHEETS[name].peak or math.nan

    def sending_seconds(loop: Loop) -> float:
        return sum((x.moved(scatter=True) / hardware.bandwidth(name, x.group) for x in loop.collectives), 0.0)

    products = sum(loop.flops * loop.turns for loop in loops) / peak
    sending = sum(map(sending_seconds, loops))
    shares = [
        {
            "name": loop.name,
            "turns": loop.turns,
            "sending_to_products": sending_seconds(loop) / (loop.flops * loop.turns / peak),
        }
        for loop in loops
        if loop.flops
    ]
    total = {
        "products": products,
        "sending": sending,
        "overlapped": max(products, sending),
        "one_after_the_other": products + sending,
    }
    return {f"{key}_s": value for key, value in total.items()} | {"loops": shares}
