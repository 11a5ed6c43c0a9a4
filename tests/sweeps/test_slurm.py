"""Jobs on a SLURM cluster without accounting, with fake `sacct` and `squeue` programs."""

import pytest

from leanformer.sweeps import executor


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """Return a function that puts a program on PATH which prints a text and exits with a status."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(name, text, status=0):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
        (tmp_path / name).chmod(0o755)

    return install


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False)])
def test_accounting_is_detected_by_sacct(fake_program, status, expected):
    fake_program("sacct", "Slurm accounting storage is disabled", status)
    assert executor.has_accounts() is expected


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
