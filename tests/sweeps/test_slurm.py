"""Jobs on a SLURM cluster without accounting, with fake SLURM programs."""

import types

import pytest
from messages import refuses

from leanformer.sweeps import executor
from leanformer.sweeps.grid import SweepRun


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """Return a function that puts a program on PATH which prints a text, as an error if its status is not 0."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(name, text, status=0):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{text}'{' >&2' * bool(status)}\nexit {status}\n")
        (tmp_path / name).chmod(0o755)

    return install


def make_flags(*slurm):
    return types.SimpleNamespace(cluster="slurm", slurm=slurm, minutes=5, parallel=2)


@pytest.mark.parametrize("word", ["foo=bar", "mem_gb=x", "setup=x"])
def test_wrong_parameters_of_slurm_are_refused(word, fake_program, tmp_path):
    fake_program("srun", "")
    with refuses(f"--slurm={word}", "partition"):
        executor.make_executor(tmp_path, make_flags(word))


def test_refused_job_array_is_reported(fake_program, tmp_path):
    for program in ("srun", "sacct"):
        fake_program(program, "")
    fake_program("sbatch", "invalid partition specified: nope", 1)
    flags, run = make_flags("partition=nope"), SweepRun(tmp_path, ())
    (tmp_path / "summary.json").touch()
    with refuses("--slurm=partition=nope", "specified: nope", "--minutes"):
        executor.run([run], executor.make_executor(tmp_path, flags), [], flags)
    assert run.finished  # it is extended later, or never


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False)])
def test_accounting_is_detected_by_sacct(fake_program, status, expected):
    fake_program("sacct", "Slurm accounting storage is disabled", status)
    assert executor.has_accounts() is expected


def test_cluster_without_sacct_has_no_accounts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert executor.has_accounts() is False


def test_jobs_are_done_when_ended_or_gone_from_the_queue(fake_program):
    watcher = executor.QueueWatcher()
    states = {"7_0": "PENDING", "7_1": "RUNNING", "7_2": "COMPLETING", "7_3": "FAILED", "7_4": "CANCELLED"}
    for job in (*states, "7_5"):
        watcher.register_job(job)
    fake_program("squeue", "".join(f"{job}|{state}\\n" for job, state in states.items()))
    watcher.update()
    assert watcher.get_state("7_1", "cache") == "RUNNING"
    assert [watcher.is_done(job, "cache") for job in (*states, "7_5")] == [False, False, False, True, True, True]


def test_unreachable_controller_ends_no_job(fake_program):
    watcher = executor.QueueWatcher()
    watcher.register_job("7_0")
    fake_program("squeue", "7_0|RUNNING\\n")
    watcher.update()
    fake_program("squeue", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    watcher.update()
    assert not watcher.is_done("7_0", "cache")
