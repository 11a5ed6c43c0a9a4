"""Tensors by name in safetensors files: one file, or several with an index, in Hugging Face's format.

The index of several is `model.safetensors.index.json`, and the shards beside it `model-00001-of-00003.safetensors` etc.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from leanformer.errors import ConfigError, WeightsError
from leanformer.pretrained.checks import check_finite
from leanformer.runtime import files
from leanformer.stored import INDEX, SHOWN, SUFFIX, check_not_pickle, check_shard, damaged, find_weights, shards


Tensors = dict[str, np.ndarray]
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
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


def parse_size(text: str) -> int:
    """Return the number of bytes in a size such as "5GB" or "500MiB". Raise ConfigError for an invalid size.

    >>> parse_size("500MiB")
    524288000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]i?B)", text)
    size = match and int(float(match[1]) * UNITS[match[2]])
    if not size:
        raise ConfigError(f"--max_shard_size={text}: not a size above 0. Use a size such as 5GB or 500MiB.")
    return size


def split_into_shards(tensors: Mapping[str, np.ndarray], largest: int) -> list[list[str]]:
    """Split the names of tensors, in order, into groups of at most `largest` bytes of tensors.

    A larger tensor is alone in its group.
    """
    groups: list[list[str]] = []
    size = largest + 1
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > largest:
            groups.append([])
            size = tensor.nbytes
        groups[-1].append(name)
    return groups


def write_sharded(stem: str | Path, tensors: Tensors, largest: int, metadata: Mapping[str, str] | None = None) -> Path:
    """Write tensors to several files <stem>-00001-of-<n>.safetensors, then their index. Return the path of the index.

    An old index is deleted first, so that it never describes new files.

    Args:
        stem: path of the files without "-00001-of-<n>.safetensors".
        tensors: tensors by name.
        largest: maximum bytes of tensors per file; a larger tensor gets a file of its own.
        metadata: metadata of every file.
    """
    stem = Path(stem)
    index = stem.with_name(stem.name + INDEX)
    index.unlink(missing_ok=True)  # an old index may name files that are overwritten here
    groups, places = split_into_shards(tensors, largest), {}
    for number, names in enumerate(groups, 1):
        path = stem.with_name(f"{stem.name}-{number:05d}-of-{len(groups):05d}{SUFFIX}")
        write(path, {name: tensors[name] for name in names}, {"format": "pt"} | dict(metadata or {}))
        places |= dict.fromkeys(names, path.name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    return index


def write_model(
    folder: Path, tensors: Tensors, metadata: Mapping[str, str], largest: int | None, *, name: str = "model"
) -> Path:
    """Write weights to one safetensors file, or to shards with an index. Return the path of the file or the index.

    An old index in the folder is deleted.

    Args:
        folder: folder of the files, which is created.
        tensors: tensors by name.
        metadata: metadata of every file.
        largest: maximum bytes of tensors per shard; None for one file.
        name: stem of the one file; shards and index have the stem "model".
    """
    single = folder / f"{name}{SUFFIX}"
    if largest is not None:
        return write_sharded(folder / "model", tensors, largest, metadata)
    (folder / f"model{INDEX}").unlink(missing_ok=True)
    write(single, tensors, metadata)
    return single
