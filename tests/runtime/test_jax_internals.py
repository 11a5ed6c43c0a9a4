"""Private names of JAX: all exist in the installed version, and a missing one disables only what needs it."""

import pytest
from messages import refuses

from leanformer.runtime import determinism, distributed, jax_internals, multihost


def test_private_names_of_jax_exist():
    """In JAX 0.11.1, the oldest supported version, and in that of constraints.txt."""
    state = jax_internals._state
    assert {"client", "process_id", "num_processes", "coordinator_address"} <= {*vars(state), *dir(state)}
    assert isinstance(jax_internals.backends_are_initialized(), bool)


def test_missing_names_of_jax_disable_only_what_needs_them(monkeypatch):
    for name in ("_state", "_initialized"):
        monkeypatch.setattr(jax_internals, name, jax_internals._find("moved", "away"))
    assert multihost.count() == 1 and multihost.index() == 0 and distributed.describe()["processes"][0] == "1"
    with refuses("jax==", "several processes", "constraints.txt"):
        distributed.start("localhost:1", 2, 0)
    monkeypatch.setenv("XLA_FLAGS", "")
    determinism.require(False)
    with refuses("jax==", "XLA"):
        determinism.require(True)


@pytest.mark.parametrize(("module", "name"), [("no_such_module", "x"), ("distributed", "no_such_name")])
def test_moved_names_are_none(module, name):
    assert jax_internals._find(module, name) is None
