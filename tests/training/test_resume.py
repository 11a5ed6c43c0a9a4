"""A run that was killed goes on as if it had not been, bit for bit.

It follows from three things, each shown here for itself: a state comes back from a checkpoint bit for bit, with every
task and every optimizer; batches are a function of the seed and the step; and so is what a step draws. Whole runs, cut
off and killed, show that nothing else is carried from step to step.
"""

import dataclasses
import itertools
import random
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, command, environment, run
from power_cuts import power_cut
from small_runs import MAKERS, fresh_state, small

from leanformer import tasks, train
from leanformer.runtime import mesh as sharding
from leanformer.runtime import multihost
from leanformer.tasks import artifacts
from leanformer.training import metrics_log, optimizers, train_setup
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def bits(leaf):
    """Return the bytes of an array, so that NaN and -0.0 are compared too."""
    return np.asarray(jax.device_get(leaf)).tobytes()


def equal_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) and bits(x) == bits(y), jax.tree_util.keystr(path)


def any_bits(like, seed):
    """Return a state of these shapes whose leaves hold any bits of finite numbers, subnormal ones among them."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        values = rng.integers(0, 256, leaf.size * leaf.dtype.itemsize, np.uint8).view(leaf.dtype)
        finite = np.where(np.isfinite(values), values, np.ones_like(values))
        return jax.device_put(finite.reshape(leaf.shape), leaf.sharding)

    return jax.tree.map(draw, like)


STATES = [
    *((task, "adamw") for task in MAKERS),
    *(("images", name) for name in optimizers.OPTIMIZERS if name != "adamw"),
]


@pytest.mark.parametrize(("task", "optimizer"), STATES)
def test_a_state_comes_back_bit_for_bit_on_any_mesh(task, optimizer, folder, tmp_path, meshes, monkeypatch):
    monkeypatch.setattr(sharding, "SMALL", 1)
    c = small(task, folder)
    c.optim.name = optimizer
    if optimizer != "adamw":
        c.optim.b1_peak = None
    saved_on, restored_on = (train_setup.build(c, examples=64, mesh=meshes(*shape)) for shape in ((1, 4), (2, 2, 2)))
    state = any_bits(saved_on.state, 1)
    with Checkpoints(tmp_path) as saved:
        saved.save(3, state, seconds={"steps": 3.0})
    with Checkpoints(tmp_path) as saved:
        result, books = saved.restore(restored_on.state)
    equal_bits(result, state)
    assert books == {"steps": 3.0}
    assert [x.sharding for x in jax.tree.leaves(result)] == [x.sharding for x in jax.tree.leaves(restored_on.state)]


def opened(c):
    task = tasks.build(c)
    source = task.data.open(c.data.train_split)
    return train_setup.build(c, examples=64, mesh=None, task=task), source


def differ(a, b):
    return any(not np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("task", [name for name in MAKERS if name != "xcit"])
def test_batches_are_a_function_of_seed_and_step(task, folder, monkeypatch):
    """In any order, from any step on, and by any number of processes."""
    c = small(task, folder)
    experiment_run, source = opened(c)
    batches = experiment_run.train_batches(source)
    whole = [batches[step] for step in range(4)]
    _, again = opened(c)
    for step in (2, 0, 3):
        equal_bits(experiment_run.train_batches(again)[step], whole[step])
    late = experiment_run.stream(again, 2)
    equal_bits([*itertools.islice(late, 2)], whole[2:])
    late.close()
    parts = []
    monkeypatch.setattr(multihost, "count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(multihost, "index", lambda process=process: process)
        parts.append(experiment_run.train_batches(again)[1])
    monkeypatch.undo()
    equal_bits({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, whole[1])
    assert all(differ(a, b) for a, b in itertools.pairwise(whole))
    c.seed = 1
    other, source = opened(c)
    assert differ(other.train_batches(source)[0], whole[0])


def test_a_steps_draws_are_a_function_of_seed_and_step(folder, meshes):
    """A step takes its number from the state, so that what it drops is that of the step, whatever came before."""
    c = small("points", folder)
    c.seed = 7
    experiment_run = train_setup.build(c, examples=None, mesh=meshes(1, 1))
    batch = experiment_run.put(experiment_run.train_batches(experiment_run.task.data.open("train"))[0])
    step = jax.jit(experiment_run.train_step)
    key = experiment_run.run_key()

    def loss(number, key=key):
        state = dataclasses.replace(fresh_state(experiment_run), step=jnp.int32(number))
        return float(step(state, batch, key)[1]["last_loss"])

    assert loss(3) == loss(3) and len({loss(number) for number in range(6)}) > 3
    c.seed = 8
    other = train_setup.build(c, examples=None, mesh=meshes(1, 1)).run_key()
    assert [loss(number) for number in range(6)] != [loss(number, other) for number in range(6)]


def records(workdir):
    result = metrics_log.read_records(workdir / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in metrics_log.TIMING} for record in result]


def last_state(workdir):
    """Return the newest checkpoint, on one device."""
    c = artifacts.load_config(workdir)
    like = train_setup.build(c, examples=10_000, mesh=sharding.make_mesh(devices=jax.devices()[:1])).state
    with Checkpoints(workdir / "checkpoints") as saved:
        return saved.restore(like)[0]


def same_run(workdir, other, steps):
    """Check that two runs have the same last state and the same records."""
    state = last_state(workdir)
    assert int(state.step) == steps
    equal_bits(state, last_state(other))
    assert records(workdir) == records(other)


def test_a_run_that_was_cut_off_twice_ends_as_one_that_was_not(folder, tmp_path, monkeypatch, one_device, keeping):
    """Between checkpoints, so that steps are done again; records, evaluations and averages are those of the whole."""
    c = small("points", folder)
    assert train.train(c, tmp_path / "whole") == 0
    for steps in (3, 6):  # nothing is saved yet; then step 4 is
        with power_cut(monkeypatch, steps):
            train.train(c, tmp_path / "cut")
    assert max(record["step"] for record in records(tmp_path / "cut")) == 6
    assert train.train(c, tmp_path / "cut") == 0
    same_run(tmp_path / "cut", tmp_path / "whole", c.total_steps)
    assert len({record["loss"] for record in records(tmp_path / "whole")}) > 4


RANDOM = {  # with everything random switched on: mixing, erasing, drop path, averaging, accumulation
    **{"total_epochs": 0.0, "total_steps": 40, "batch_size": 32, "accumulate": 2, "log_every": 5},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "model.drop_path": 0.2},
    **{"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.erase": 0.25, "augment.rand_magnitude": 9.0},
    **{"optim.ema": 0.9, "optim.warmup_epochs": 0.01, "eval.every": 10, "checkpoint.every": 8},
    **{"probe.every": 10, "probe.examples": 4},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    status, _, err = run(command("train", workdir, RANDOM))
    assert status == 0, err
    return workdir


def begin(workdir):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command("train", workdir, RANDOM), cwd=ROOT, env=environment(), **pipes)


def wait_for_records(process, workdir, number):
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline and len(records(workdir)) < number:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_is_killed_three_times_goes_on(undisturbed, tmp_path):
    """At random moments of training, saving and evaluating."""
    chance = random.Random(20505)
    for _ in range(3):
        begun = len(records(tmp_path))
        process = begin(tmp_path)
        wait_for_records(process, tmp_path, begun + 2)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert 0 < len(records(tmp_path)) < 12
    status, _, err = run(command("train", tmp_path, RANDOM))
    assert status == 0, err
    same_run(tmp_path, undisturbed, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_process_that_is_asked_to_stop_saves_and_goes_on(undisturbed, tmp_path, number, expected):
    process = begin(tmp_path)
    wait_for_records(process, tmp_path, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == expected and f"--workdir={tmp_path}" in out and "Traceback" not in err, err
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").glob("*") if path.name.isdecimal())
    assert saved < 40
    status, out, err = run(command("train", tmp_path, RANDOM))
    assert status == 0 and f"step {saved} " in out, err
    same_run(tmp_path, undisturbed, 40)
