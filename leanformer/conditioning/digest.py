"""From summaries on the device to plain numbers on the host: median and quantiles for each layer, and what is wrong."""

from typing import Any

import jax
import numpy as np

from leanformer.conditioning.spectrum import FLOOR, Reading, Summary


QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}


def digest(found: Summary | Reading) -> list[dict[str, Any]]:
    """One dictionary a layer (leading axis L) over all its examples and heads, ready for JSON.

    A mean would mislead: condition numbers have a heavy tail. Matrices with a NaN or an infinity are left out and
    counted; singular ones stay in at their lower bound, since leaving out the worst would flatter the median. A figure
    is None where nothing is left of it. `flags` are sentences, none if all is well.
    """
    found = jax.device_get(found)
    usable = np.asarray(found.finite if isinstance(found, Summary) else found.valid)
    return [_layer(jax.tree.map(lambda x, i=i: np.ravel(x[i]), found), usable[i].ravel()) for i in range(len(usable))]


def _layer(found: Summary | Reading, usable: np.ndarray) -> dict[str, Any]:
    count, lost = usable.size, int((~usable).sum())
    if isinstance(found, Reading):
        flags = [f"undefined or not finite in {lost} of {count}"] if lost else []
        return _quantiles(found.value[usable]) | {"count": count, "not_finite": lost, "flags": flags}
    rank, singular = min(found.shape), int((found.negligible > 0).sum())
    flags = []
    if lost:
        flags.append(f"{lost} of {count} matrices hold a NaN or an infinity and are left out")
    if singular:
        flags.append(
            f"{singular} of {count} matrices are singular in float32 (up to {found.negligible.max()} of {rank} "
            f"singular values are rounding noise), their condition number is at least {1 / FLOOR:.1e}"
        )
    if rank == 1:
        flags.append("a single row or column: its condition number is 1 whatever it holds")
    return _quantiles(found.condition_number[usable]) | {
        "effective_rank": _median(found.effective_rank[usable]),
        "stable_rank": _median(found.stable_rank[usable]),
        "shape": list(found.shape),
        "count": count,
        "not_finite": lost,
        "singular": singular,
        "negligible": int(found.negligible.max()),
        "flags": flags,
    }


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    return {name: float(np.quantile(values, q)) if values.size else None for name, q in QUANTILES.items()}


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None
