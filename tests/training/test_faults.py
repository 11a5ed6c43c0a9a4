"""Frozen, blocked and killed runs: nothing hangs. tools/kills.py kills at random times."""

import os
import signal
import subprocess
import time

import pytest
from messages import mentions
from processes import read_records_by_step, start_processes, wait_for_processes


SMALL = {
    **{"total_epochs": 0.0, "total_steps": 5000, "batch_size": 32, "log_every": 1, "eval.every": 0, "probe.every": 0},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "checkpoint.every": 50},
    **{"optim.warmup_epochs": 0.0, "hang_seconds": 100},
}


def wait_until(condition, running, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition() and all(p.poll() is None for p in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition(), wait_for_processes(running, 1)


def find_workers(process):
    command = ["ps", "--ppid", str(process.pid), "-o", "pid="]
    workers = [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
    assert len(workers) >= 2
    return workers


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
def test_blocked_data_ends_the_run_with_stack_traces(tmp_path, cache):
    """The workers are stopped, so the next batch never comes."""
    changes = {"data.workers": 2, "hang_seconds": 12, "data.prefetch": 1}
    running = start_processes("train", tmp_path, cache, config=SMALL | changes)
    wait_until(lambda: len(read_records_by_step(tmp_path, "train")) > 5, running)
    workers = find_workers(running[0])
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        running[0].wait(timeout=120)
    finally:
        for worker in filter(_is_alive, workers):  # before the output is read, whose pipe they hold open
            os.kill(worker, signal.SIGKILL)
    (status,), _, (err,) = wait_for_processes(running)
    assert status == 70, err
    assert mentions(err, "data wait", "step")
    assert "loader.py" in err and "train.py" in err


@pytest.mark.slow
def test_workers_end_with_a_killed_run(tmp_path, cache):
    running = start_processes("train", tmp_path, cache, config=SMALL | {"data.workers": 2})
    wait_until(lambda: len(read_records_by_step(tmp_path, "train")) > 5, running)
    workers = find_workers(running[0])
    for worker in workers:  # as schedulers do, which signal all processes; a worker has nothing to save
        os.kill(worker, signal.SIGUSR1)
    before = len(read_records_by_step(tmp_path, "train"))
    wait_until(lambda: len(read_records_by_step(tmp_path, "train")) > before + 10, running)
    running[0].kill()
    wait_for_processes(running)
    deadline = time.monotonic() + 30
    while remaining := [pid for pid in workers if _is_alive(pid)]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
