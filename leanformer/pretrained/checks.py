"""Check of weights for values that are not finite."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.errors import WeightsError
from leanformer.runtime import multihost


@jax.jit
def _count_not_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the number of values in each array that are not finite."""
    return [jnp.sum(~jnp.isfinite(x)) for x in arrays]


def check_finite(tensors: Mapping[str, Any], source: str) -> None:
    """Raise WeightsError for a NaN or an infinity in weights, which would silently spoil every result.

    All weights read from files and checkpoints are checked here. Every process must call it.

    Args:
        tensors: NumPy arrays or device arrays, by name.
        source: origin of the weights, for the message.
    """
    on_device = {name: x for name, x in tensors.items() if isinstance(x, jax.Array)}
    counts = {name: x.size - np.count_nonzero(np.isfinite(x)) for name, x in tensors.items() if name not in on_device}
    if on_device:
        counts |= zip(on_device, multihost.fetch(_count_not_finite([*on_device.values()])), strict=True)
    bad = [name for name in tensors if counts[name]]
    if bad:
        number, size = int(counts[bad[0]]), tensors[bad[0]].size
        more = f", and so do {len(bad) - 1} more of its {len(tensors)} tensors" if len(bad) > 1 else ""
        raise WeightsError(
            f"{source}: {bad[0]} has {number:,} of {size:,} numbers that are not finite (NaN or infinity){more}. "
            "Use an earlier checkpoint or other weights, or measure these with `probe --allow_nonfinite`."
        )
