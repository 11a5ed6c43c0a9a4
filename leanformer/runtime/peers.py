"""What the processes of one run tell each other besides the collectives of compiled programs.

It goes through the key-value store of JAX's coordinator, in process 0, which needs no device and works from any thread.
A process that is alone tells nobody, and every function here then costs nothing.
"""

import itertools
import json
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

from leanformer.runtime import jax_internals


PATIENCE = 300  # seconds that one process waits for the word of another
_words = itertools.count()  # of `same` and `each`
_published: dict[str, set[int]] = {}


store = jax_internals.key_value_store
count = jax_internals.process_count
index = jax_internals.process_index


def first() -> bool:
    """Whether this is the process that writes and speaks for all."""
    return index() == 0


def tell(key: str, content: Any) -> None:
    """Puts a JSON value in the store, in place of what was there."""
    store().key_value_set(f"leanformer/{key}", json.dumps(content), allow_overwrite=True)


def hear(key: str, seconds: float = PATIENCE) -> Any:
    """Waits for the value of a key. Raises JaxRuntimeError when the time is over."""
    return json.loads(store().blocking_key_value_get(f"leanformer/{key}", int(seconds * 1000)))


def told(folder: str) -> dict[str, Any]:
    """All values below a key, by the rest of their names."""
    prefix = f"leanformer/{folder}/"
    return {key.removeprefix(prefix): json.loads(text) for key, text in store().key_value_dir_get(prefix)}


def same(content: Any) -> Any:
    """Process 0's value, in every process: for a decision that rests on what may look different elsewhere.

    All processes must ask, and in the same order. The value must be JSON, so names of dicts come back as strings.
    """
    if count() == 1:
        return content
    key = f"same/{next(_words)}"
    if first():
        tell(key, content)
    return hear(key)


def each(content: Any) -> list[Any]:
    """The values of all processes, in their order. All must ask, as with `same`."""
    if count() == 1:
        return [content]
    folder = f"each/{next(_words)}"
    tell(f"{folder}/{index()}", content)
    deadline = time.monotonic() + PATIENCE
    while len(found := told(folder)) < count():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Of {count()} processes only {', '.join(found)} have answered in {PATIENCE} s.")
        time.sleep(0.05)
    return [found[str(i)] for i in range(count())]


def union(name: str, items: set[int]) -> set[int]:
    """What any process has put under `name` so far; each number travels once. Processes may ask when they like."""
    if count() == 1:
        return items
    for item in items - _published.setdefault(name, set()):
        tell(f"{name}/{item}", item)
    _published[name] |= items
    return set(told(name).values())


def fetch(tree: Any) -> Any:
    """The whole of global arrays as NumPy arrays, wherever their parts are. Every process must call it."""
    return jax.device_get(tree) if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)
