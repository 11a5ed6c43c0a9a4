"""The step: accumulation, skipping, averaging, clipping, sharding; and exact evaluation."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer import config
from leanformer.runtime import mesh as sharding
from leanformer.training import experiment
from leanformer.training import step as steps


def batch_of(rng, c, size=None):
    shape = (size or c.batch_size, c.model.image_size, c.model.image_size, c.model.channels)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, c.model.num_classes, shape[0]).astype(np.int32)}


@functools.cache
def built(text, mesh):
    """The run of a config, as text, on a mesh, and its jitted step: traced once for all tests here."""
    c = config.ConfigDict(json.loads(text))
    run = experiment.build(c, examples=64, mesh=mesh)
    return run, jax.jit(run.train_step)


def run_steps(c, mesh, batches, poison=()):
    """Losses and the last state of one step a batch; weights become NaN before the steps in `poison`."""
    run, step = built(c.to_json(), mesh)
    state, key = run.initial_state(), run.run_key()
    seen = []
    for i, batch in enumerate(batches):
        before = state
        if i in poison:
            state = jax.tree.map(lambda x: x, state)
            state.params["head"]["kernel"] = state.params["head"]["kernel"].at[0, 0].set(jnp.nan)
        state, metrics = step(state, sharding.put_batch(mesh, batch), key)
        if i in poison:  # a skipped step keeps the state it was given; hand back the one before the poison
            state = type(state)(**(vars(state) | {"params": before.params}))
        seen.append(jax.device_get(metrics))
    return seen, state


@pytest.fixture
def batches(rng, tiny):
    return [batch_of(rng, tiny) for _ in range(3)]


def close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), a, b)


def test_accumulation_is_the_big_batch(tiny, meshes, batches):
    """Mixing, erasing, drop path and averaging on: the loss and the gradients are those of one big batch."""
    mesh = meshes(1, 1)

    def gradient(accumulate):
        tiny.accumulate = accumulate
        run = experiment.build(tiny, examples=64, mesh=mesh)
        state = run.initial_state()
        state, metrics = jax.jit(run.train_step)(state, sharding.put_batch(mesh, batches[0]), run.run_key())
        adam = state.moments[0]  # after one step mu is (1 - b1) times the clipped gradient
        return metrics, adam.mu

    (one, big), (four, small) = gradient(1), gradient(4)
    np.testing.assert_allclose(one["loss"], four["loss"], rtol=1e-6)
    np.testing.assert_allclose(one["grad_norm"], four["grad_norm"], rtol=1e-5)
    assert float(one["grad_norm"]) > 0.01
    close(big, small, atol=1e-7)


def test_eight_devices_are_one(tiny, meshes, batches, monkeypatch):
    """With accumulation; without it, and of more steps, in test_mesh."""
    monkeypatch.setattr(sharding, "SMALL", 1)  # the model is tiny: split every leaf that can be
    tiny.accumulate = 2
    one, last = run_steps(tiny, meshes(1, 1), batches)
    many, spread = run_steps(tiny, meshes(2, 4), batches)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=2e-6)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=2e-5)
    # Adam divides by the root of the second moment, so a gradient of rounding size moves a weight by up to lr.
    close(jax.device_get(last.moments), jax.device_get(spread.moments), atol=1e-5)


def test_fsdp_splits_parameters_and_moments(plain, meshes, monkeypatch):
    monkeypatch.setattr(sharding, "SMALL", 1)
    plain.model.update(width=16, mlp_dim=24, num_heads=8)
    run = experiment.build(plain, examples=64, mesh=meshes(1, 8))
    state = run.initial_state()
    kernel = state.params["blocks"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.shape == (3, 16, 24) and kernel.addressable_shards[0].data.shape == (3, 16, 3)
    moment = state.moments[0].mu["blocks"]["layers"]["mlp"]["up"]["kernel"]
    assert moment.sharding == kernel.sharding
    batch = sharding.put_batch(run.mesh, batch_of(np.random.default_rng(0), plain))
    assert batch["image"].addressable_shards[0].data.shape[0] == plain.batch_size // 8
    after, _ = run.compile_train_step()(state, batch, run.run_key())
    assert after.params["blocks"]["layers"]["mlp"]["up"]["kernel"].sharding == moment.sharding


def test_a_non_finite_step_is_skipped_counted_and_named(plain, meshes, batches):
    mesh = meshes(1, 1)
    run, step = built(plain.to_json(), mesh)
    state = run.initial_state()
    bad = type(state)(**vars(state))
    bad.params["head"]["kernel"] = bad.params["head"]["kernel"].at[0, 0].set(jnp.nan)
    after, metrics = step(bad, sharding.put_batch(mesh, batches[0]), run.run_key())
    assert int(after.step) == 1 and int(metrics["skipped"]) == 1 and int(metrics["skipped_in_row"]) == 1
    assert int(metrics["bad_leaf"]) >= 0
    jax.tree.map(np.testing.assert_array_equal, after.moments, bad.moments)
    jax.tree.map(np.testing.assert_array_equal, after.params, bad.params)
    jax.tree.map(np.testing.assert_array_equal, after.ema, bad.ema)


def test_the_count_in_a_row_starts_again_after_a_good_step(plain, meshes, batches):
    seen, _ = run_steps(plain, meshes(1, 1), batches, poison=(0, 1))
    assert [int(m["skipped_in_row"]) for m in seen] == [1, 2, 0]
    assert [int(m["skipped"]) for m in seen] == [1, 2, 2]
    assert np.isnan(seen[1]["loss"]) and np.isfinite(seen[2]["loss"])


def test_window_means_are_over_the_steps_since_the_last_record(plain, meshes, batches):
    plain.log_every = 1
    single, _ = run_steps(plain, meshes(1, 1), batches)
    plain.log_every = 2
    window, _ = run_steps(plain, meshes(1, 1), batches)
    np.testing.assert_allclose(window[1]["loss"], (single[0]["loss"] + single[1]["loss"]) / 2, rtol=1e-6)
    np.testing.assert_allclose(window[2]["loss"], single[2]["loss"], rtol=1e-6)


def test_averaged_weights_warm_up(plain, meshes, batches):
    mesh = meshes(1, 1)
    run, step = built(plain.to_json(), mesh)
    state = run.initial_state()
    expected = np.asarray(state.params["head"]["bias"], np.float64)
    for t, batch in enumerate(batches):
        state, _ = step(state, sharding.put_batch(mesh, batch), run.run_key())
        decay = min(0.9, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * np.asarray(state.params["head"]["bias"])
    np.testing.assert_allclose(state.ema[0]["head"]["bias"], expected, atol=1e-6)


def test_clipping_bounds_the_gradient(plain, meshes, batches):
    plain.optim.clip_norm = 1e-3
    _, state = run_steps(plain, meshes(1, 1), batches[:1])
    mu = jax.tree.leaves(state.moments[0].mu)
    norm = np.sqrt(sum(float(jnp.sum(m**2)) for m in mu)) / (1 - plain.optim.b1)
    np.testing.assert_allclose(norm, 1e-3, rtol=1e-4)


def test_bfloat16_keeps_parameters_and_loss_in_float32(plain, meshes, batches):
    exact, _ = run_steps(plain, meshes(1, 1), batches[:1])
    plain.dtype = "bfloat16"
    rough, state = run_steps(plain, meshes(1, 1), batches[:1])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(rough[0]["loss"], exact[0]["loss"], rtol=2e-2)
    assert rough[0]["loss"] != exact[0]["loss"]


def test_evaluation_is_exact_whatever_the_batch_size(tiny, meshes, rng):
    tiny.model.num_classes = 7
    run = experiment.build(tiny, examples=64, mesh=meshes(1, 1))
    weights = run.initial_state().weights
    whole = batch_of(rng, tiny, 13)
    eval_step = jax.jit(run.eval_step)

    def padded(size):
        for start in range(0, 13, size):
            part = {k: v[start : start + size] for k, v in whole.items()}
            missing = size - len(part["label"])
            part = {k: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for k, v in part.items()}
            yield part | {"mask": np.arange(size) < size - missing}

    found = [
        steps.evaluate(eval_step, run.task.metrics, {"": weights, "ema_": weights}, padded(size)) for size in (13, 4, 8)
    ]
    for values in found:
        assert values["examples"] == 13 and values["top1"] == values["ema_top1"] == found[0]["top1"]
        np.testing.assert_allclose(values["loss"], found[0]["loss"], rtol=1e-6)
    assert 0 <= found[0]["top1"] < found[0]["top5"] <= 1


def test_a_gpu_takes_the_matrices_of_a_probe_together(tiny, meshes):
    """No factorisation that cuSOLVER has for one matrix at a time, which a probe of a real model would wait for."""
    tiny.probe.examples = 8
    run = experiment.build(tiny, examples=64, mesh=meshes(1, 1))
    image = jax.ShapeDtypeStruct((8, 14, 14, 1), np.uint8)
    traced = jax.jit(run.probe_step).trace(run.like.weights, {"image": image})
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "cusolver_syevd_ffi" in text
    for one_by_one in ("gesvd", "geqrf"):
        assert one_by_one not in text
