"""Who asked for several processes, and which of them this is. By whichever comes first:

  flags         --coordinator=host:port --processes=N --process=I
  environment   JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and JAX_PROCESS_ID or JOB_COMPLETION_INDEX
                (launch/kubernetes.yaml sets them)
  Open MPI      mpirun with more than one, also inside a SLURM job; from version 5 on it needs mpi4py
  SLURM         a job step (srun) of more than one task

Nobody: then the process is alone. Where the processes meet under SLURM and Open MPI, JAX works out.
JAX_LOCAL_DEVICE_IDS=0,1 says, whoever asked, which of the host's GPUs are this process's.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from leanformer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Several processes as they were asked for, before they meet.

    Attributes:
        kind: who asked, in words.
        coordinator: None where JAX works it out.
        devices: local accelerators to use; empty for all that are visible, None where JAX gives each process one.
    """

    kind: str
    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    devices: tuple[int, ...] | None = ()


def detect(
    environ: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Cluster:
    """Who asked for several processes: what flags gave, then what the environment says.

    Raises:
        ConfigError: that was only half said.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    # Open MPI before SLURM: under SLURM its processes inherit the job step of the daemon that started them.
    found = _flags(given) or _environment(environ) or _open_mpi(environ) or _slurm(environ) or _nobody(environ)
    if "JAX_LOCAL_DEVICE_IDS" in environ:
        found = dataclasses.replace(found, devices=None)  # JAX reads it
    if not 0 <= found.process < found.processes:
        raise ConfigError(f"Process {found.process} of {found.processes} cannot be: they are counted from 0.")
    if found.coordinator and not re.fullmatch(r".+:\d+", found.coordinator):
        raise ConfigError(f"The coordinator is given as host:port, found {found.coordinator}.")
    return found


def _flags(given: Mapping[str, Any]) -> Cluster | None:
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"{', '.join(given)} go together; missing: {', '.join(missing)}.")
    return Cluster("flags", given["--processes"], given["--process"], given["--coordinator"])


def _environment(environ: Mapping[str, str]) -> Cluster | None:
    if "JAX_COORDINATOR_ADDRESS" not in environ:
        return None
    index = environ.get("JAX_PROCESS_ID", environ.get("JOB_COMPLETION_INDEX"))
    numbers = {"JAX_NUM_PROCESSES": environ.get("JAX_NUM_PROCESSES"), "JAX_PROCESS_ID": index}
    wrong = [f"{name}={value}" for name, value in numbers.items() if not (value or "").isdecimal()]
    if wrong:
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS is set, and two numbers go with it; found {', '.join(wrong)}.")
    kind = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else "environment"
    return Cluster(kind, *map(int, numbers.values()), environ["JAX_COORDINATOR_ADDRESS"])


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", 1)))
    if tasks == 1 or not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None  # the batch script itself, outside srun, has no step
    counts, node = _per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")), int(environ.get("SLURM_NODEID", 0))
    here = counts[node] if node < len(counts) else None
    devices = _share(environ, int(environ["SLURM_LOCALID"]), here)
    return Cluster("SLURM", tasks, int(environ["SLURM_PROCID"]), None, devices)


def _open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    tasks = int(environ.get("OMPI_COMM_WORLD_SIZE", 1))
    if tasks == 1:
        return None
    here = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0)) or None
    devices = _share(environ, int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), here)
    return Cluster("Open MPI", tasks, int(environ["OMPI_COMM_WORLD_RANK"]), None, devices)


def _nobody(environ: Mapping[str, str]) -> Cluster:
    if int(environ.get("PMI_SIZE", 1)) > 1:
        raise ConfigError(
            f"PMI_SIZE={environ['PMI_SIZE']}: an MPI other than Open MPI has started this process, and where they meet "
            "is unknown: each would train by itself, in one workdir. Give them --coordinator=host:port "
            "--processes=$PMI_SIZE --process=$PMI_RANK."
        )
    return Cluster("nobody")


def _per_node(text: str) -> list[int]:
    """SLURM's tasks on each node: "4(x2),3" is 4, 4, 3."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _share(environ: Mapping[str, str], local: int, here: int | None) -> tuple[int, ...] | None:
    """The GPUs of this process, one of `here` on its node. JAX by itself would give it the one numbered `local`: wrong
    for a process that has the node alone, and for one that the scheduler shows nothing but its own."""
    if here == 1:
        return ()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or here is None:
        return None
    each = len(visible.split(",")) // here
    return tuple(range(local * each, (local + 1) * each))  # empty where the scheduler has shared them out already
