"""Resume after a kill: a resumed run equals an uninterrupted one bit for bit.

This follows from three properties, which are tested separately. A checkpoint restores a state bit for bit, for every
task and every optimizer. Batches are a function of the seed and the step. So are the random numbers of a step. Whole
runs, interrupted and killed, show that no other state is carried from step to step.
"""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    CONFIG_MAKERS,
    assert_equal_bits,
    assert_same_run,
    make_initial_state,
    make_small_config,
    read_records,
)

from leanformer import tasks, train
from leanformer.runtime import mesh as sharding
from leanformer.runtime import multihost
from leanformer.runtime.timing import Timer
from leanformer.tasks import Score
from leanformer.training import optimizers, train_setup
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def draw_state(template, seed):
    """Return a state like `template` whose leaves are random bits of finite numbers, including subnormal ones."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        values = rng.integers(0, 256, leaf.size * leaf.dtype.itemsize, np.uint8).view(leaf.dtype)
        finite = np.where(np.isfinite(values), values, np.ones_like(values))
        return jax.device_put(finite.reshape(leaf.shape), leaf.sharding)

    return jax.tree.map(draw, template)


FAST = ("images", "unequal")  # the others have leaves of the same kinds
STATES = [
    *(pytest.param(task, "adamw", marks=[pytest.mark.slow] * (task not in FAST)) for task in CONFIG_MAKERS),
    *(pytest.param("points", name, marks=pytest.mark.slow) for name in optimizers.OPTIMIZERS if name != "adamw"),
]


@pytest.mark.parametrize(("task", "optimizer"), STATES)
def test_state_is_restored_bit_for_bit_on_another_mesh(task, optimizer, folder, tmp_path, meshes, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_FSDP_ELEMENTS", 1)
    c = make_small_config(task, folder)
    c.optim.name = optimizer
    if optimizer != "adamw":
        c.optim.b1_peak = None
    source, target = (train_setup.set_up_training(c, examples=64, mesh=meshes(*shape)) for shape in ((1, 4), (2, 2, 2)))
    state = draw_state(source.state, 1)
    with Checkpoints(tmp_path, score=Score("top1")) as checkpoints:
        checkpoints.save(3, state, seconds={"steps": 3.0})
    with Checkpoints(tmp_path) as checkpoints:
        result, seconds, _ = checkpoints.restore(target.state)
    assert_equal_bits(result, state)
    assert seconds == {"steps": 3.0}
    assert [x.sharding for x in jax.tree.leaves(result)] == [x.sharding for x in jax.tree.leaves(target.state)]


def open_run(c):
    task = tasks.build_task(c)
    source = task.data.open(c.data.train_split)
    return train_setup.set_up_training(c, examples=64, mesh=None, task=task), source


def differ(a, b):
    return any(not np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("task", [name for name in CONFIG_MAKERS if name not in ("xcit", "unequal")])
def test_batches_are_a_function_of_seed_and_step(task, folder, monkeypatch):
    """Batches are equal in any order, from any first step, and for any number of processes."""
    c = make_small_config(task, folder)
    experiment_run, source = open_run(c)
    batches = experiment_run.train_batches(source)
    whole = [batches[step] for step in range(4)]
    _, reopened = open_run(c)
    for step in (2, 0, 3):
        assert_equal_bits(experiment_run.train_batches(reopened)[step], whole[step])
    stream = experiment_run.batches(reopened, 2)
    assert_equal_bits([*itertools.islice(stream, 2)], whole[2:])
    stream.close()
    parts = []
    monkeypatch.setattr(multihost, "count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(multihost, "index", lambda process=process: process)
        parts.append(experiment_run.train_batches(reopened)[1])
    monkeypatch.undo()
    assert_equal_bits({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, whole[1])
    assert all(differ(a, b) for a, b in itertools.pairwise(whole))
    c.seed = 1
    other, source = open_run(c)
    assert differ(other.train_batches(source)[0], whole[0])


def test_step_randomness_is_a_function_of_seed_and_step(folder, meshes):
    """A step reads its number from the state, so its drop path does not depend on earlier steps."""
    c = make_small_config("points", folder)
    c.seed = 7
    experiment_run = train_setup.set_up_training(c, examples=None, mesh=meshes(1, 1))
    batch = experiment_run.put(experiment_run.train_batches(experiment_run.task.data.open("train"))[0])
    step = jax.jit(experiment_run.train_step)
    key = experiment_run.run_key()

    def loss(number, key=key):
        state = dataclasses.replace(make_initial_state(experiment_run), step=jnp.int32(number))
        return float(step(state, batch, key)[1]["last_loss"])

    assert loss(3) == loss(3) and len({loss(number) for number in range(6)}) > 3
    c.seed = 8
    other = train_setup.set_up_training(c, examples=None, mesh=meshes(1, 1)).run_key()
    assert [loss(number) for number in range(6)] != [loss(number, other) for number in range(6)]


@contextlib.contextmanager
def simulate_power_cut(monkeypatch, steps):
    """Abort training inside the block, after `steps` steps of this process and before the next."""
    begin_step, remaining = Timer.begin_step, iter(range(steps))

    def cut(timer, step):
        if next(remaining, None) is None:
            raise RuntimeError("power cut")
        begin_step(timer, step)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Timer, "begin_step", cut)
        yield


@pytest.mark.parametrize("task", ["points", pytest.param("unequal", marks=pytest.mark.slow)])
def test_run_interrupted_twice_equals_uninterrupted_run(task, folder, tmp_path, monkeypatch, one_device):
    """Interrupt a run between checkpoints, so that steps are repeated; records, evaluations and EMA must be equal."""
    c = make_small_config(task, folder)
    assert train.train(c, tmp_path / "whole") == 0
    for steps in (3, 6):  # before the first checkpoint, then after the checkpoint of step 4
        with simulate_power_cut(monkeypatch, steps):
            train.train(c, tmp_path / "cut")
    assert max(record["step"] for record in read_records(tmp_path / "cut")) == 6
    assert train.train(c, tmp_path / "cut") == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole", c.total_steps)
    assert len({record["loss"] for record in read_records(tmp_path / "whole")}) > 4
