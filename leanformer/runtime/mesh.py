"""The only file that names mesh axes: the device mesh, where each array lives on it, and global batches.

`data` and `fsdp` share out the batch; `fsdp` also splits parameters and optimizer state; `tensor` splits attention
over its heads, MLPs over their hidden width, and logits of tokens, each group of devices working on the same examples.
The compiler inserts the collectives (Auto axes), so model files know nothing of meshes.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from leanformer.config.rules import check_shares, nearest_divisors
from leanformer.errors import ConfigError
from leanformer.runtime.sharing import Axes


AXES = ("data", "fsdp", "tensor")  # the last has the most to say to its neighbours, so its devices are the closest
BATCH = ("data", "fsdp")
ALONE = 2**20  # bytes of a gradient, or of a gathered parameter, from which it travels alone
SMALL = 2**12  # leaves under this many elements are not split by fsdp: it costs more than it saves


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices`, or all of all processes; -1 takes what is left.

    Raises:
        ConfigError: it does not fit the devices; says which nearest do.
    """
    devices = jax.devices() if devices is None else devices
    asked, count = (data, fsdp, tensor), len(devices)
    rest = count // math.prod(size for size in asked if size != -1)
    shape = tuple(rest if size == -1 else size for size in asked)
    if math.prod(shape) != count:
        named = " x ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, asked, strict=True))
        raise ConfigError(f"{named} cannot be laid over {count} devices. Nearest that can: {_nearest(asked, count)}.")
    here = sum(device.process_index == jax.process_index() for device in devices)
    if here % tensor:
        raise ConfigError(
            f"mesh.tensor={tensor} reaches over processes of {here} devices each, and its devices need the same "
            f"examples. Choose a divisor of {here}, or fewer processes with more devices each."
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def fitting(**asked: int) -> Mesh:
    """The mesh a run was trained on, to look at it; where it does not fit these devices, all of them over the batch."""
    try:
        return make_mesh(**asked)
    except ConfigError as error:
        print(f"Not on the mesh of the run: {error} Here all devices share the batch.", flush=True)
        return make_mesh()


def _nearest(asked: Sequence[int], count: int) -> str:
    """The two meshes of `count` devices closest to the one asked for, by the ratios of their sizes."""
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    shapes = [s for s in itertools.product(sizes, repeat=len(AXES)) if math.prod(s) == count and asked[-1] % s[-1] == 0]

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / wanted)) for size, wanted in zip(shape, asked, strict=True) if wanted > 0)

    best = sorted(shapes, key=distance)[:2]
    return " or ".join(",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True)) for shape in best)


def shares(mesh: Mesh) -> int:
    """Into how many parts a batch is shared out."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def check_batch(mesh: Mesh, name: str, size: int) -> None:
    """Raises ConfigError unless a batch, or micro-batch, of `size` can be shared out evenly."""
    check_shares(name, size, shares(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
    """The leading axis shared out over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def state_shardings(mesh: Mesh | AbstractMesh, tree: Any, axes: Mapping[str, Axes]) -> Any:
    """Where every leaf of a state lives, by what is said of each parameter, and statistic, of the model.

    `tensor` splits the axis that a layer says; `fsdp` splits the largest axis that it divides and `tensor` does not,
    small leaves excepted. The axis of stacked layers stays whole: a scan takes its slices one after the other. Moments
    and averages, at the end of whose names is all of their parameter's, follow it.
    """
    parts = {axis: size for axis, size in mesh.shape.items() if size > 1}

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        words = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        names = (".".join(words[start:]) for start in range(len(words)))
        own = next((axes[name] for name in names if name in axes), None)
        return NamedSharding(mesh, PartitionSpec(*_split(own, leaf.shape, parts)))

    return jax.tree.map_with_path(place, tree)


def unsaid(axes: Mapping[str, Axes]) -> dict[str, tuple[int, ...]]:
    """Shapes of what blocks have, of two axes and more, of which no layer says how devices share it, by name."""
    return {name: own.shape for name, own in axes.items() if own.stacked and len(own.shape) > 2 and not own.said}


def check_split(axes: Mapping[str, Axes], tensor: int) -> None:
    """Raises ConfigError where `tensor` devices cannot share out evenly what layers say that they do, or for what is
    `unsaid`: every device would hold all of it and repeat what is computed with it."""
    if tensor == 1:
        return
    for name, shape in unsaid(axes).items():
        raise ConfigError(
            f"mesh.tensor={tensor}: nothing says how devices share {name} of shape {shape}. Take mesh.tensor=1, or "
            "say it where the layer makes it, as layers/mlp.py does (leanformer/runtime/sharing.py)."
        )
    strict = {name: own for name, own in axes.items() if own.over is not None and not own.over.few}
    sizes = {name: own.shape[own.over.axis] for name, own in strict.items()}
    for name, size in sizes.items():
        if size % tensor:
            raise ConfigError(
                f"The {size} {strict[name].over.what} of {name} cannot be split over mesh.tensor={tensor} devices. "
                f"Nearest mesh.tensor that can: {nearest_divisors(math.gcd(*sizes.values()), tensor)}."
            )


def _split(own: Axes | None, shape: tuple[int, ...], parts: dict[str, int]) -> list[str | None]:
    spec: list[str | None] = [None] * len(shape)
    over = None if own is None or own.over is None else own.over.axis
    # A factored moment has the axes of its parameter, those that it is a mean over with length 1.
    # Heads of keys that many queries share may be fewer than devices, which then hold all of them.
    if "tensor" in parts and over is not None and shape[over] > 1 and shape[over] % parts["tensor"] == 0:
        spec[over] = "tensor"
    if "fsdp" in parts and math.prod(shape) >= SMALL:
        stacked = own is not None and own.stacked
        free = [axis for axis in range(stacked, len(shape)) if spec[axis] is None]
        if free := [axis for axis in free if shape[axis] % parts["fsdp"] == 0]:
            spec[max(free, key=lambda axis: shape[axis])] = "fsdp"
    while spec and spec[-1] is None:  # one way to write each place, so that places can be compared
        spec.pop()
    return spec


def on(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be jitted, with `keep_shared` in it knowing the mesh."""

    @functools.wraps(function)
    def placed(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return placed


def keep_shared(tree: Any) -> Any:
    """Activations, held to the batch's place: the leading axis shared out, all others whole.

    Where parameters are split the compiler must choose between moving them and moving activations, and chooses wrong
    without this. Nothing is done outside `on`, or where the batch is not shared out.
    """
    axes = [axis for axis in BATCH if jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1]
    if not axes:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH)), tree)


def tensor_parts() -> int:
    """Devices that share out what `keep_split` holds; 1 outside `on`."""
    return jax.sharding.get_abstract_mesh().shape.get("tensor", 1)


def keep_split(x: jax.Array, *, batch: bool) -> jax.Array:
    """An array with its last axis split over `tensor`, which must divide it; with `batch` the leading one is shared out
    as `keep_shared` has it, else every group of devices has all of the others."""
    leading = (BATCH,) if batch else (None,)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*leading, *(None,) * (x.ndim - 2), "tensor"))


def keep_whole(tree: Any) -> Any:
    """Arrays on every device, so that each process can read all of them. Nothing is done outside `on`."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def compiler_options(mesh: Mesh, device: Any) -> dict[str, Any]:
    """What the compiler for `device` is told of a step on this mesh: on GPUs, to compute while it sends.

    Left alone it sends what a layer's turn has to send in one piece, at the end of the turn, where nothing is left to
    compute. A large piece by itself leaves as soon as it is there: launch/SCALING.md shows beside what. Options that
    XLA_FLAGS names are left to it.
    """
    if device.platform != "gpu" or mesh.size == 1:
        return {}
    options = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": ALONE,
        "xla_gpu_all_gather_combine_threshold_bytes": ALONE,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": ALONE // mesh.shape["fsdp"],  # XLA counts a device's share
    }
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}" not in flags}


def keep_in_order(tree: Any) -> Any:
    """Activations, their axes held to the same order in memory: the first is major.

    XLA for GPUs likes sums to run over the last axis: for one sum over the batch, the gradient of the positions, it
    turns every activation of the model around.
    """
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree)


def put_batch(mesh: Mesh, host: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's part of a batch to its place in the global one."""
    sharding = over_batch(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, value) for key, value in host.items()}
