"""Jobs on a cluster without accounts, with programs in place of SLURM's that answer as SLURM does."""

import pytest

from leanformer.sweeps import executor


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Puts a program on the path that prints a text and ends with a status."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def program(name, text, status=0):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
        (tmp_path / name).chmod(0o755)

    return program


@pytest.mark.parametrize(("status", "kept"), [(0, True), (1, False)])
def test_a_cluster_keeps_accounts_if_sacct_answers(says, status, kept):
    says("sacct", "Slurm accounting storage is disabled", status)
    assert executor.has_accounts() is kept


def test_jobs_end_when_the_queue_says_so_or_has_forgotten_them(says):
    watcher = executor.QueueWatcher()
    states = {"7_0": "PENDING", "7_1": "RUNNING", "7_2": "COMPLETING", "7_3": "FAILED", "7_4": "CANCELLED"}
    for job in (*states, "7_5"):
        watcher.register_job(job)
    says("squeue", "".join(f"{job}|{state}\\n" for job, state in states.items()))
    watcher.update()
    assert watcher.get_state("7_1", "cache") == "RUNNING"
    assert [watcher.is_done(job, "cache") for job in (*states, "7_5")] == [False, False, False, True, True, True]


def test_a_controller_that_does_not_answer_ends_no_job(says):
    watcher = executor.QueueWatcher()
    watcher.register_job("7_0")
    says("squeue", "7_0|RUNNING\\n")
    watcher.update()
    says("squeue", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    watcher.update()
    assert not watcher.is_done("7_0", "cache")
