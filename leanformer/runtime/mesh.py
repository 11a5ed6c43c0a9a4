"""Device mesh, shardings of arrays, global batches, and the compiler options (XLA flags) of steps on GPUs.

`data` and `fsdp` shard the batch. `fsdp` also shards parameters and optimizer state. `tensor` splits attention over
heads, MLPs over the hidden dimension, and token logits over the vocabulary; each group of devices along it computes
the same examples. The compiler inserts the collectives (Auto axes), so models do not depend on the mesh.

Layers declare as metadata which axis of a parameter `tensor` may split: `nnx.Linear(...,
kernel_metadata=over_hidden(-1))`, `nnx.Param(x, **REPLICATED)`. nnx's `out_sharding` would require the mesh while the
model is created. Axes are counted from the end, because stacks add an axis of layers in front.
"""

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from leanformer.config.rules import require
from leanformer.errors import ConfigError


MESH_AXES = ("data", "fsdp", "tensor")  # the last axis communicates most, so its devices are the closest
BATCH = ("data", "fsdp")
UNCOMBINED_BYTES = 2**20  # collectives of gradients or gathered parameters of this size are not combined with others
MIN_FSDP_ELEMENTS = 2**12  # fsdp splits no smaller leaves: communication would cost more than the memory saved
DECLARED = "shared"  # key of the metadata that declares how `tensor` splits a parameter
REPLICATED = {DECLARED: None}  # every device holds the whole parameter and repeats the computation with it


@dataclasses.dataclass(frozen=True)
class TensorParallelAxis:
    """Axis of a parameter whose slices are independent, so that different devices can compute with them."""

    axis: int  # from the end
    what: str  # name of the slices for messages, such as "heads"
    few: bool = False  # there may be fewer slices than devices; every device then holds all of them


@dataclasses.dataclass(frozen=True)
class ParameterAxes:
    shape: tuple[int, ...]
    stacked: bool  # the first axis is the axis of layers
    over: TensorParallelAxis | None  # None for `REPLICATED` and without a declaration
    declared: bool


def over_heads(axis: int) -> dict[str, Any]:
    return {DECLARED: TensorParallelAxis(axis, "heads")}


def over_key_heads(axis: int) -> dict[str, Any]:
    return {DECLARED: TensorParallelAxis(axis, "heads of keys", few=True)}  # query heads may share them


def over_hidden(axis: int) -> dict[str, Any]:
    return {DECLARED: TensorParallelAxis(axis, "hidden channels")}


def leaf_names(tree: Any) -> list[str]:
    """Return the dotted names of a tree's leaves, in the order of `jax.tree.leaves`."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def flatten_names(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by dotted name.

    >>> flatten_names({"blocks": {"kernel": 1, "bias": 2}})
    {'blocks.bias': 2, 'blocks.kernel': 1}
    """
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over `devices`, by default all of all processes; a size of -1 takes what the other axes leave."""
    if devices is None:
        devices = jax.devices()
        _warn_unused_gpus(devices[0])
    requested, count = (data, fsdp, tensor), len(devices)
    rest = count // math.prod(size for size in requested if size != -1)
    shape = tuple(rest if size == -1 else size for size in requested)
    if math.prod(shape) != count:
        keys = " x ".join(f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, requested, strict=True))
        raise ConfigError(f"{keys} does not fit {count} devices: their product must be {count}. -1 fits one axis.")
    local = sum(device.process_index == jax.process_index() for device in devices)
    if local % tensor:
        raise ConfigError(
            f"mesh.tensor={tensor} spans processes of {local} devices each, but devices along this axis need the same "
            f"examples. Choose a divisor of {local}, or fewer processes with more devices each."
        )
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this host, whether JAX can use them or not."""
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def _warn_unused_gpus(device: jax.Device) -> None:
    excluded = jax.config.jax_platforms or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if device.platform == "cpu" and not excluded and count_gpus():
        warnings.warn(
            "This host has NVIDIA GPUs, but JAX computes on the CPU. Install leanformer[cuda12] or [cuda13], whichever "
            "fits the driver, and check nvidia-smi; JAX_PLATFORMS=cpu silences this warning.",
            stacklevel=2,
        )


def count_batch_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH)


