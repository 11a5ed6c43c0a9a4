"""Detection of multi-process launches from flags and the launchers' environment variables."""

import pytest
from messages import refuses

from leanformer.runtime.cluster import Cluster, detect, list_nodes


# As printed by `srun env` on two nodes; the second node has fewer tasks.
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7"}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
TASK_PER_NODE = STEP | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
COORDINATOR = {"JAX_COORDINATOR_ADDRESS": "run-train-0-0.run:55527", "JAX_NUM_PROCESSES": "4"}

CASES = {
    "no variables": ({}, Cluster("single process")),
    "pod": (POD, Cluster("single process")),
    "pod, JobSet": (POD | COORDINATOR, Cluster("Kubernetes", 4, 3, "run-train-0-0.run:55527")),
    "environment": (COORDINATOR | {"JAX_PROCESS_ID": "2"}, Cluster("environment", 4, 2, "run-train-0-0.run:55527")),
    "SLURM": (STEP, Cluster("SLURM", 7, 5, None, None)),
    "SLURM, 6 GPUs / 3 tasks": (STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, Cluster("SLURM", 7, 5, None, (2, 3))),
    "SLURM, GPU bound": (STEP | {"CUDA_VISIBLE_DEVICES": "0"}, Cluster("SLURM", 7, 5, None, ())),
    "SLURM, 2 GPUs per task bound": (
        STEP | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "a100:2"},
        Cluster("SLURM", 7, 5, None, ()),
    ),
    "SLURM, 2 GPUs per task, 6 visible": (
        STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5", "SLURM_GPUS_PER_TASK": "2"},
        Cluster("SLURM", 7, 5, None, (2, 3)),
    ),
    "SLURM, node = task": (TASK_PER_NODE, Cluster("SLURM", 2, 1, None, ())),
    "SLURM, chosen devices": (TASK_PER_NODE | {"JAX_LOCAL_DEVICE_IDS": "1"}, Cluster("SLURM", 2, 1, None, None)),
    "SLURM, single task": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, Cluster("single process")),
    "SLURM, batch script": (
        {key: value for key, value in STEP.items() if "STEP" not in key},
        Cluster("single process"),
    ),
    "Open MPI": (MPI, Cluster("Open MPI", 6, 4, None, None)),
    "Open MPI, 3 GPUs": (MPI | {"CUDA_VISIBLE_DEVICES": "4,5,6"}, Cluster("Open MPI", 6, 4, None, (1,))),
    "Open MPI in SLURM": (
        MPI | STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
        Cluster("Open MPI", 6, 4, None, None),
    ),
    "environment, chosen devices": (
        COORDINATOR | {"JAX_PROCESS_ID": "2", "JAX_LOCAL_DEVICE_IDS": "1"},
        Cluster("environment", 4, 2, "run-train-0-0.run:55527", None),
    ),
    "Open MPI, single": (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, Cluster("single process")),
}


@pytest.mark.parametrize(("environ", "expected"), CASES.values(), ids=CASES)
def test_cluster_is_detected_from_environment(environ, expected):
    assert detect(environ) == expected


def test_flags_override_environment():
    given = {"coordinator": "h:12", "processes": 3, "process": 2}
    assert detect(STEP | POD | COORDINATOR, **given) == Cluster("flags", 3, 2, "h:12")


@pytest.mark.parametrize(
    ("given", "environ", "parts"),
    [
        ({"processes": 2}, {}, ["--coordinator", "--process"]),
        ({"coordinator": "h:1", "processes": 2, "process": 2}, {}, ["Process 2", 2, 0]),
        ({"coordinator": "host", "processes": 2, "process": 1}, {}, ["host:port", "host"]),
        ({}, {"JAX_COORDINATOR_ADDRESS": "h:1"}, ["JAX_NUM_PROCESSES=None", "JAX_PROCESS_ID=None"]),
        ({}, COORDINATOR | {"JAX_PROCESS_ID": "one"}, ["JAX_PROCESS_ID=one"]),
        ({}, {"PMI_SIZE": "4", "PMI_RANK": "1"}, ["PMI_SIZE=4", "--coordinator"]),
        *[({}, {name: "x"}, [f"{name}=x"]) for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")],
        ({}, {"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_LOCAL_RANK="]),
    ],
)
def test_incomplete_or_invalid_settings_are_refused(given, environ, parts):
    with refuses(*parts):
        detect(environ, **given)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("node7", ["node7"]),
        ("a1,b-2", ["a1", "b-2"]),
        ("node[08-10,12],x,r[1-2]-ib", ["node08", "node09", "node10", "node12", "x", "r1-ib", "r2-ib"]),
    ],
)
def test_nodes_of_a_slurm_step(text, names):
    assert list_nodes({"SLURM_STEP_NODELIST": text}) == names
