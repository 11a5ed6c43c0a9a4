"""Tensors by name in safetensors files: one file, or several with Hugging Face's index of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from leanformer.errors import WeightsError
from leanformer.runtime import files, multihost
from leanformer.stored import INDEX, SHOWN, check_not_pickle, check_shard, damaged, find_weights, shards


Tensors = dict[str, np.ndarray]
FLOATS = ("BF16", "F16", "F32", "F64")


def read(path: str | Path, *, finite: bool = True) -> Tensors:
    """Read the tensors of safetensors weights; half precision becomes float32.

    Args:
        path: safetensors file, index of several such files, or folder with exactly one file or index.
        finite: if true, raise for NaN and infinity.

    Raises:
        WeightsError: the file does not exist, is a pickle (which is never opened), damaged or truncated; the index
            names missing files; or values are not finite.
    """
    path = Path(path).expanduser()
    path = find_weights(path) if path.is_dir() else path
    tensors: Tensors = {}
    for file, names in (shards(path) if path.name.endswith(INDEX) else {path: None}).items():
        part = _read_file(file)
        if names is not None:
            check_shard(file, part, names)
        if finite:
            check_finite(part, str(file))
        tensors |= part
    return tensors


def _read_file(path: Path) -> Tensors:
    check_not_pickle(path)
    try:
        with safe_open(path, framework="numpy") as opened:
            types = {name: opened.get_slice(name).get_dtype() for name in opened.offset_keys()}
        if unreadable := [f"{name} ({kind})" for name, kind in types.items() if kind[0] == "F" and kind not in FLOATS]:
            raise WeightsError(
                f"{path} has {len(unreadable)} quantised tensors, which are not read: {', '.join(unreadable[:SHOWN])}. "
                f"Floats must be {', '.join(FLOATS)}: convert them where they come from, with their scales."
            )
        tensors = safetensors.load_file(path)
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise damaged(path, error) from error
    half = (jnp.bfloat16, np.float16)
    return {name: x.astype(np.float32) if x.dtype in half else x for name, x in tensors.items()}


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
    """Raise WeightsError for a NaN or an infinity in weights, which would silently spoil every result.

    Tensors are arrays of NumPy or on devices. Every process must call it.
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
