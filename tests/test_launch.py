"""The launch scripts, run by a shell and with stand-ins for SLURM's commands."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from messages import mentions
from processes import QUICK, ROOT, records


LAUNCH = ROOT / "launch"
SCRIPTS = ("local.sh", "two_process_cpu.sh", "slurm.sbatch")
TINY = {"total_epochs": 0.0, "total_steps": 6, "batch_size": 32, "log_every": 2, "eval.batch_size": 500}
TINY |= {"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "probe.every": 0}
TINY |= {"optim.warmup_epochs": 0.0}
FLAGS = [f"--config.{key}={value}" for key, value in TINY.items()]


OTHERS = [ROOT / "tests" / "stress" / "slurm.sh", ROOT / "benchmarks" / "ask_cudnn.sh"]


@pytest.mark.parametrize("script", [*(LAUNCH / name for name in SCRIPTS), *OTHERS])
def test_shellcheck_finds_nothing(script):
    checker = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [*SCRIPTS, "kubernetes.yaml"])
def test_each_says_what_it_needs_and_what_to_edit(name):
    head = [line for line in (LAUNCH / name).read_text().splitlines()[:22] if line.startswith("#")]
    assert any("Needs:" in line for line in head) and any("Edit:" in line for line in head)
    assert f"`{name}`" in (LAUNCH / "README.md").read_text()


def launch(*words, **environ):
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "JAX_"))}
    plain |= {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, "TF_CPP_MIN_LOG_LEVEL": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, words)], cwd=ROOT, env=plain | environ, **pipes)


@pytest.mark.slow
def test_local_dry_run(tmp_path):
    running = launch(LAUNCH / "local.sh", "configs/quickstart.py", tmp_path / "run", "--dry_run", *FLAGS)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, err
    assert mentions(out, tmp_path / "run", 6)
    assert not (tmp_path / "run").exists()


def test_local_without_arguments_says_how():
    running = launch(LAUNCH / "local.sh")
    assert "CONFIG WORKDIR" in running.communicate(timeout=20)[1] and running.returncode == 2


@pytest.mark.slow
def test_two_processes_train_until_told_to_stop(tmp_path):
    words = [LAUNCH / "two_process_cpu.sh", f"--workdir={tmp_path}", "--config=configs/quickstart.py", *FLAGS]
    running = launch(*words, "--config.total_steps=5000")
    while len(records(tmp_path, "train")) < 3 and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 75 and mentions(out, "2 process(es)", f"--workdir={tmp_path}"), err


@pytest.mark.parametrize(("ends", "status"), [("0 0 0", 0), ("0 2 75", 2), ("75 0 0", 75)])
def test_several_processes_end_with_the_first_status_that_is_not_0(tmp_path, ends, status):
    """With a Python that writes down what it is asked for."""
    fake = tmp_path / "python"
    fake.write_text(f"""#!/bin/bash
if [[ $1 == -c ]]; then echo 1234; exit; fi
echo "$@" >> {tmp_path}/said
ends=({ends}) last="${{@: -1}}"
exit "${{ends[${{last#--process=}}]}}"
""")
    fake.chmod(0o755)
    words = (LAUNCH / "two_process_cpu.sh", "--workdir=here")
    running = launch(*words, PYTHON=str(fake), PROCESSES="3", MODULE="evaluate")
    running.communicate(timeout=20)
    said = sorted((tmp_path / "said").read_text().splitlines())
    meet = "-m leanformer.evaluate --workdir=here --coordinator=localhost:1234 --processes=3 --process="
    assert running.returncode == status and said == [f"{meet}{i}" for i in range(3)]


def sbatch(folder, ended):
    """The job's script with an srun that ends as told. Its status, and what it asked of SLURM."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for name, does in {"srun": f'echo "$@" > said; exit {ended}', "scontrol": 'echo "$@" >> said'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    environ = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "12"}
    running = launch("bash", LAUNCH / "slurm.sbatch", "--dry_run", PATH=f"{folder}:{os.environ['PATH']}", **environ)
    running.communicate(timeout=20)
    return running.returncode, (folder / "said").read_text().splitlines()


@pytest.mark.parametrize(("ended", "requeued"), [(0, False), (2, False), (130, False), (75, True), (1, True)])
def test_slurm_requeues_what_should_come_back(tmp_path, ended, requeued):
    status, said = sbatch(tmp_path, ended)
    assert "--cpus-per-task=12 " in said[0]
    assert "python -m leanformer.train --config=" in said[0] and said[0].endswith(" --dry_run")
    assert said[1:] == (["requeue 77"] if requeued else [])
    assert status == (0 if requeued else ended)


def test_slurm_gives_up_after_many_crashes_in_a_row(tmp_path):
    """A run that saved in between begins to count anew."""
    ends = [137] * 9 + [75] + [134] * 11
    assert [len(sbatch(tmp_path, ended)[1]) for ended in ends] == [2] * 20 + [1]
    assert (tmp_path / ".leanformer-77.crashes").read_text().splitlines() == ["134"] * 11


def test_slurm_without_its_environment_is_not_requeued(tmp_path):
    (tmp_path / "said").touch()
    environ = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "77"}
    running = launch("bash", LAUNCH / "slurm.sbatch", **environ)
    assert "activate" in running.communicate(timeout=20)[1] and running.returncode == 2


def test_kubernetes_agrees_with_itself():
    """The number of pods, their names and the port stand in several places."""
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
