"""Imports from `jax._src` of functions without a public name in JAX. No other module imports from there.

- `distributed.global_state`: the coordinator's key-value store, which works without devices and from any thread, and
  the index of this process. `jax.process_index` would start the devices. Orbax reads the store from the same place.
- `xla_bridge.backends_are_initialized`: True once devices are in use; XLA's flags have no effect from then on.
- `cudnn.fused_attention_stablehlo`: checks of this machine's GPU, which `programs.pretend_attached` replaces by
  checks of the GPU that a program is compiled for.
"""

from typing import Any

from jax._src import distributed
from jax._src.cudnn import fused_attention_stablehlo as cudnn_checks
from jax._src.xla_bridge import backends_are_initialized


__all__ = ["backends_are_initialized", "cudnn_checks"]  # imported here for other modules


def key_value_store() -> Any | None:
    """Return the coordinator's key-value store; None in a single process."""
    return distributed.global_state.client


def process_count() -> int:
    """Return the number of processes without starting a device."""
    return distributed.global_state.num_processes if key_value_store() else 1


def process_index() -> int:
    """Return the index of this process without starting a device."""
    return distributed.global_state.process_id if key_value_store() else 0


def coordinator_address() -> str | None:
    """Return the address of the coordinator, also if JAX found it from the cluster's environment."""
    return distributed.global_state.coordinator_address
