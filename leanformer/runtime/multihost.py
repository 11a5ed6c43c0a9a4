"""Processes of a run: their start and end, and their communication outside compiled programs.

It uses the key-value store of JAX's coordinator in process 0, which needs no device and works from any thread, but has
no public name. `jax.process_index` would start the devices. If another process is killed, JAX ends this one within
HEARTBEAT seconds.
"""

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from leanformer.errors import ConfigError


HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead
SHUTDOWN = 300  # seconds that a process waits at its normal end for the other processes to end
PATIENCE = 6 * 3600  # seconds that a process waits for a value of another, which may still tokenise a text
_calls = itertools.count()  # numbers the calls of `all_gather_host`
_published: dict[str, set[int]] = {}


def store() -> Any:
    """Return the key-value store of JAX's coordinator; None in a single process."""
    return distributed.global_state.client


def count() -> int:
    return distributed.global_state.num_processes if store() else 1


def index() -> int:
    return distributed.global_state.process_id if store() else 0


def coordinator_address() -> str | None:
    """Return the address host:port of the coordinator, also if JAX found it; None in a single process."""
    return distributed.global_state.coordinator_address


def is_primary() -> bool:
    """Return whether this is process 0, which writes files and prints."""
    return index() == 0


def _set(key: str, content: Any) -> None:
    store().key_value_set(f"leanformer/{key}", json.dumps(content), allow_overwrite=True)


def _list(folder: str) -> dict[str, Any]:
    """Return {rest of the key: value} for all keys FOLDER/... of `_set`."""
    prefix = f"leanformer/{folder}/"
    return {key.removeprefix(prefix): json.loads(text) for key, text in store().key_value_dir_get(prefix)}


def broadcast_from_primary(content: Any) -> Any:
    """Return process 0's value in every process, as `all_gather_host`; keys of dicts come back as strings."""
    return all_gather_host(content if is_primary() else None)[0]


def all_gather_host(content: Any) -> list[Any]:
    """Return the values of all processes, which must be JSON and call this in the same order, by index."""
    if count() == 1:
        return [content]
    call = next(_calls)
    _set(f"each/{call}/{index()}", content)
    deadline = time.monotonic() + PATIENCE
    while len(values := _list(f"each/{call}")) < count():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Only processes {', '.join(values)} of {count()} answered within {PATIENCE} s.")
        time.sleep(0.05)
    if call:  # a process that published this value has read all of the call before
        store().key_value_delete(f"leanformer/each/{call - 1}/{index()}")
    return [values[str(i)] for i in range(count())]


def gather_union(name: str, items: set[int]) -> set[int]:
    """Publish a set of numbers, and return the union of all processes' so far, which need not wait for each other."""
    if count() == 1:
        return items
    for item in items - _published.setdefault(name, set()):
        _set(f"{name}/{item}", item)
    _published[name] |= items
    return set(_list(name).values())


def fetch(tree: Any) -> Any:
    """Return a tree of global arrays as NumPy arrays; all processes must call it."""
    return jax.device_get(tree) if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


def start(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, connect_seconds: int = 300
) -> None:
    """Connect to the other processes, if any, before a device is used. Then only process 0 writes to stdout."""
    cluster = detect(os.environ, coordinator, processes, process)
    if cluster is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            **cluster,
            initialization_timeout=connect_seconds,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except Exception as error:  # JAX and its cluster detection raise errors of many classes
        raise ConfigError(
            f"Process {cluster['process_id']} of {cluster['num_processes']} could not connect to "
            f"{cluster['coordinator_address'] or coordinator_address()}: {error}\nStart all processes "
            "with the same address. Every host must reach it, and its port must be free on the host of process 0."
        ) from error
    if not is_primary():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish(status: int, *, failed: bool) -> None:
    """Disconnect from the other processes at the end of a command; if it failed, exit without waiting for them."""
    if count() == 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if failed:
        os._exit(status)
    jax.distributed.shutdown()


def describe() -> dict[str, str]:
    """Return {"processes": their number and, if several, the coordinator and this index} for the run header."""
    if count() == 1:
        return {"processes": "1 (single process)"}
    where = coordinator_address()
    return {"processes": f"{count()}; this is process {index()}; coordinator {where}"}


def detect(
    environ: Mapping[str, str], coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> dict[str, Any] | None:
    """Return the arguments of `jax.distributed.initialize`; None for a single process. The first that applies:

    - the flags --coordinator=host:port --processes=N --process=I;
    - JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and JAX_PROCESS_ID or Kubernetes' JOB_COMPLETION_INDEX;
    - Open MPI with more than one process, also inside a SLURM job; version 5 and later need mpi4py;
    - a SLURM job step (srun) of more than one task.

    JAX finds the coordinator's address under Open MPI and SLURM, and reads JAX_LOCAL_DEVICE_IDS, the GPUs to use.
    """
    layout: list[Any] = [coordinator, processes, process]
    if layout == [None] * 3 and "JAX_COORDINATOR_ADDRESS" in environ:
        index = environ.get("JAX_PROCESS_ID", environ.get("JOB_COMPLETION_INDEX"))
        layout = [environ["JAX_COORDINATOR_ADDRESS"], environ.get("JAX_NUM_PROCESSES"), index]
    local: tuple[int, ...] | None = ()  # all visible devices
    if layout != [None] * 3:
        if None in layout:
            raise ConfigError(
                f"coordinator, processes, process = {layout}: pass all of --coordinator, --processes and --process, or "
                "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
            )
    elif int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        # Before SLURM: there, processes of Open MPI inherit the job step of the daemon that started them.
        layout = [None, environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_RANK"]]
        here = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0)) or None
        local = divide_gpus(environ, int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), here)
    elif int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in environ:
        layout = [None, environ["SLURM_STEP_NUM_TASKS"], environ["SLURM_PROCID"]]
        tasks, node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")), int(environ.get("SLURM_NODEID", 0))
        local = divide_gpus(environ, int(environ["SLURM_LOCALID"]), tasks[node] if node < len(tasks) else None)
    else:
        return None
    if "JAX_LOCAL_DEVICE_IDS" in environ:
        local = None
    return {
        "coordinator_address": layout[0],
        "num_processes": int(layout[1]),
        "process_id": int(layout[2]),
        "local_device_ids": local,
    }


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of SLURM tasks on each node: [4, 4, 3] for "4(x2),3"."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def divide_gpus(environ: Mapping[str, str], local: int, here: int | None) -> tuple[int, ...] | None:
    """Return the GPUs of the process with index `local` among the `here` processes on its node; () for all visible.

    None lets JAX choose, which uses GPU number `local`: wrong if a process has the node, or sees only its own GPUs.
    """
    if here == 1:
        return ()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or here is None:
        return None
    if environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == str(len(visible.split(","))):
        return ()  # the scheduler shows each process as many as it asked for
    gpus = len(visible.split(",")) // here
    return tuple(range(local * gpus, (local + 1) * gpus))  # empty if the scheduler has already divided them
