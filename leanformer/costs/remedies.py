"""What to change where a training step is too large: settings that suit a config and its number of devices."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Setting:
    """Keys of a config with other values, and what they do."""

    changes: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"{self.words}: {self.why}"

    @property
    def words(self) -> str:
        """As they are written on a command line."""
        return " ".join(f"--config.{key}={value}" for key, value in self.changes.items())

    def of(self, c: ConfigDict) -> ConfigDict:
        """A copy of `c` with these values."""
        changed = c.copy_and_resolve_references()
        changed.unlock()
        changed.update_from_flattened_dict(self.changes)
        return changed


def settings(c: ConfigDict, devices: int) -> list[Setting]:
    """The first to try first; each passes the checks on so many devices."""
    found = [next(accumulations(c, devices), None), remat(c), split(c, devices), smaller_batch(c, devices)]
    return [setting for setting in found if setting]


def accumulations(c: ConfigDict, devices: int) -> Iterator[Setting]:
    """More and more micro-batches a step."""
    shares = devices // c.mesh.tensor
    for more in range(2 * c.accumulate, c.batch_size + 1):
        setting = Setting({"accumulate": more}, "smaller micro-batches, the same result but for batch norm")
        if c.batch_size % (more * shares) == 0 and shared(setting.of(c), shares):
            yield setting


def shared(c: ConfigDict, shares: int) -> bool:
    """Whether so many devices can share out every micro-batch of training evenly."""
    return c.batch_size % c.accumulate == 0 and c.batch_size // c.accumulate % shares == 0


def remat(c: ConfigDict) -> Setting | None:
    """Everything inside a block computed again."""
    if c.model.remat == "block":
        return None
    return Setting({"model.remat": "block"}, "activations of one block at a time, about a third slower")


def split(c: ConfigDict, devices: int) -> Setting | None:
    """Parameters and moments split over all devices, with the batch."""
    shares = devices // c.mesh.tensor
    if shares == 1 or c.mesh.fsdp in (shares, -1) or not shared(c, shares):
        return None
    data = {} if c.mesh.data in (1, -1) else {"mesh.data": 1}
    return Setting(data | {"mesh.fsdp": shares}, "parameters and moments split over the devices")


def smaller_batch(c: ConfigDict, devices: int) -> Setting | None:
    """Half of the batch, or less where that cannot be shared out."""
    step = devices // c.mesh.tensor * c.accumulate
    half = c.batch_size // 2 // step * step
    return Setting({"batch_size": half}, "another recipe; lower optim.lr with it") if half else None
