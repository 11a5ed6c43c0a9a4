"""Communication between the processes of a run outside compiled programs.

It uses the key-value store of JAX's coordinator in process 0, which needs no device and works from any thread, but has
no public name. `jax.process_index` would start the devices.
"""

import itertools
import json
import time
from typing import Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils


PATIENCE = 300  # seconds that a process waits for a value of another process
_calls = itertools.count()  # numbers the calls of `all_gather_host`
_published: dict[str, set[int]] = {}


def store() -> Any:
    """Return the key-value store of JAX's coordinator; None in a single process."""
    return distributed.global_state.client


def count() -> int:
    return distributed.global_state.num_processes if store() else 1


def index() -> int:
    return distributed.global_state.process_id if store() else 0


def coordinator_address() -> str | None:
    """Return the address host:port of the coordinator, also if JAX found it; None in a single process."""
    return distributed.global_state.coordinator_address


def is_primary() -> bool:
    """Return whether this is process 0, which writes files and prints."""
    return index() == 0


def _set(key: str, content: Any) -> None:
    store().key_value_set(f"leanformer/{key}", json.dumps(content), allow_overwrite=True)


def _list(folder: str) -> dict[str, Any]:
    """Return {rest of the key: value} for all keys FOLDER/... of `_set`."""
    prefix = f"leanformer/{folder}/"
    return {key.removeprefix(prefix): json.loads(text) for key, text in store().key_value_dir_get(prefix)}


def broadcast_from_primary(content: Any) -> Any:
    """Return process 0's value in every process, as `all_gather_host`; keys of dicts come back as strings."""
    return all_gather_host(content if is_primary() else None)[0]


def all_gather_host(content: Any) -> list[Any]:
    """Return the values of all processes, which must be JSON and call this in the same order, by index."""
    if count() == 1:
        return [content]
    call = next(_calls)
    _set(f"each/{call}/{index()}", content)
    deadline = time.monotonic() + PATIENCE
    while len(values := _list(f"each/{call}")) < count():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Only processes {', '.join(values)} of {count()} answered within {PATIENCE} s.")
        time.sleep(0.05)
    if call:  # a process that published this value has read all of the call before
        store().key_value_delete(f"leanformer/each/{call - 1}/{index()}")
    return [values[str(i)] for i in range(count())]


def gather_union(name: str, items: set[int]) -> set[int]:
    """Publish a set of numbers, and return the union of all processes' so far, which need not wait for each other."""
    if count() == 1:
        return items
    for item in items - _published.setdefault(name, set()):
        _set(f"{name}/{item}", item)
    _published[name] |= items
    return set(_list(name).values())


def fetch(tree: Any) -> Any:
    """Return a tree of global arrays as NumPy arrays; all processes must call it."""
    return jax.device_get(tree) if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)
