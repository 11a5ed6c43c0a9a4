"""Weights in several safetensors files with an index, as Hugging Face publishes them: `model.safetensors.index.json`
beside `model-00001-of-00003.safetensors`, and so on."""

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


def size_of(text: str) -> int:
    """Bytes of "5GB" or "500MiB". Raises ConfigError for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]i?B)", text)
    size = found and int(float(found[1]) * UNITS[found[2]])
    if not size:
        raise ConfigError(f"--max_shard_size={text} is no size above 0. Give one such as 5GB or 500MiB.")
    return size


def found_in(folder: Path) -> Path:
    """The one file of weights, or index of them, of a folder. Raises WeightsError where there are none, or several."""
    indices = sorted(folder.glob(f"*{INDEX}"))
    files = indices or sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) != 1 or (indices and (folder / indices[0].name.removesuffix(".index.json")).is_file()):
        names = ", ".join(path.name for path in sorted({*indices, *folder.glob(f"*{SUFFIX}")})[:SHOWN]) or "none"
        raise WeightsError(f"{folder} must hold one file of weights, or one index of them, found {names}. Name a file.")
    return files[0]


def shards(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, all of them beside it, and the tensors that each must hold.

    An index comes from elsewhere: what is no plain file name, but would lead out of its folder, is refused.

    Raises:
        WeightsError: it is no index, or names what is no file beside it.
    """
    try:
        content = json.loads(index.read_bytes())
        names = content["weight_map"]
        entries = [*names.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f'{index} is no index of weights, a JSON object with a "weight_map" ({error}).') from error
    found: dict[Path, set[str]] = {}
    for tensor, name in entries:
        if not _plain(name):
            raise WeightsError(f"{index} names {name!r} for {tensor}: no plain name of a {SUFFIX} file beside it.")
        found.setdefault(index.parent / name, set()).add(tensor)
    if not found:
        raise WeightsError(f"{index} names no tensor at all. Fetch it again.")
    if missing := [path.name for path in found if not path.is_file()]:
        more = f", and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise WeightsError(f"{index} names files that are not there: {', '.join(missing[:SHOWN])}{more}. Fetch them.")
    return found


def _plain(name: Any) -> bool:
    ok = isinstance(name, str) and name.endswith(SUFFIX) and not name.startswith(".")
    return ok and not any(sign in name for sign in ("/", "\\", "\0", ":"))


def check(path: Path, tensors: Mapping[str, Any], wanted: set[str]) -> None:
    """Raises WeightsError where a shard holds other tensors than its index says."""
    missing, over = sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted)
    if missing or over:
        said = [f"{len(missing)} are missing ({', '.join(missing[:SHOWN])})"] if missing else []
        said += [f"{len(over)} are not in the index ({', '.join(over[:SHOWN])})"] if over else []
        raise WeightsError(f"{path} holds other tensors than its index says: {'; '.join(said)}. Fetch both again.")


def cut(tensors: Mapping[str, np.ndarray], largest: int) -> list[list[str]]:
    """Names in order, in runs of at most so many bytes; a tensor that is larger is alone."""
    found: list[list[str]] = []
    size = largest + 1
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > largest:
            found.append([])
            size = tensor.nbytes
        found[-1].append(name)
    return found


def named(stem: Path, parts: Sequence[Sequence[str]]) -> Iterator[tuple[Path, Sequence[str]]]:
    """The file of each part."""
    for number, names in enumerate(parts, 1):
        yield stem.with_name(f"{stem.name}-{number:05d}-of-{len(parts):05d}{SUFFIX}"), names


def index_of(files: Mapping[Path, Sequence[str]], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The content of an index."""
    places = {name: path.name for path, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
