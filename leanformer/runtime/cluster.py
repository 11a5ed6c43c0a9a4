"""Detection of a multi-process launch, and of this process's index. The first source that applies is used:

  flags         --coordinator=host:port --processes=N --process=I
  environment   JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and JAX_PROCESS_ID or JOB_COMPLETION_INDEX
                (launch/kubernetes.yaml sets them)
  Open MPI      mpirun with more than one process, also inside a SLURM job; version 5 and later need mpi4py
  SLURM         a job step (srun) of more than one task

Without any of them there is a single process. JAX finds the coordinator's address under SLURM and Open MPI.
JAX_LOCAL_DEVICE_IDS=0,1 selects this process's GPUs on the host, whatever the source.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from leanformer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Layout of the processes of a run, before they connect.

    Attributes:
        kind: source of the layout, for messages: "flags", "SLURM", ...
        processes: number of processes.
        process: index of this process, from 0.
        coordinator: host:port of the coordinator; None if JAX finds it.
        devices: numbers of the local accelerators to use; empty for all visible ones, None if JAX chooses them.
    """

    kind: str
    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    devices: tuple[int, ...] | None = ()


def detect(
    environ: Mapping[str, str], coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> Cluster:
    """Return the process layout from the flags if they are given, otherwise from the environment.

    Args:
        environ: environment variables.
        coordinator, processes, process: values of --coordinator, --processes and --process.

    Raises:
        ConfigError: the layout is incomplete or impossible.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    # Open MPI before SLURM: under SLURM its processes inherit the job step of the daemon that started them.
    cluster = (
        _detect_flags(given)
        or _detect_environment(environ)
        or _detect_open_mpi(environ)
        or _detect_slurm(environ)
        or _detect_single_process(environ)
    )
    if "JAX_LOCAL_DEVICE_IDS" in environ:
        cluster = dataclasses.replace(cluster, devices=None)  # JAX reads the variable itself
    if not 0 <= cluster.process < cluster.processes:
        raise ConfigError(
            f"Process {cluster.process} of {cluster.processes} does not exist. Indices are 0 to "
            f"{cluster.processes - 1}."
        )
    if cluster.coordinator and not re.fullmatch(r".+:\d+", cluster.coordinator):
        raise ConfigError(f"--coordinator={cluster.coordinator}: expected host:port.")
    return cluster


def _detect_flags(given: Mapping[str, Any]) -> Cluster | None:
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"{', '.join(given)} must be given together. Missing: {', '.join(missing)}.")
    return Cluster("flags", given["--processes"], given["--process"], given["--coordinator"])


def _detect_environment(environ: Mapping[str, str]) -> Cluster | None:
    if "JAX_COORDINATOR_ADDRESS" not in environ:
        return None
    index = environ.get("JAX_PROCESS_ID", environ.get("JOB_COMPLETION_INDEX"))
    numbers = {"JAX_NUM_PROCESSES": environ.get("JAX_NUM_PROCESSES"), "JAX_PROCESS_ID": index}
    wrong = [f"{name}={value}" for name, value in numbers.items() if not (value or "").isdecimal()]
    if wrong:
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS is set and requires two numbers. Found: {', '.join(wrong)}.")
    kind = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else "environment"
    processes, process = (int(value or "") for value in numbers.values())
    return Cluster(kind, processes, process, environ["JAX_COORDINATOR_ADDRESS"])


def _detect_slurm(environ: Mapping[str, str]) -> Cluster | None:
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS", _integer(environ, "SLURM_NTASKS", 1))
    if tasks == 1 or not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None  # the batch script itself, outside srun, has no step
    counts, node = (
        _parse_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")),
        _integer(environ, "SLURM_NODEID", 0),
    )
    here = counts[node] if node < len(counts) else None
    devices = _divide_gpus(environ, _integer(environ, "SLURM_LOCALID"), here)
    return Cluster("SLURM", tasks, _integer(environ, "SLURM_PROCID"), None, devices)


def _detect_open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    tasks = _integer(environ, "OMPI_COMM_WORLD_SIZE", 1)
    if tasks == 1:
        return None
    here = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0) or None
    devices = _divide_gpus(environ, _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"), here)
    return Cluster("Open MPI", tasks, _integer(environ, "OMPI_COMM_WORLD_RANK"), None, devices)


def _detect_single_process(environ: Mapping[str, str]) -> Cluster:
    if _integer(environ, "PMI_SIZE", 1) > 1:
        raise ConfigError(
            f"PMI_SIZE={environ['PMI_SIZE']}: an MPI other than Open MPI started this process, and the coordinator's "
            "address is unknown. Each process would train separately, in one workdir. Pass --coordinator=host:port "
            "--processes=$PMI_SIZE --process=$PMI_RANK."
        )
    return Cluster("single process")


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number in a variable. Raises ConfigError if it is no number, or not set and without a default."""
    value = environ.get(name, "" if default is None else str(default))
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value}: expected a number from the launcher. Unset the variables of the launcher to train in a "
            "single process, or pass --coordinator, --processes and --process."
        )
    return int(value)


def _parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of SLURM tasks on each node: [4, 4, 3] for "4(x2),3"."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def list_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the nodes of a SLURM job step, the coordinator's first: [a1, a2, b] for "a[1-2],b".

    They are read from SLURM_STEP_NODELIST; [] if it is not set.
    """
    names = []
    for prefix, ranges, suffix in re.findall(
        r"([^,\[\]]+)(?:\[([^\]]+)\])?([^,\[\]]*)", environ.get("SLURM_STEP_NODELIST", "")
    ):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [None]
            names += [f"{prefix}{'' if n is None else str(n).zfill(len(first))}{suffix}" for n in numbers]
    return names


def _divide_gpus(environ: Mapping[str, str], local: int, here: int | None) -> tuple[int, ...] | None:
    """Return the GPUs of the process with index `local` among the `here` processes on its node.

    JAX alone would use GPU number `local`. That is wrong for a process that has the node alone, and if the scheduler
    shows each process only its own GPUs.
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
