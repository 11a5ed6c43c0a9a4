"""Tensors by name in safetensors files: one file, or several with Hugging Face's index of them."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from leanformer.errors import WeightsError
from leanformer.pretrained.checks import check_finite
from leanformer.runtime import files
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
    indexed = path.name.endswith(INDEX)
    tensors: Tensors = {}
    for file, names in shards(path).items() if indexed else [(path, None)]:
        part = _read_file(file)
        if names is not None:
            check_shard(file, part, names)
        if finite:
            check_finite(part, str(file))
        tensors |= part
    return tensors


def _read_file(path: Path) -> Tensors:
    """Read one safetensors file. Raise WeightsError for a pickle or an unreadable file."""
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
    return {name: _widen(x) for name, x in tensors.items()}


def _widen(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype in (jnp.bfloat16, np.float16) else x


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, and texts as metadata, to a safetensors file, atomically; an old file is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as draft:
        contiguous = {name: np.asarray(x, order="C") for name, x in tensors.items()}
        safetensors.save_file(contiguous, draft, dict(metadata or {}))
