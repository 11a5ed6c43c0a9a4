"""Tensors by name in safetensors files: one file, or several with Hugging Face's index of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from leanformer.errors import WeightsError
from leanformer.runtime import files, multihost
from leanformer.stored import open_lazily


Tensors = dict[str, np.ndarray]


def read(path: str | Path) -> Tensors:
    """Read the tensors of safetensors weights; half precision becomes float32.

    Args:
        path: safetensors file, index of several such files, or folder with exactly one file or index.

    Raises:
        WeightsError: the file does not exist, is a pickle (which is never opened), damaged or truncated; the index
            names missing files; or values are not finite.
    """
    tensors = {name: stored() for name, stored in open_lazily(path).items()}
    check_finite(tensors, str(path))
    return tensors


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, and texts as metadata, to a safetensors file, atomically; an old file is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as draft:
        contiguous = {name: np.asarray(x, order="C") for name, x in tensors.items()}
        safetensors.save_file(contiguous, draft, dict(metadata or {}))


@jax.jit
def _count_not_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(~jnp.isfinite(x)) for x in arrays]


def check_finite(tensors: Mapping[str, Any], source: str) -> None:
    """Raise WeightsError for a NaN or an infinity in weights, of NumPy or on devices; every process must call it."""
    on_device = {name: x for name, x in tensors.items() if isinstance(x, jax.Array)}
    counts = {name: x.size - np.count_nonzero(np.isfinite(x)) for name, x in tensors.items() if name not in on_device}
    if on_device:
        counts |= zip(on_device, multihost.fetch(_count_not_finite([*on_device.values()])), strict=True)
    bad = [name for name in tensors if counts[name]]
    if bad:
        number, size = int(counts[bad[0]]), tensors[bad[0]].size
        more = f", and so do {len(bad) - 1} more of {len(tensors)} tensors" if len(bad) > 1 else ""
        raise WeightsError(
            f"{source}: {bad[0]} has {number:,} of {size:,} numbers that are not finite (NaN or infinity){more}. "
            "Use an earlier checkpoint or other weights, or measure these with `leanformer.watch_weights`."
        )
