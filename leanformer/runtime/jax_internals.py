"""Imports from `jax._src` of functions without a public name in JAX. No other module imports from there.

- `distributed.global_state`: the coordinator's key-value store, which works without devices and from any thread, and
  the index of this process. `jax.process_index` would start the devices. Orbax reads the store from the same place.
- `xla_bridge.backends_are_initialized`: True once devices are in use; XLA's flags have no effect from then on.

A version of JAX may have moved them. Then only what needs them is refused, with a message.
"""

import importlib
from typing import Any

import jax

from leanformer.errors import ConfigError


def _find(module: str, name: str) -> Any | None:
    try:
        return getattr(importlib.import_module(f"jax._src.{module}"), name)
    except (ImportError, AttributeError):
        return None


_state = _find("distributed", "global_state")
_initialized = _find("xla_bridge", "backends_are_initialized")


def require(value: Any | None, what: str) -> Any:
    """Return `value`. Raises ConfigError if it is None, because this version of JAX has moved the internal.

    Args:
        value: internal of JAX, or None.
        what: feature that needs it, for the message.
    """
    if value is None:
        raise ConfigError(
            f"jax=={jax.__version__}: {what} requires internals that this version has moved. Install the version in "
            "constraints.txt."
        )
    return value


def check_processes() -> None:
    """Raise ConfigError if a run of several processes is not possible with this version of JAX."""
    require(_state, "a run of several processes")


def backends_are_initialized() -> bool:
    """Return whether devices are in use. Raises ConfigError if this version of JAX does not tell."""
    return require(_initialized, "setting flags of XLA")()


def key_value_store() -> Any | None:
    """Return the key-value store of JAX's coordinator, the client of `jax._src.distributed`; None in a single process.

    Also None if this version of JAX has moved it; `check_processes` raises the error for that.
    """
    return _state and _state.client


def process_count() -> int:
    """Return the number of processes without starting a device; 1 in a single process."""
    return _state.num_processes if _state and key_value_store() else 1


def process_index() -> int:
    """Return the index of this process without starting a device; 0 in a single process."""
    return _state.process_id if _state and key_value_store() else 0


def coordinator_address() -> str | None:
    """Return the address host:port of the coordinator, also if JAX found it; None in a single process."""
    return _state and _state.coordinator_address
