"""Who asked for several processes, told from flags and environments as the launchers set them."""

import pytest

from leanformer.errors import ConfigError
from leanformer.runtime.cluster import Cluster, detect


# As `srun env` prints them; two nodes, the second of which has fewer tasks.
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7"}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
ALONE = STEP | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
MET = {"JAX_COORDINATOR_ADDRESS": "run-train-0-0.run:55527", "JAX_NUM_PROCESSES": "4"}

FOUND = {
    "nobody": ({}, Cluster("nobody")),
    "a pod by itself": (POD, Cluster("nobody")),
    "a pod of a JobSet": (POD | MET, Cluster("Kubernetes", 4, 3, "run-train-0-0.run:55527")),
    "the environment": (MET | {"JAX_PROCESS_ID": "2"}, Cluster("environment", 4, 2, "run-train-0-0.run:55527")),
    "SLURM": (STEP, Cluster("SLURM", 7, 5, None, None)),
    "SLURM, a node's 6 GPUs shown to its 3 tasks": (
        STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
        Cluster("SLURM", 7, 5, None, (2, 3)),
    ),
    "SLURM, one GPU bound to each": (STEP | {"CUDA_VISIBLE_DEVICES": "0"}, Cluster("SLURM", 7, 5, None, ())),
    "SLURM, one task a node takes all": (ALONE, Cluster("SLURM", 2, 1, None, ())),
    "SLURM, devices chosen by hand": (ALONE | {"JAX_LOCAL_DEVICE_IDS": "1"}, Cluster("SLURM", 2, 1, None, None)),
    "SLURM, a step of one task": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, Cluster("nobody")),
    "SLURM, the batch script": (
        {key: value for key, value in STEP.items() if "STEP" not in key},
        Cluster("nobody"),
    ),
    "Open MPI": (MPI, Cluster("Open MPI", 6, 4, None, None)),
    "Open MPI, 3 GPUs": (MPI | {"CUDA_VISIBLE_DEVICES": "4,5,6"}, Cluster("Open MPI", 6, 4, None, (1,))),
    "Open MPI in a SLURM job of four nodes": (
        MPI | STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
        Cluster("Open MPI", 6, 4, None, None),
    ),
    "the environment, devices chosen by hand": (
        MET | {"JAX_PROCESS_ID": "2", "JAX_LOCAL_DEVICE_IDS": "1"},
        Cluster("environment", 4, 2, "run-train-0-0.run:55527", None),
    ),
    "Open MPI, one process": (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, Cluster("nobody")),
}


@pytest.mark.parametrize(("environ", "wanted"), FOUND.values(), ids=FOUND)
def test_detected(environ, wanted):
    assert detect(environ) == wanted


def test_flags_come_first():
    given = {"coordinator": "h:12", "processes": 3, "process": 2}
    assert detect(STEP | POD | MET, **given) == Cluster("flags", 3, 2, "h:12")


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"processes": 2}, {}, "go together; missing: --coordinator, --process"),
        ({"coordinator": "h:1", "processes": 2, "process": 2}, {}, "Process 2 of 2 cannot be: they are counted from 0"),
        ({"coordinator": "host", "processes": 2, "process": 1}, {}, "given as host:port, found host"),
        ({}, {"JAX_COORDINATOR_ADDRESS": "h:1"}, "two numbers go with it; found JAX_NUM_PROCESSES=None, JAX_PROC"),
        ({}, MET | {"JAX_PROCESS_ID": "one"}, "found JAX_PROCESS_ID=one"),
        ({}, {"PMI_SIZE": "4", "PMI_RANK": "1"}, "PMI_SIZE=4: an MPI other than Open MPI.* Give them --coordinator"),
    ],
)
def test_half_said_is_refused(given, environ, message):
    with pytest.raises(ConfigError, match=message):
        detect(environ, **given)
