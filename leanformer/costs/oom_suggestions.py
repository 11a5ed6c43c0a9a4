"""Suggestions for a training step that needs too much memory: settings valid for a config and a number of devices."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Setting:
    """Changed config keys, with their effect."""

    changes: dict[str, Any]  # new values by key
    why: str  # effect of the change

    def __str__(self) -> str:
        flags = " ".join(f"--config.{key}={value}" for key, value in self.changes.items())
        return f"{flags}: {self.why}"


def suggest(c: ConfigDict, devices: int) -> list[Setting]:
    """Return the settings that are valid on `devices` devices, the first to try first."""
    return list(_settings(c, devices // c.mesh.tensor))


def _settings(c: ConfigDict, shares: int) -> Iterator[Setting]:
    """Yield the settings for a batch that is split into `shares`."""
    steps = range(2 * c.accumulate, c.batch_size + 1)
    if valid := next((n for n in steps if c.batch_size % (n * shares) == 0), None):
        yield Setting({"accumulate": valid}, "smaller micro-batches; same result, except with batch norm")
    if c.model.remat != "block":
        yield Setting({"model.remat": "block"}, "stores activations of one block at a time; about a third slower")
    if shares > 1 and c.mesh.fsdp not in (shares, -1) and c.batch_size % (c.accumulate * shares) == 0:
        data = {} if c.mesh.data in (1, -1) else {"mesh.data": 1}
        yield Setting(data | {"mesh.fsdp": shares}, "shards parameters and moments over the devices")
    step = shares * c.accumulate
    if half := c.batch_size // 2 // step * step:
        yield Setting({"batch_size": half}, "changes the recipe; lower optim.lr too")
