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
        return f"{self.words}: {self.why}"

    @property
    def words(self) -> str:
        """Flags that set the values on a command line."""
        return " ".join(f"--config.{key}={value}" for key, value in self.changes.items())

    def of(self, c: ConfigDict) -> ConfigDict:
        """Return a copy of `c` with the changed values."""
        changed = c.copy_and_resolve_references()
        changed.unlock()
        changed.update_from_flattened_dict(self.changes)
        return changed


def suggest(c: ConfigDict, devices: int) -> list[Setting]:
    """Return the settings that are valid on `devices` devices, the first to try first."""
    candidates = [next(accumulations(c, devices), None), remat(c), split(c, devices), smaller_batch(c, devices)]
    return [setting for setting in candidates if setting]


def accumulations(c: ConfigDict, devices: int) -> Iterator[Setting]:
    """Yield settings with increasing numbers of gradient accumulation steps."""
    shares = devices // c.mesh.tensor
    for more in range(2 * c.accumulate, c.batch_size + 1):
        setting = Setting({"accumulate": more}, "smaller micro-batches; same result, except with batch norm")
        if c.batch_size % (more * shares) == 0 and is_divisible(setting.of(c), shares):
            yield setting


def is_divisible(c: ConfigDict, shares: int) -> bool:
    """Return whether every training micro-batch is divisible by the number of shards."""
    return c.batch_size % c.accumulate == 0 and c.batch_size // c.accumulate % shares == 0


def remat(c: ConfigDict) -> Setting | None:
    """Return the setting that recomputes all activations inside blocks in the backward pass."""
    if c.model.remat == "block":
        return None
    return Setting({"model.remat": "block"}, "stores activations of one block at a time; about a third slower")


def split(c: ConfigDict, devices: int) -> Setting | None:
    """Return the setting that shards parameters and moments over all devices, along with the batch."""
    shares = devices // c.mesh.tensor
    if shares == 1 or c.mesh.fsdp in (shares, -1) or not is_divisible(c, shares):
        return None
    data = {} if c.mesh.data in (1, -1) else {"mesh.data": 1}
    return Setting(data | {"mesh.fsdp": shares}, "shards parameters and moments over the devices")


def smaller_batch(c: ConfigDict, devices: int) -> Setting | None:
    """Return the setting with half the batch size, or less if half is not divisible by the number of shards."""
    step = devices // c.mesh.tensor * c.accumulate
    half = c.batch_size // 2 // step * step
    return Setting({"batch_size": half}, "changes the recipe; lower optim.lr too") if half else None
