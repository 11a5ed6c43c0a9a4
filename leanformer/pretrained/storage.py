"""Tensors by name in safetensors files: one file, or several with an index."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from leanformer.errors import WeightsError
from leanformer.pretrained import sharded
from leanformer.pretrained.checks import check_finite
from leanformer.runtime import files


Tensors = dict[str, np.ndarray]


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
    path = sharded.find_weights(path) if path.is_dir() else path
    indexed = path.name.endswith(sharded.INDEX)
    tensors: Tensors = {}
    for file, names in sharded.shards(path).items() if indexed else [(path, None)]:
        part = _read_file(file)
        if names is not None:
            sharded.check(file, part, names)
        if finite:
            check_finite(part, str(file))
        tensors |= part
    return tensors


def _read_file(path: Path) -> Tensors:
    """Read one safetensors file. Raise WeightsError for a pickle or an unreadable file."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise WeightsError(f"The weights {path} cannot be read: {error.strerror or error}.") from error
    # The length of the header comes first and may look like the start of a pickle; then the header, a JSON object.
    if head[8:] != b"{" and head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise WeightsError(
            f"{path} is a PyTorch pickle or an archive, which could run any code when opened, so it was not opened. "
            "Convert it with safetensors.torch.save_file where it came from, and use that file."
        )
    try:
        tensors = safetensors.load_file(path)
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file: {error}. "
            "Was it truncated? Download it again."
        ) from error
    return {name: x.astype(np.float32) if x.dtype in (jnp.bfloat16, np.float16) else x for name, x in tensors.items()}


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as draft:
        contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        safetensors.save_file(contiguous, draft, dict(metadata or {}))


def write_sharded(stem: str | Path, tensors: Tensors, largest: int, metadata: Mapping[str, str] | None = None) -> Path:
    """Write tensors to several files <stem>-00001-of-<n>.safetensors, then their index. Return the path of the index.

    Args:
        stem: path of the files without "-00001-of-<n>.safetensors".
        tensors: tensors by name.
        largest: maximum bytes of tensors per file; a larger tensor gets a file of its own.
        metadata: metadata of every file.
    """
    stem = Path(stem)
    index = stem.with_name(stem.name + sharded.INDEX)
    index.unlink(missing_ok=True)  # an old index may name files that are overwritten here
    parts = dict(sharded.shard_paths(stem, sharded.split_into_shards(tensors, largest)))
    for path, names in parts.items():
        write(path, {name: tensors[name] for name in names}, {"format": "pt"} | dict(metadata or {}))
    files.write_json(index, sharded.make_index(parts, tensors))
    return index
