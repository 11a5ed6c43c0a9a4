"""Two local processes over gloo, started by the ordinary commands: same results as with one process."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
from messages import mentions, refuses
from processes import find_free_port, read_records_by_step, start_processes, wait_for_processes

from leanformer import text
from leanformer.runtime import multihost


MEASURES = ("tokens", "attention_entropy", "largest_logit")
# Two processes sum gradients in another order than one. A step changes the weights by 1e-5 of its update (see
# rounding.py), thirty steps by sqrt(30) to 30 times that. Another batch or random draw changes a loss by at least 1 %.
TOLERANCE = 3e-4
TOTAL, MIDDLE = 30, 10  # steps of a run, and the step of its first evaluation and probe
SMALL = {  # wide enough to shard parameters; 2,000 examples in batches of 222 leave 2, both in process 0
    **{"total_epochs": 0.0, "total_steps": TOTAL, "batch_size": 32, "accumulate": 2, "log_every": 1},
    **{"model.width": 48, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 96, "model.drop_path": 0.2},
    **{"augment.mixup": 0.8, "augment.cutmix": 1.0, "optim.ema": 0.9},
    **{"optim.warmup_epochs": 0.01, "eval.every": MIDDLE, "eval.batch_size": 222, "checkpoint.every": 50},
    **{"probe.every": MIDDLE, "probe.examples": 4, "probe.measures": MEASURES, "mesh.fsdp": -1, "mesh.data": 1},
    **{"hang_seconds": 100},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache):
    """Train without interruption in one process and return the work directory."""
    workdir = tmp_path_factory.mktemp("one")
    statuses, _, err = wait_for_processes(start_processes("train", workdir, cache, config=SMALL))
    assert statuses == [0], err
    return workdir


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, cache):
    """Train in two processes, send SIGTERM to one about half way, and return the work directory and both outputs."""
    workdir = tmp_path_factory.mktemp("two")
    running = start_processes("train", workdir, cache, config=SMALL, processes=2)
    deadline = time.monotonic() + 200
    while (
        all(p.poll() is None for p in running)
        and len(read_records_by_step(workdir, "train")) <= MIDDLE
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    running[1].send_signal(signal.SIGTERM)
    return workdir, wait_for_processes(running)


def assert_same_records(workdir, reference, kind, names, steps, **tolerance):
    result, baseline = read_records_by_step(workdir, kind), read_records_by_step(reference, kind)
    assert set(steps) <= result.keys()
    for step in steps:
        values, expected = ([r[step][name] for name in names] for r in (result, baseline))
        np.testing.assert_allclose(values, expected, **tolerance, err_msg=f"{kind} at step {step}")


@pytest.mark.slow
def test_two_processes_match_one_process(one_process, two_processes):
    workdir, (statuses, out, err) = two_processes
    assert statuses == [75, 75], err
    assert mentions(out[0], f"step {max(read_records_by_step(workdir, 'train'))}")
    assert out[1] == ""  # only process 0 prints
    assert mentions(out[0], "data 1", "fsdp 2", "tensor 1")
    steps = read_records_by_step(workdir, "train").keys()
    assert sorted(steps) == [*range(1, max(steps) + 1)] and MIDDLE < max(steps) <= TOTAL - 10
    assert_same_records(workdir, one_process, "train", ("loss", "grad_norm"), steps, rtol=TOLERANCE)
    assert_same_records(workdir, one_process, "eval", ("loss", "ema_loss"), [MIDDLE], rtol=TOLERANCE)
    assert_same_records(
        workdir, one_process, "eval", ("top1", "top5", "ema_top1", "examples"), [MIDDLE], atol=0.0005
    )  # one example of 2,000
    assert read_records_by_step(workdir, "eval")[MIDDLE]["examples"] == 2000
    for name in ("attention_entropy", "largest_logit"):  # well conditioned in every layer, unlike tokens
        result, expected = (
            read_records_by_step(path, "probe")[MIDDLE][name]["median"] for path in (workdir, one_process)
        )
        np.testing.assert_allclose(result, expected, rtol=1e-3)


@pytest.fixture(scope="module")
def resumed_run(two_processes, cache, tmp_path_factory):
    """Resume a copy of the two-process run in one process; return its folder, the step resumed from and the output."""
    workdir = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(two_processes[0], workdir)
    saved = max(read_records_by_step(workdir, "train"))
    return workdir, saved, wait_for_processes(start_processes("train", workdir, cache, config=SMALL))


@pytest.mark.slow
def test_one_process_resumes_a_two_process_run(one_process, resumed_run):
    """No step is lost or repeated; the losses of the remaining steps, at least ten, equal an uninterrupted run's."""
    workdir, saved, (statuses, out, err) = resumed_run
    assert statuses == [0], err
    assert mentions(out[0], f"step {saved}", workdir)
    assert sorted(read_records_by_step(workdir, "train")) == [*range(1, TOTAL + 1)]
    assert_same_records(
        workdir, one_process, "train", ("loss", "grad_norm"), range(saved + 1, TOTAL + 1), rtol=TOLERANCE
    )
    assert_same_records(workdir, one_process, "eval", ("loss", "ema_loss"), [TOTAL], rtol=TOLERANCE)
    summary = json.loads((workdir / "summary.json").read_text())
    names = {"start-up", "compile", "data wait", "steps", "evaluation", "probe", "checkpoint"}
    assert summary["seconds"].keys() == names and 0 < summary["goodput"] < 1


