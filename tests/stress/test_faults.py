"""Runs that are frozen, made to wait for ever, or killed: nothing hangs. tests/stress/kills.py kills at random."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from messages import mentions
from PIL import Image
from processes import finish, records, start


SMALL = {
    **{"total_epochs": 0.0, "total_steps": 5000, "batch_size": 32, "log_every": 1, "eval.every": 0, "probe.every": 0},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "checkpoint.every": 50},
    **{"optim.warmup_epochs": 0.0, "hang_seconds": 100},
}


def until(condition, running, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition() and all(p.poll() is None for p in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition(), finish(running, 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
def test_a_frozen_peer_is_noticed_inside_a_minute(tmp_path, cache):
    """A process that is stopped closes no connection, as a host that lost its network does not. It is the one that the
    others meet at; tests/stress/kills.py freezes either."""
    frozen = 0
    running = start("train", tmp_path, cache, processes=2, config=SMALL)
    until(lambda: len(records(tmp_path, "train")) > 5, running)
    running[frozen].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        status = running[1 - frozen].wait(60)
    finally:
        running[frozen].kill()
        _, _, err = finish(running)
    assert status not in (0, 75) and time.monotonic() - began < 60
    assert mentions(err[1 - frozen], "Thread") and "train.py" in err[1 - frozen]  # where it stood


@pytest.mark.slow
def test_data_that_never_come_end_the_run_with_the_stacks(tmp_path, cache, rng):
    """A pipe among the pictures: whoever reads it waits for ever."""
    for split, number in (("train", 40), ("val", 4)):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(number):
                picture = rng.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(picture).save(tmp_path / split / label / f"{i}.png")
    pipe = tmp_path / "train" / "dog" / "7.png"
    pipe.unlink()
    os.mkfifo(pipe)
    changes = {"data.name": f"folder:{tmp_path}", "data.eval_split": "val", "model.num_classes": 2, "batch_size": 4}
    changes |= {"eval.batch_size": 4, "hang_seconds": 12, "data.prefetch": 1}
    (status,), _, (err,) = finish(start("train", tmp_path / "run", cache, config=SMALL | changes))
    assert status == 70, err
    assert mentions(err, "data wait", "step")
    assert "loader.py" in err and "train.py" in err


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed(tmp_path, cache):
    running = start("train", tmp_path, cache, config=SMALL | {"data.workers": 2})
    until(lambda: len(records(tmp_path, "train")) > 5, running)
    parent = running[0].pid
    family = subprocess.run(["ps", "--ppid", str(parent), "-o", "pid="], capture_output=True, text=True, check=True)
    workers = [int(pid) for pid in family.stdout.split()]
    assert len(workers) >= 2
    for worker in workers:  # as schedulers do, who signal everybody; a worker has nothing to save
        os.kill(worker, signal.SIGUSR1)
    before = len(records(tmp_path, "train"))
    until(lambda: len(records(tmp_path, "train")) > before + 10, running)
    running[0].kill()
    finish(running)
    deadline = time.monotonic() + 30
    while left := [pid for pid in workers if _alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
