"""Fingerprints of splits, which show that data have changed since a run was started; and files in two splits.

A source may have a method `fingerprint`, which returns digests by what they are of, and a property `files`, the names
of its files if a list names them, since a folder contains no file twice.
"""

import collections
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.source import Source, size


SAMPLED = 4096  # files whose sizes are read, evenly spaced: 0.1 s on a local disk


def compute(source: Source) -> dict[str, Any]:
    """Return the fingerprint of a split, a dict that is ready for JSON.

    It has `examples`, the number of examples (None if endless), and the digests by name that `source.fingerprint()`
    returns, if the source has this method.
    """
    own: Callable[[], Mapping[str, Any]] = getattr(source, "fingerprint", dict)
    return {"examples": size(source), **own()}


def digest(*parts: bytes | np.ndarray) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of bytes and arrays, in this order."""
    result = hashlib.sha256()
    for part in parts:
        result.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return result.hexdigest()[:16]


def digest_sizes(paths: Callable[[int], str], number: int) -> str:
    """Return a digest of the sizes of at most SAMPLED of `number` files, evenly spaced; a missing file counts as -1.

    Args:
        paths: function from the index of a file, below `number`, to its path.
    """
    chosen = np.unique(np.linspace(0, number - 1, min(number, SAMPLED)).round().astype(np.int64))
    sizes = np.empty(len(chosen), np.int64)
    for place, index in enumerate(chosen.tolist()):
        try:
            sizes[place] = Path(paths(index)).stat().st_size
        except OSError:
            sizes[place] = -1
    return digest(sizes)


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the differences of two fingerprints of a split as text, such as "other labels"; "" if there are none.

    Digests that only one of them has are not compared.

    Args:
        before: earlier result of `compute`, for example the one recorded when a run started.
        after: present result of `compute`.
    """
    changes = [f"other {key}" for key in before if key != "examples" and after.get(key, before[key]) != before[key]]
    if before.get("examples") != after.get("examples"):
        changes.insert(0, f"{before.get('examples')} -> {after.get('examples')} examples")
    return ", ".join(changes)


def describe_repeats(train: Source, held_out: Mapping[str, Source]) -> list[str]:
    """Return sentences on files that a split lists twice, and on data that training and evaluation splits share.

    Compared are the property `files` and the result of the method `describe_overlap` of the sources; those that have
    neither are not checked. The list is empty if nothing is repeated.

    Args:
        train: training split.
        held_out: evaluation splits by name.
    """
    sentences = []
    names: Sequence[bytes] = getattr(train, "files", ())
    trained = set(names)
    if repeated := len(names) - len(trained):
        first = next(name for name, number in collections.Counter(names).items() if number > 1)
        sentences.append(f"{repeated} of {len(names)} lines of the training split repeat a file: {_show(first)}")
    for split, source in held_out.items():
        others = getattr(source, "files", ())
        if repeated := len(others) - len(set(others)):
            sentences.append(f"{repeated} of {len(others)} lines of split {split} repeat a file")
        if shared := sorted(trained & set(others)):
            sentences.append(f"{len(shared)} files are in the training split and in {split}: {_show(shared[0])}, ...")
        shared_part = getattr(train, "describe_overlap", lambda _: "")(source)
        sentences += [f"{shared_part} are in the training split and in {split}"] if shared_part else []
    return sentences


def _show(name: bytes) -> str:
    return os.fsdecode(name)