@pytest.mark.slow
def test_two_processes_evaluate_and_probe_a_saved_run(resumed_run, cache):
    workdir, _, _ = resumed_run
    statuses, out, err = wait_for_processes(start_processes("evaluate", workdir, cache, processes=2, config={}))
    assert statuses == [0, 0], err
    result, expected = (
        json.loads((workdir / "evaluation.json").read_text()),
        read_records_by_step(workdir, "eval")[TOTAL],
    )
    shown = text.lookup("ema_top1").axis
    assert result["step"] == TOTAL and result["examples"] == 2000 and shown in out[0] and out[1] == ""
    np.testing.assert_allclose(
        [result[k] for k in ("loss", "ema_loss")], [expected[k] for k in ("loss", "ema_loss")], TOLERANCE
    )
    statuses, out, err = wait_for_processes(
        start_processes(
            "probe",
            workdir,
            cache,
            processes=2,
            config={},
            extra=["--examples=4", "--measures=tokens", "--heads=2", "--seeds=1"],
        )
    )
    assert statuses == [0, 0], err
    assert out[0] != "" and out[1] == ""
    result = json.loads((workdir / "probe" / "probe.json").read_text())
    assert [point["heads"] for point in result["sweep"]["points"]] == [2, 2]
    tokens = result["snapshots"][0]["measures"]["tokens"]
    medians = [layer["median"] for layer in tokens["layers"]]
    np.testing.assert_allclose(medians, read_records_by_step(workdir, "probe")[TOTAL]["tokens"]["median"], rtol=1e-3)


@pytest.mark.slow
def test_failed_process_ends_the_other(tmp_path, cache):
    begin = time.monotonic()
    running = start_processes(
        "train", tmp_path, cache, config=SMALL, processes=2, last=["--config.data.name=folder:/no/such/folder"]
    )
    statuses, _, err = wait_for_processes(running)
    assert statuses[1] == 2 and statuses[0] not in (0, 75), err
    assert mentions(err[1], "/no/such/folder") and "Traceback" not in err[1]
    assert time.monotonic() - begin < 90


# As printed by `srun env` on two nodes; the second node has fewer tasks.
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7"}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
PER_NODE = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
COORDINATOR = {"JAX_COORDINATOR_ADDRESS": "run-0.run:55527", "JAX_NUM_PROCESSES": "4"}
TWO = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "a100:2"}
LAYOUTS = {  # environment variables, and address, processes, process, GPUs (None: JAX chooses; (): all); None if single
    "no variables": ({}, None),
    "pod": (POD, None),
    "pod of a JobSet": (POD | COORDINATOR, ("run-0.run:55527", 4, 3, ())),
    "environment": (COORDINATOR | {"JAX_PROCESS_ID": "2"}, ("run-0.run:55527", 4, 2, ())),
    "SLURM": (STEP, (None, 7, 5, None)),
    "SLURM, 6 GPUs / 3 tasks": (STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, (None, 7, 5, (2, 3))),
    "SLURM, 2 GPUs per task bound": (STEP | TWO, (None, 7, 5, ())),
    "SLURM, node = task": (STEP | PER_NODE, (None, 2, 1, ())),
    "SLURM, single task": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None),
    "Open MPI": (MPI, (None, 6, 4, None)),
    "Open MPI, 3 GPUs": (MPI | {"CUDA_VISIBLE_DEVICES": "4,5,6"}, (None, 6, 4, (1,))),
    "Open MPI in SLURM": (MPI | STEP | {"SLURM_STEP_NUM_TASKS": "3"}, (None, 6, 4, None)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_a_launcher(name):
    environ, expected = LAYOUTS[name]
    found = multihost.detect(environ)
    assert (found and tuple(found.values())) == expected
    flags = multihost.detect(environ, "host:1", 2, 0)
    assert flags and [*flags.values()][:3] == ["host:1", 2, 0]


@pytest.mark.parametrize(("environ", "flags"), [({}, {"processes": 2}), ({"JAX_COORDINATOR_ADDRESS": "host:1"}, {})])
def test_incomplete_layout_is_refused(environ, flags):
    with refuses("--process", "JAX_PROCESS_ID"):
        multihost.detect(environ, **flags)


@pytest.mark.slow
def test_missing_process_is_reported(tmp_path, cache):
    address = f"localhost:{find_free_port()}"
    flags = [f"--coordinator={address}", "--processes=2", "--process=0", "--connect_seconds=3"]
    statuses, _, err = wait_for_processes(start_processes("train", tmp_path, cache, config=SMALL, extra=flags))
    assert statuses[0] not in (0, 75) and not list(tmp_path.iterdir()), err
