"""Communication between the processes of a run outside compiled programs.

It uses the key-value store of JAX's coordinator in process 0, which needs no device and works from any thread. In a
single process every function that exchanges values returns at once.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils

from leanformer.runtime import jax_internals


PATIENCE = 300  # seconds that a process waits for a value of another process
_calls = itertools.count()  # numbers the calls of `all_gather_host`
_published: dict[str, set[int]] = {}


store: Callable[[], Any] = jax_internals.key_value_store
count = jax_internals.process_count
index = jax_internals.process_index


def is_primary() -> bool:
    """Return whether this is process 0, which writes files and prints."""
    return index() == 0


def kv_set(key: str, content: Any) -> None:
    """Write a value, which must be JSON, to the coordinator's key-value store, replacing an earlier one.

    Not for use in a single process, which has no store.
    """
    store().key_value_set(f"leanformer/{key}", json.dumps(content), allow_overwrite=True)


def kv_list(folder: str) -> dict[str, Any]:
    """Return {rest of the key: value} for all keys FOLDER/... of `kv_set`; not for use in a single process."""
    prefix = f"leanformer/{folder}/"
    return {key.removeprefix(prefix): json.loads(text) for key, text in store().key_value_dir_get(prefix)}


def broadcast_from_primary(content: Any) -> Any:
    """Return process 0's value in every process, for decisions on values that may differ between processes.

    All processes must call it, in the same order. The value must be JSON. With several processes, keys of dicts come
    back as strings. Raises TimeoutError after PATIENCE (300) seconds.
    """
    return all_gather_host(content if is_primary() else None)[0]


def all_gather_host(content: Any) -> list[Any]:
    """Return the values of all processes, in the order of their indices.

    All processes must call it, in the same order. The value must be JSON. Raises TimeoutError after PATIENCE (300)
    seconds.
    """
    if count() == 1:
        return [content]
    call = next(_calls)
    kv_set(f"each/{call}/{index()}", content)
    deadline = time.monotonic() + PATIENCE
    while len(values := kv_list(f"each/{call}")) < count():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Only processes {', '.join(values)} of {count()} answered within {PATIENCE} s.")
        time.sleep(0.05)
    if call:  # a process that published this value has read all of the call before
        store().key_value_delete(f"leanformer/each/{call - 1}/{index()}")
    return [values[str(i)] for i in range(count())]


def gather_union(name: str, items: set[int]) -> set[int]:
    """Publish a set of numbers under `name`, and return the union of those that all processes have published so far.

    Each number is sent once. Processes may call it at any time, and need not wait for each other.
    """
    if count() == 1:
        return items
    for item in items - _published.setdefault(name, set()):
        kv_set(f"{name}/{item}", item)
    _published[name] |= items
    return set(kv_list(name).values())


def fetch(tree: Any) -> Any:
    """Return a tree of global arrays as complete NumPy arrays, from the shards of all processes.

    All processes must call it.
    """
    return jax.device_get(tree) if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)
