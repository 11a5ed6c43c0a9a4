"""Weights sharded over several safetensors files with an index, in Hugging Face's format.

The index is `model.safetensors.index.json`, and the shards beside it are `model-00001-of-00003.safetensors` etc.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.errors import ConfigError, WeightsError


SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SHOWN = 5


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


def find_weights(folder: Path) -> Path:
    """Return the only file of weights, or index of them, in a folder. Raise WeightsError for none or several."""
    indices = sorted(folder.glob(f"*{INDEX}"))
    files = indices or sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) != 1 or (indices and (folder / indices[0].name.removesuffix(".index.json")).is_file()):
        names = ", ".join(path.name for path in sorted({*indices, *folder.glob(f"*{SUFFIX}")})[:SHOWN]) or "none"
        raise WeightsError(f"{folder} must contain one file of weights or one index; found {names}. Name a file.")
    return files[0]


def shards(index: Path) -> dict[Path, set[str]]:
    """Return the files that an index names, and the tensors that each must contain.

    An index is untrusted input: a name that could lead out of its folder raises an error.

    Raises:
        WeightsError: the file is not an index, or names a file that is not beside it.
    """
    try:
        content = json.loads(index.read_bytes())
        names = content["weight_map"]
        entries = [*names.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f'{index} is not an index of weights, which is a JSON object with a "weight_map" ({error}).'
        ) from error
    tensors: dict[Path, set[str]] = {}
    for tensor, name in entries:
        if not _is_plain(name):
            raise WeightsError(f"{index} names {name!r} for {tensor}: not the plain name of a {SUFFIX} file beside it.")
        tensors.setdefault(index.parent / name, set()).add(tensor)
    if not tensors:
        raise WeightsError(f"{index} names no tensors. Download it again.")
    if missing := [path.name for path in tensors if not path.is_file()]:
        more = f", and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise WeightsError(f"{index} names missing files: {', '.join(missing[:SHOWN])}{more}. Download them.")
    return tensors


def _is_plain(name: Any) -> bool:
    """Return True for the name of a safetensors file without any folder."""
    ok = isinstance(name, str) and name.endswith(SUFFIX) and not name.startswith(".")
    return ok and not any(sign in name for sign in ("/", "\\", "\0", ":"))


def check(path: Path, tensors: Mapping[str, Any], expected: set[str]) -> None:
    """Raise WeightsError if a shard does not contain exactly the tensors that its index names."""
    missing, unexpected = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if missing or unexpected:
        problems = [f"{len(missing)} are missing ({', '.join(missing[:SHOWN])})"] if missing else []
        problems += [f"{len(unexpected)} are not in the index ({', '.join(unexpected[:SHOWN])})"] if unexpected else []
        raise WeightsError(
            f"{path} does not contain the tensors in its index: {'; '.join(problems)}. Download both again."
        )


def split_into_shards(tensors: Mapping[str, np.ndarray], largest: int) -> list[list[str]]:
    """Split names, in order, into groups of at most `largest` bytes; a larger tensor is alone in its group."""
    groups: list[list[str]] = []
    size = largest + 1
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > largest:
            groups.append([])
            size = tensor.nbytes
        groups[-1].append(name)
    return groups


def shard_paths(stem: Path, parts: Sequence[Sequence[str]]) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield the path and the names of each part."""
    for number, names in enumerate(parts, 1):
        yield stem.with_name(f"{stem.name}-{number:05d}-of-{len(parts):05d}{SUFFIX}"), names


def make_index(files: Mapping[Path, Sequence[str]], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the content of an index."""
    places = {name: path.name for path, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
