"""Training step: accumulation, skipping, EMA, clipping; exact evaluation. On several devices: test_sharding.py."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rounding import LOSS_TOLERANCE, check_gradients, difference_norm, global_norm
from small_runs import make_image_batch, make_initial_state

from leanformer import config
from leanformer.layers.convolution import BatchNorm
from leanformer.runtime import mesh as sharding
from leanformer.runtime.mesh import flatten_names
from leanformer.training import step as steps
from leanformer.training import train_setup
from leanformer.training.step import init_state


@functools.cache
def build_step(text, mesh):
    """Return the run of a config, given as JSON, and its jitted step, traced once for all tests of this file."""
    c = config.ConfigDict(json.loads(text))
    run = train_setup.set_up_training(c, examples=64, mesh=mesh)
    return run, jax.jit(run.train_step)


def run_steps(c, mesh, batches, poison=()):
    """Return the metrics and the last state of one step per batch; a weight is NaN before the steps in `poison`."""
    run, step = build_step(c.to_json(), mesh)
    state, key = make_initial_state(run), run.run_key()
    history = []
    for i, batch in enumerate(batches):
        before = state
        if i in poison:
            state = jax.tree.map(lambda x: x, state)
            state.params["head"]["kernel"] = state.params["head"]["kernel"].at[0, 0].set(jnp.nan)
        state, metrics = step(state, sharding.put_batch(mesh, batch), key)
        if i in poison:  # a skipped step returns its input weights; restore those without the NaN
            state = type(state)(**(vars(state) | {"params": before.params}))
        history.append(jax.device_get(metrics))
    return history, state


@pytest.fixture
def batches(rng, tiny):
    return [make_image_batch(rng, tiny) for _ in range(3)]


@pytest.mark.slow  # two large programs; tests/tasks/test_tasks.py accumulates a small one
def test_accumulation_equals_one_big_batch(tiny, meshes, batches, no_shape_checks):
    """One big batch has the same loss and gradients, with mixing, erasing, drop path and EMA on."""

    def gradient(accumulate):
        tiny.accumulate = accumulate
        (metrics,), state = run_steps(tiny, meshes(1, 1), batches[:1])
        return metrics, flatten_names(state.moments[0].mu)  # after one step (1 - b1) times the clipped gradient

    (one, big), (four, small) = gradient(1), gradient(4)
    assert float(four["loss"]) == pytest.approx(float(one["loss"]), rel=LOSS_TOLERANCE)
    assert float(four["grad_norm"]) == pytest.approx(float(one["grad_norm"]), rel=10 * LOSS_TOLERANCE)
    check_gradients(small, big)
    # A wrong sum, mean or order of draws exceeds rounding by far, as other examples in half of the batch do.
    half = {name: np.concatenate([batches[0][name][:8], batches[1][name][8:]]) for name in batches[0]}
    _, state = run_steps(tiny, meshes(1, 1), [half])
    assert difference_norm(flatten_names(state.moments[0].mu), big) > 0.1 * global_norm(big)


class NormAndScale(nnx.Module):
    """Batch normalisation followed by one factor per channel."""

    def __init__(self):
        self.norm, self.scale = BatchNorm(3), nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return self.norm(x, train=True) * self.scale[...][None]


def make_sgd_step(clip_norm):
    """Return a gradient descent step (learning rate 0.1) on a mean of weighted squares, and its initial state."""
    task = types.SimpleNamespace(
        prepare_train_batch=lambda batch, key, shared_key: (batch | {"key": jax.random.split(key, 8)}, None),
        loss_denominator=lambda batch: 8,
        loss=lambda model, part, shared, key: jnp.sum(jnp.square(model(part["x"])) * part["weight"][:, None]),
    )
    graphdef, params, statistics = nnx.split(NormAndScale(), nnx.Param, nnx.BatchStat)
    optimizer = optax.with_extra_args_support(optax.trace(0.9))
    state = init_state((nnx.as_pure(params), nnx.as_pure(statistics)), optimizer, ema=True)
    gradient = steps.make_gradient(graphdef, task, freeze=lambda params: params, accumulate=1)
    options = {"divergence_loss": 10.0, "clip_norm": clip_norm, "ema": 0.9, "log_every": 1}
    step = steps.make_train_step(gradient, optimizer, lambda step: (jnp.float32(0.1), None), **options)
    return jax.jit(step), state


def test_skipped_step_leaves_the_state_unchanged(rng, no_shape_checks):
    """Only the loss exceeds the threshold: activations, and therefore their statistics, are finite."""
    step, state = make_sgd_step(clip_norm=1.0)
    x = rng.normal(3.0, 2.0, (8, 3))

    def run_step(weight):
        result, metrics = step(state, {"x": jnp.float32(x), "weight": jnp.full(8, weight)}, jax.random.key(0))
        return result, int(metrics["skipped"])

    trained, skipped = run_step(1.0)
    assert skipped == 0
    np.testing.assert_allclose(trained.statistics["norm"]["mean"], 0.1 * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(trained.statistics["norm"]["var"], 0.9 + 0.1 * x.var(0, ddof=1), rtol=1e-5)
    unchanged, skipped = run_step(100.0)
    assert skipped == 1
    jax.tree.map(lambda a, b: np.testing.assert_(np.any(a != b)), trained.moments, state.moments)
    for name in ("params", "moments", "statistics", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(unchanged, name), getattr(state, name))


def test_gradients_are_clipped_only_above_the_limit(rng, no_shape_checks):
    batch = {"x": jnp.asarray(rng.normal(size=(8, 3)), jnp.float32), "weight": jnp.ones(8)}
    updates = {}
    for clip_norm in (0.0, 0.5, 1000.0):
        step, state = make_sgd_step(clip_norm)
        after, metrics = step(state, batch, jax.random.key(0))
        updates[clip_norm] = {
            name: value - flatten_names(after.params)[name] for name, value in flatten_names(state.params).items()
        }
    unclipped = 0.1 * float(metrics["grad_norm"])
    # For normalised x, the gradients of the factors and of BatchNorm's scale are 2 mean(x²) = 2 per channel.
    assert unclipped == pytest.approx(0.1 * 2 * np.sqrt(6), rel=1e-3)
    assert global_norm(updates[0.0]) == pytest.approx(unclipped, rel=1e-5) == global_norm(updates[1000.0])
    assert global_norm(updates[0.5]) == pytest.approx(0.05, rel=1e-5)
    for name, value in updates[0.0].items():
        np.testing.assert_allclose(updates[0.5][name], value * 0.05 / unclipped, atol=1e-6)


def test_skipped_in_row_resets_after_a_good_step(plain, meshes, batches):
    history, _ = run_steps(plain, meshes(1, 1), batches, poison=(0, 1))
    assert [int(m["skipped_in_row"]) for m in history] == [1, 2, 0]
    assert [int(m["skipped"]) for m in history] == [1, 2, 2]
    assert np.isnan(history[1]["loss"]) and np.isfinite(history[2]["loss"])


def test_window_means_cover_steps_since_the_last_record(plain, meshes, batches):
    """The window is two steps: a record follows the second, and the third starts a new window."""
    assert plain.log_every == 2
    history, _ = run_steps(plain, meshes(1, 1), batches)
    losses = [float(m["last_loss"]) for m in history]
    assert len({*losses}) == 3
    np.testing.assert_allclose(
        [m["loss"] for m in history], [losses[0], (losses[0] + losses[1]) / 2, losses[2]], rtol=1e-6
    )


def test_ema_decay_warms_up(plain, meshes, batches):
    mesh = meshes(1, 1)
    run, step = build_step(plain.to_json(), mesh)
    state = make_initial_state(run)
    expected = np.asarray(state.params["head"]["bias"], np.float64)
    for t, batch in enumerate(batches):
        state, _ = step(state, sharding.put_batch(mesh, batch), run.run_key())
        decay = min(0.9, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * np.asarray(state.params["head"]["bias"])
    np.testing.assert_allclose(state.ema[0]["head"]["bias"], expected, atol=1e-6)
    assert np.abs(state.ema[0]["head"]["bias"] - state.params["head"]["bias"]).max() > 1e-4


def test_clipping_and_float32_weights_with_bfloat16(plain, meshes, batches):
    (exact,), _ = run_steps(plain, meshes(1, 1), batches[:1])
    plain.dtype, plain.optim.clip_norm = "bfloat16", 1e-3
    (rough,), state = run_steps(plain, meshes(1, 1), batches[:1])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    # bfloat16 rounds by 2^-9 = 0.002: about ten such errors, averaged over 16 examples.
    np.testing.assert_allclose(rough["loss"], exact["loss"], rtol=2e-2)
    assert rough["loss"] != exact["loss"]
    clipped = global_norm(flatten_names(state.moments[0].mu)) / (1 - plain.optim.b1)
    np.testing.assert_allclose(clipped, 1e-3, rtol=1e-4)
    assert float(rough["grad_norm"]) > 0.01  # the norm before clipping


def test_evaluation_is_independent_of_batch_size(tiny, meshes, rng):
    tiny.model.num_classes = 7
    run = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
    weights = make_initial_state(run).weights
    whole = make_image_batch(rng, tiny, 13)
    eval_step = jax.jit(run.model.eval_step(run.task.objective))

    def pad_batches(size):
        for start in range(0, 13, size):
            part = {k: v[start : start + size] for k, v in whole.items()}
            missing = size - len(part["label"])
            part = {k: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for k, v in part.items()}
            yield part | {"mask": np.arange(size) < size - missing}

    result = [
        steps.evaluate(eval_step, run.task.objective.metrics, {"": weights, "ema_": weights}, pad_batches(size))
        for size in (13, 5)
    ]
    for values in result:
        assert values["examples"] == 13 and values["top1"] == values["ema_top1"] == result[0]["top1"]
        # A counted padding example would change the loss by 1/13.
        np.testing.assert_allclose(values["loss"], result[0]["loss"], rtol=LOSS_TOLERANCE)
    assert 0 <= result[0]["top1"] < result[0]["top5"] <= 1


def test_probe_of_a_bfloat16_run_is_in_float32(tiny, meshes, rng):
    """In bfloat16 all condition numbers above some hundreds would be lower bounds."""
    found = {}
    for tiny.dtype in ("float32", "bfloat16"):
        run = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
        batch = make_image_batch(np.random.default_rng(0), tiny, 4)
        weights, probe = make_initial_state(run).weights, run.model.probe_step(run.task.objective, ["tokens"])
        found[tiny.dtype] = jax.jit(probe)(weights, batch)["tokens"].condition_number
    np.testing.assert_array_equal(found["float32"], found["bfloat16"])
    rough = jax.jit(steps.make_probe_step(run.model.graphdef, run.task.objective, ["tokens"]))(weights, batch)["tokens"]
    assert np.abs(rough.condition_number / found["float32"] - 1).max() > 1e-3


def test_probe_uses_batched_factorisations_on_gpus(tiny, meshes):
    """No cuSOLVER factorisation of one matrix at a time is used: it would dominate the probe of a real model."""
    tiny.probe.examples = 8
    run = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
    image = jax.ShapeDtypeStruct((8, 14, 14, 1), np.uint8)
    traced = jax.jit(run.model.probe_step(run.task.objective, run.config.probe.measures)).trace(
        run.state.weights, {"image": image}
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "cusolver_syevd_ffi" in text
    for unbatched in ("gesvd", "geqrf"):
        assert unbatched not in text
