"""Reruns by strangers: heads of 64 instead of 128 in one small GPT, and depth against width in another.

    python -m study.published.reruns

2026-11-28. autoresearch.csv: 22 of 22 runs are worse with twice the heads, by a median of 0.0073 bits per byte, about
0.02 nats per token, after five minutes of training. depth_width.csv: with normalised inputs, 16 layers are as good as 8
wider ones or better after two epochs, and equal after 1,000 steps; without them the deep models diverge.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.analysis import statistics
from study import tables
from study.tables import Estimate


NATS_PER_BIT = 2.752 / 0.988  # nats per token of a run that has 0.988 bits per byte (source 69448857792)
DEEP, WIDE = (16, 384), (8, 512)  # depth and width
SETTING = ("embedding", "linear", "x_norm", "qk_norm")


def heads() -> Mapping[str, Any]:
    """Return the change of the loss in bits per byte when heads of 128 become twice as many of 64.

    The mean is over studies, since runs of a study share a control.
    """
    rows = tables.read("autoresearch")
    changes = [float(row["bpb_64"]) - float(row["bpb_128"]) for row in rows]
    studies: dict[str, list[float]] = {}
    for row, change in zip(rows, changes, strict=True):
        studies.setdefault(row["study"], []).append(change)
    means = [float(np.mean(x)) for x in studies.values()]
    return {
        "runs": len(rows),
        "worse": sum(x > 0 for x in changes),
        "studies": len(studies),
        "worse_studies": sum(x > 0 for x in means),
        "median": float(np.median(changes)),
        "ends": (min(changes), max(changes)),
        "mean": Estimate.mean(means),
        "nats": Estimate.mean(NATS_PER_BIT * x for x in means),
    }


def depth() -> dict[tuple[str, ...], Estimate]:
    """Return the last validation loss of DEEP minus WIDE by table and setting, with Welch's interval over seeds.

    The deeper shape has 17 % fewer parameters.
    """
    losses: dict[tuple[str, ...], dict[tuple[int, int], list[float]]] = {}
    for row in tables.read("depth_width"):
        shape = int(row["depth"]), int(row["width"])
        key = row["table"], *(row[name] for name in SETTING)
        losses.setdefault(key, {}).setdefault(shape, []).append(float(row["val_loss_last"]))
    return {
        key: Estimate.of(statistics.welch(np.array(by_shape[DEEP]), np.array(by_shape[WIDE])))
        for key, by_shape in sorted(losses.items())
        if {DEEP, WIDE} <= set(by_shape)
    }


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    found = heads()
    yield (
        f"Heads of 64 instead of 128: {found['worse']} of {found['runs']} runs worse, {found['worse_studies']} of "
        f"{found['studies']} studies; median {found['median']:+.4f}, from {found['ends'][0]:+.4f} to "
        f"{found['ends'][1]:+.4f} bits per byte"
    )
    yield f"mean over studies {found['mean']:+.4f bits per byte}, {found['nats']:+.3f nats per token}"
    for key, estimate in depth().items():
        about = ", ".join(f"{name} {value}" for name, value in zip(("table", *SETTING), key, strict=True))
        yield f"{DEEP[0]} layers of {DEEP[1]} minus {WIDE[0]} of {WIDE[1]}: {estimate:+.3f} ({about})"


@cli.command()
def main(_: cli.Values) -> None:
    print(*report(), sep="\n")


if __name__ == "__main__":
    cli.run(main)
