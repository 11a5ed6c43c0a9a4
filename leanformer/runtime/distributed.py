"""Start and end of a multi-process run. If another process is killed, JAX ends this one within HEARTBEAT seconds."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax

from leanformer.errors import ConfigError
from leanformer.runtime import multihost


HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead
SHUTDOWN = 300  # seconds that a process waits at its normal end for the other processes to end


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
            f"{cluster['coordinator_address'] or multihost.coordinator_address()}: {error}\nStart all processes "
            "with the same address. Every host must reach it, and its port must be free on the host of process 0."
        ) from error
    if not multihost.is_primary():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish(status: int, *, failed: bool) -> None:
    """End a command: disconnect from the other processes, if any, which must end too.

    If it failed, exit at once: a normal end would wait for the others, and they wait for this one.
    """
    if multihost.count() == 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if failed:
        os._exit(status)
    jax.distributed.shutdown()


def describe() -> dict[str, str]:
    """Return {"processes": their number and, if several, the coordinator and this index} for the run header."""
    if multihost.count() == 1:
        return {"processes": "1 (single process)"}
    where = multihost.coordinator_address()
    return {"processes": f"{multihost.count()}; this is process {multihost.index()}; coordinator {where}"}


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
