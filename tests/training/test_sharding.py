"""A training step on eight devices is that on one, for every task; and where each optimizer's moments are held.

The partitioner decides how a step is spread, from places that are given as specs; it keeps what a program computes.
What can go wrong is ours: how batches, draws and sums are shared out, in each task; and the specs, see also
tests/runtime/test_mesh.py.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rounding import LEAF, LOSS, by_name, check_gradients, distance, norm
from small_runs import MAKERS, fresh_state, small

from leanformer import data, tasks
from leanformer.runtime import mesh as sharding
from leanformer.training import optimizers, train_setup


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def built(folder, meshes, monkeypatch, unchecked):
    """Builds a run with a task's name on a mesh; every leaf is split that can be."""
    monkeypatch.setattr(sharding, "SMALL", 1)

    def make(task_name, *shape, **changes):
        c = small(task_name, folder)
        c.optim.update(changes)
        task = tasks.build(c)
        source = task.data.open(c.data.train_split)
        run = train_setup.build(c, examples=data.size(source), mesh=meshes(*shape), task=task)
        return run, run.train_batches(source)[0]

    return make


def outcome(run, step, host):
    """Return the loss, the gradient, the averages of batch normalisation, and the state after one step.

    After a first step of AdamW its first moment is the clipped gradient, times one number for all leaves.
    """
    state, metrics = step(fresh_state(run), run.put(host), run.run_key())
    gradient, statistics = jax.device_get((state.moments[0].mu, state.statistics))
    return float(metrics["loss"]), by_name(gradient), by_name(statistics), state


EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name == "xcit")) for name in MAKERS]  # 30 s to compile


@pytest.mark.parametrize("name", EACH)
def test_a_step_on_eight_devices_is_that_on_one(built, name):
    run, host = built(name, 1, 1, 1)
    step = run.compile_train_step()
    loss, gradient, statistics, _ = outcome(run, step, host)
    spread, same = built(name, 2, 2, 2)
    jax.tree.map(np.testing.assert_array_equal, same, host)
    result, other, moved, state = outcome(spread, spread.compile_train_step(), host)

    assert result == pytest.approx(loss, rel=LOSS)
    check_gradients(other, gradient)
    assert bool(statistics) == (name == "xcit")
    assert distance(moved, statistics) <= LEAF * norm(statistics)

    # A real mistake moves it by a hundred times that: one example of eight read twice, in place of another.
    twice = {key: np.concatenate([value[:-1], value[:1]]) for key, value in host.items()}
    _, wrong, _, _ = outcome(run, step, twice)
    assert distance(wrong, gradient) > 100 * LEAF * norm(gradient)

    places = specs(state)
    assert places == specs(spread.state) and {"fsdp", "tensor"} <= {axis for place in places.values() for axis in place}


def specs(tree):
    return {name: leaf.sharding.spec for name, leaf in by_name(tree).items()}


MOMENTS = {"adamw": 2, "lion": 1, "muon": 1, "adafactor": 3, "sgd": 1}  # of a matrix in a stack


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_moments_are_held_where_their_parameters_are(built, name):
    """By shapes alone. Adafactor's means over an axis have it with length one, which is not split."""
    run, _ = built("images", 2, 2, 2, name=name)
    parameters = {key: (leaf.shape, leaf.sharding.spec) for key, leaf in by_name(run.state.params).items()}
    query = "blocks.layers.attention.query.kernel"
    assert parameters[query][1] == P(None, "fsdp", "tensor")
    seen = {}
    for key, leaf in by_name(run.state.moments).items():
        of = next((other for other in parameters if key.endswith(f".{other}")), None)
        if of and leaf.shape == parameters[of][0]:
            assert leaf.sharding.spec == parameters[of][1], key
        elif name != "adafactor":
            assert leaf.sharding.is_fully_replicated and leaf.size < 20, key
        if of == query:
            seen[key.removesuffix(f".{query}").rpartition(".")[2]] = leaf.sharding.spec
    assert len(seen) == MOMENTS[name]
    if name == "adafactor":
        assert seen["row"] == P(None, "fsdp") and seen["column"] == P(None, None, "tensor", "fsdp")
