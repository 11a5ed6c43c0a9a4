"""Tests of the launch scripts, run by a shell with fake SLURM commands."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import ROOT, start, subprocess_environment
from messages import mentions
from processes import read_records_by_step


LAUNCH = ROOT / "launch"
SCRIPTS = ("local.sh", "two_process_cpu.sh", "slurm.sbatch")
TINY = {"total_epochs": 0.0, "total_steps": 6, "batch_size": 32, "log_every": 2, "eval.batch_size": 500}
TINY |= {"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "probe.every": 0}
TINY |= {"optim.warmup_epochs": 0.0}
FLAGS = [f"--config.{key}={value}" for key, value in TINY.items()]


OTHER_SCRIPTS = [ROOT / "tools" / "slurm.sh"]


@pytest.mark.parametrize("script", [*(LAUNCH / name for name in SCRIPTS), *OTHER_SCRIPTS])
def test_shellcheck_finds_nothing(script):
    checker = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    completed = subprocess.run([checker, script], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout


def launch(*words, **variables):
    """Start a script outside any cluster job, with additional environment variables."""
    return start(words, subprocess_environment(cache=None, **{"PYTHON": sys.executable} | variables))


@pytest.mark.slow
def test_local_dry_run(tmp_path):
    running = launch(LAUNCH / "local.sh", "configs/quickstart.py", tmp_path / "run", "--dry_run", *FLAGS)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, err
    assert mentions(out, tmp_path / "run", 6)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_two_processes_stop_on_a_signal(tmp_path, number, status):
    """Ctrl-C too, which a shell has its background processes ignore."""
    words = [LAUNCH / "two_process_cpu.sh", f"--workdir={tmp_path}", "--config=configs/quickstart.py", *FLAGS]
    running = launch(*words, "--config.total_steps=5000")
    while len(read_records_by_step(tmp_path, "train")) < 3 and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(number)
    out, err = running.communicate(timeout=200)
    assert running.returncode == status and mentions(out, "2 processes", f"--workdir={tmp_path}"), err


@pytest.mark.parametrize(("statuses", "status"), [("0 0 0", 0), ("0 2 75", 2), ("75 0 0", 75)])
def test_launcher_returns_first_nonzero_status(tmp_path, statuses, status):
    """`python` is replaced by a script that logs its arguments and exits with a given status."""
    fake_python = tmp_path / "python"
    fake_python.write_text(f"""#!/bin/bash
if [[ $1 == -c ]]; then echo 1234; exit; fi
echo "$@" >> {tmp_path}/said
statuses=({statuses}) last="${{@: -1}}"
exit "${{statuses[${{last#--process=}}]}}"
""")
    fake_python.chmod(0o755)
    words = (LAUNCH / "two_process_cpu.sh", "--workdir=here")
    running = launch(*words, PYTHON=str(fake_python), PROCESSES="3", MODULE="evaluate")
    running.communicate(timeout=20)
    calls = sorted((tmp_path / "said").read_text().splitlines())
    command = "-m leanformer.evaluate --workdir=here --coordinator=localhost:1234 --processes=3 --process="
    assert running.returncode == status and calls == [f"{command}{i}" for i in range(3)]


def run_sbatch(folder, srun_status):
    """Run slurm.sbatch with a fake srun that exits with a given status; return its status and its calls of SLURM."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for name, body in {
        "srun": f'echo "$@" > said; env > variables; exit {srun_status}',
        "scontrol": 'echo "$@" >> said',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environ = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "12"}
    running = launch("bash", LAUNCH / "slurm.sbatch", "--dry_run", PATH=f"{folder}:{os.environ['PATH']}", **environ)
    running.communicate(timeout=20)
    return running.returncode, (folder / "said").read_text().splitlines()


@pytest.mark.parametrize(("srun_status", "requeued"), [(0, False), (2, False), (130, False), (75, True), (1, True)])
def test_slurm_requeues_after_preemption_or_crash(tmp_path, srun_status, requeued):
    status, calls = run_sbatch(tmp_path, srun_status)
    assert "--cpus-per-task=12 " in calls[0]
    assert "python -m leanformer.train --config=" in calls[0] and calls[0].endswith(" --dry_run")
    assert calls[1:] == (["requeue 77"] if requeued else [])
    assert status == (0 if requeued else srun_status)


def test_slurm_keeps_programs_and_limits_memory(tmp_path):
    """A restart then computes with the kernels that were measured before, and NCCL finds memory."""
    run_sbatch(tmp_path, 0)
    variables = (tmp_path / "variables").read_text().splitlines()
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.75" in variables
    assert "JAX_COMPILATION_CACHE_DIR=runs/vit_b_7x16.compiled" in variables


def test_slurm_stops_requeueing_after_repeated_crashes(tmp_path):
    """A run that saved in between (status 75) resets the count."""
    statuses = [137] * 9 + [75] + [134] * 11
    assert [len(run_sbatch(tmp_path, srun_status)[1]) for srun_status in statuses] == [2] * 20 + [1]
    assert (tmp_path / ".leanformer-77.crashes").read_text().splitlines() == ["134"] * 11


def test_kubernetes_manifest_is_consistent():
    """The number of pods, their names and the port occur several times in the manifest."""
    result = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    (group,) = result["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    name, port = result["metadata"]["name"], container["ports"][0]["containerPort"]
    assert str(job["parallelism"]) == str(job["completions"]) == environ["JAX_NUM_PROCESSES"]
    assert environ["JAX_COORDINATOR_ADDRESS"] == f"{name}-{group['name']}-0-0.{name}:{port}"
    assert f"--connect_seconds={60 * 60}" in container["args"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