def check_batches(mesh: Mesh, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError unless the devices that share a batch divide its size, by config key."""
    shards = count_batch_shards(mesh)
    for name, size in sizes.items():
        require(size % shards == 0, f"{name}={size}: not divisible by {shards} devices.")


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH))


def state_shardings(mesh: Mesh | AbstractMesh, tree: Any, axes: Mapping[str, ParameterAxes]) -> Any:
    """Return a tree with the NamedSharding of every leaf of a training state, from `axes` by parameter name.

    `tensor` splits the axis that a layer declares, `fsdp` the largest other one, if they divide it. The axis of stacked
    layers is not split, because a scan reads its slices one after the other. Moments and EMA weights, whose names end
    with the name of their parameter, are sharded like it.
    """
    parts = {axis: size for axis, size in mesh.shape.items() if size > 1}

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        words = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        names = (".".join(words[start:]) for start in range(len(words)))
        declared = next((axes[name] for name in names if name in axes), None)
        return NamedSharding(mesh, PartitionSpec(*_split(declared, leaf.shape, parts)))

    return jax.tree.map_with_path(place, tree)


def _split(declared: ParameterAxes | None, shape: tuple[int, ...], parts: dict[str, int]) -> list[str | None]:
    spec: list[str | None] = [None] * len(shape)
    over = None if declared is None or declared.over is None else declared.over.axis
    # Grouped key and value heads may be fewer than the devices, which then each hold all of them.
    if "tensor" in parts and over is not None and shape[over] > 1 and shape[over] % parts["tensor"] == 0:
        spec[over] = "tensor"
    if "fsdp" in parts and math.prod(shape) >= MIN_FSDP_ELEMENTS:
        stacked = declared is not None and declared.stacked
        free = [axis for axis in range(stacked, len(shape)) if spec[axis] is None]
        if free := [axis for axis in free if shape[axis] % parts["fsdp"] == 0]:
            spec[max(free, key=lambda axis: shape[axis])] = "fsdp"
    while spec and spec[-1] is None:  # one form per sharding, so that shardings can be compared
        spec.pop()
    return spec


def undeclared_parameters(axes: Mapping[str, ParameterAxes]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of matrices in stacks that declare nothing."""
    return {name: x.shape for name, x in axes.items() if x.stacked and len(x.shape) > 2 and not x.declared}


def check_split(axes: Mapping[str, ParameterAxes], tensor: int) -> None:
    """Raise ConfigError if parameters cannot be split over `tensor` devices, or if their axis is not declared."""
    if tensor == 1:
        return
    for name, shape in undeclared_parameters(axes).items():
        raise ConfigError(
            f"mesh.tensor={tensor}: no tensor-parallel axis is declared for {name} of shape {shape}. Use "
            "mesh.tensor=1, or declare the axis in the layer as layers/blocks.py does (leanformer/runtime/mesh.py)."
        )
    for name, x in axes.items():
        if x.over is not None and not x.over.few and (size := x.shape[x.over.axis]) % tensor:
            raise ConfigError(f"mesh.tensor={tensor}: does not divide the {size} {x.over.what} of {name}.")


def with_mesh[**P, R](mesh: Mesh, function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, to be jitted, with the mesh set for the functions `constrain_...` and `tensor_parts` in it."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return wrapped


def constrain_batch(tree: Any) -> Any:
    """Return a tree of activations (B ...), constrained to be sharded over the leading (batch) axis only.

    If parameters are split, the compiler must choose between communicating them and communicating activations, and
    chooses wrong without this constraint.
    """
    mesh = jax.sharding.get_abstract_mesh()  # of `with_mesh`, or the user's, which may have other axes
    axes = tuple(axis for axis in BATCH if axis in mesh.auto_axes)
    if all(mesh.shape[axis] == 1 for axis in axes):
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(axes)), tree)


def tensor_parts() -> int:
    return jax.sharding.get_abstract_mesh().shape.get("tensor", 1)  # 1 outside `with_mesh`


def constrain_tensor(x: jax.Array, *, batch: bool) -> jax.Array:
    """Return an array constrained to be split along its last axis over `tensor`, and its leading one if `batch`."""
    leading = (BATCH,) if batch else (None,)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*leading, *(None,) * (x.ndim - 2), "tensor"))


def constrain_replicated(tree: Any) -> Any:
    """Return a tree of arrays, constrained inside `with_mesh` to be replicated, so that each process can read all."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def constrain_layout(tree: Any) -> Any:
    """Return a tree of activations, constrained to row-major order in memory (the first axis is major).

    XLA for GPUs would transpose every activation, for one sum over the batch in the gradient of position embeddings.
    """
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree)


def compiler_options(mesh: Mesh, device: Any) -> dict[str, Any]:
    """Return {option of XLA: value} for a step on this mesh; {} on one device or without GPUs.

    The options overlap communication with computation: XLA's latency-hiding scheduler, and large collectives that are
    not combined. By default XLA combines all of a scan iteration (one layer) at its end, when there is nothing left to
    overlap them with. launch/SCALING.md lists the overlap. Options that XLA_FLAGS names are left to it.
    """
    if device.platform != "gpu" or mesh.size == 1:
        return {}
    options = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": UNCOMBINED_BYTES,
        "xla_gpu_all_gather_combine_threshold_bytes": UNCOMBINED_BYTES,
        # XLA counts the bytes per device
        "xla_gpu_reduce_scatter_combine_threshold_bytes": UNCOMBINED_BYTES // mesh.shape["fsdp"],
    }
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}" not in flags}


def put_batch(mesh: Mesh, host: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return the global batch of device arrays from this process's part of it."""
    sharding = batch_sharding(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, value) for key, value in host.items()}
