"""The only file that names mesh axes: the device mesh, where each array lives on it, and global batches.

`data` and `fsdp` both share out the batch; `fsdp` also splits parameters and optimizer state. The compiler inserts
the collectives (Auto axes), so model files know nothing of meshes.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from leanformer.errors import ConfigError


BATCH = ("data", "fsdp")
SMALL = 2**12  # leaves under this many elements are replicated: splitting them costs more than it saves


def make_mesh(data: int = -1, fsdp: int = 1) -> Mesh:
    """A mesh over all devices of all processes; -1 takes what is left. Raises ConfigError if it does not fit."""
    count = jax.device_count()
    known = fsdp if data == -1 else data
    if -1 in (data, fsdp):
        rest = count // known
        data, fsdp = (rest, fsdp) if data == -1 else (data, rest)
    if data * fsdp != count:
        raise ConfigError(
            f"mesh.data={data} x mesh.fsdp={fsdp} is {data * fsdp} devices, found {count}. "
            "Leave one of them at -1, or choose factors of the number of devices."
        )
    return jax.make_mesh((data, fsdp), BATCH, axis_types=(AxisType.Auto,) * 2)


def check_batch(mesh: Mesh, name: str, size: int) -> None:
    """Raises ConfigError unless a batch, or micro-batch, of `size` can be shared out evenly."""
    devices = mesh.size
    if size % devices:
        down = size // devices * devices
        near = f"{down} or {down + devices}" if down else f"{devices}"
        raise ConfigError(f"{name} is {size}, which {devices} devices cannot share out evenly. Nearest: {near}.")


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
    """The leading axis shared out over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def state_shardings(mesh: Mesh, tree: Any) -> Any:
    """Where every leaf of a state lives: its largest axis that `fsdp` divides is split, small leaves are whole.

    The rule sees shapes only, so moments and averages follow their parameters.
    """
    parts = mesh.shape["fsdp"]

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
        if parts == 1 or not axes or np.prod(leaf.shape) < SMALL:
            return replicated(mesh)
        largest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*(None,) * largest, "fsdp"))

    return jax.tree.map(place, tree)


def put_batch(mesh: Mesh, host: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's part of a batch to its place in the global one."""
    sharding = over_batch(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, value) for key, value in host.items()}
