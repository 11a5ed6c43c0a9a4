"""Sharding: a training step on eight devices equals that on one, for every task; shardings of optimizer moments.

The partitioner distributes a step according to given specs, and preserves what the program computes. Errors can only
be in this project's part: how batches, random numbers and sums are split in each task, and the specs, for which see
also tests/runtime/test_mesh.py.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rounding import LEAF_TOLERANCE, LOSS_TOLERANCE, check_gradients, difference_norm, global_norm
from small_runs import CONFIG_MAKERS, lower_eval_step, make_initial_state, make_small_config

from leanformer import data, tasks
from leanformer.runtime import mesh as sharding
from leanformer.runtime.mesh import flatten_names
from leanformer.training import optimizers, train_setup


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def build_run(folder, meshes, monkeypatch, no_shape_checks):
    """Function that builds a run of a task on a mesh, with every leaf split that can be split."""
    monkeypatch.setattr(sharding, "MIN_FSDP_ELEMENTS", 1)

    def make(task_name, *shape, **changes):
        c = make_small_config(task_name, folder)
        c.optim.update(changes)
        task = tasks.build_task(c)
        source = task.data.open(c.data.train_split)
        run = train_setup.set_up_training(c, examples=data.size(source), mesh=meshes(*shape), task=task)
        return run, run.train_batches(source)[0]

    return make


def run_step(run, step, batch):
    """Return the loss, the gradient, the statistics of batch normalisation, and the state after one step.

    After the first step of AdamW its first moment is the clipped gradient times one number for all leaves.
    """
    state, metrics = step(make_initial_state(run), run.put(batch), run.run_key())
    gradient, statistics = jax.device_get((state.moments[0].mu, state.statistics))
    return float(metrics["loss"]), flatten_names(gradient), flatten_names(statistics), state


TASKS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "images")) for name in CONFIG_MAKERS]  # 15 to 40 s each


@pytest.mark.parametrize("name", TASKS)
def test_step_on_eight_devices_equals_step_on_one(build_run, name):
    run, batch = build_run(name, 1, 1, 1)
    step = run.compile_train_step()
    loss, gradient, statistics, _ = run_step(run, step, batch)
    sharded, sharded_batch = build_run(name, 2, 2, 2)
    jax.tree.map(np.testing.assert_array_equal, sharded_batch, batch)
    sharded_loss, sharded_gradient, sharded_statistics, state = run_step(sharded, sharded.compile_train_step(), batch)

    assert sharded_loss == pytest.approx(loss, rel=LOSS_TOLERANCE)
    check_gradients(sharded_gradient, gradient)
    assert bool(statistics) == (name == "xcit")
    assert difference_norm(sharded_statistics, statistics) <= LEAF_TOLERANCE * global_norm(statistics)

    # A real mistake exceeds the tolerance 100 times, for example one of eight examples in place of another.
    wrong_batch = {key: np.concatenate([value[:-1], value[:1]]) for key, value in batch.items()}
    _, wrong_gradient, _, _ = run_step(run, step, wrong_batch)
    assert difference_norm(wrong_gradient, gradient) > 100 * LEAF_TOLERANCE * global_norm(gradient)

    specs = read_specs(state)
    assert specs == read_specs(sharded.state)
    assert {"fsdp", "tensor"} <= {axis for spec in specs.values() for axis in spec}


@pytest.mark.slow
def test_every_process_can_read_all_values_of_an_evaluation(build_run):
    """Values per example are replicated too: sentences have rank correlations, which need all of them."""
    run, _ = build_run("sentences", 2, 2, 2)
    lowered = lower_eval_step(run).compile()
    assert "per_example" in lowered.out_info
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(lowered.output_shardings))


def read_specs(tree):
    return {name: leaf.sharding.spec for name, leaf in flatten_names(tree).items()}


MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}  # number of moments of a matrix in a stack


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_moments_are_sharded_like_their_parameters(build_run, name):
    run, _ = build_run("images", 2, 2, 2, name=name)
    parameters = {key: (leaf.shape, leaf.sharding.spec) for key, leaf in flatten_names(run.state.params).items()}
    query = "blocks.layers.attention.query.kernel"
    assert parameters[query][1] == P(None, "fsdp", "tensor")
    query_specs = {}
    for key, leaf in flatten_names(run.state.moments).items():
        parameter = next((other for other in parameters if key.endswith(f".{other}")), None)
        if parameter and leaf.shape == parameters[parameter][0]:
            assert leaf.sharding.spec == parameters[parameter][1], key
        else:
            assert leaf.sharding.is_fully_replicated and leaf.size < 20, key
        if parameter == query:
            query_specs[key.removesuffix(f".{query}").rpartition(".")[2]] = leaf.sharding.spec
    assert len(query_specs) == MOMENTS[name]
