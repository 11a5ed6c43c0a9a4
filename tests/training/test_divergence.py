"""Divergence: diverged steps are skipped and counted, and an aborted run names the step to resume from."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses
from small_runs import make_image_batch, make_initial_state

from leanformer import config
from leanformer.errors import TrainingError
from leanformer.runtime import mesh as sharding
from leanformer.tasks import Score
from leanformer.tasks.classification import classify, divergence_threshold
from leanformer.train import train
from leanformer.training import step as steps
from leanformer.training import train_setup
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.step import IN_FLIGHT, LARGEST
from leanformer.training.trainer import DivergenceMonitor


def test_threshold_is_100_times_the_loss_of_a_uniform_guess():
    uniform = jnp.zeros((1, 7))
    for loss in ("softmax", "sigmoid"):
        guess = classify(uniform, jax.nn.one_hot(jnp.array([3]), 7), loss)
        np.testing.assert_allclose(divergence_threshold(loss, 7), 100 * float(guess[0]), rtol=1e-5)
    assert divergence_threshold("softmax", 1) > 0


@pytest.fixture(scope="module")
def compiled_step():
    """A tiny run, its compiled step, and a batch."""
    c = config.base()
    c.update(batch_size=8, total_epochs=0.0, total_steps=6, dtype="float32", log_every=1)
    c.model.update(image_size=14, patch_size=7, channels=1, num_classes=5, width=12, depth=1)
    c.model.update(num_heads=3, head_dim=8, mlp_dim=20)
    c.data.update(mean=(0.5,), std=(0.5,))
    c.optim.update(warmup_epochs=0.0, ema=0.9, lr=3e37, weight_decay=0.0, clip_norm=0.0)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    run = train_setup.set_up_training(c, examples=64, mesh=mesh)
    batch = run.put(make_image_batch(np.random.default_rng(0), c))
    return run, jax.jit(run.train_step), batch


def test_step_above_the_threshold_is_skipped(compiled_step):
    run, step, batch = compiled_step
    state = make_initial_state(run)
    bias = state.params["head"]["bias"]
    state.params["head"]["bias"] = jax.device_put(np.float32([0, 0, 0, 0, 1e5]), bias.sharding)
    new_state, metrics = step(state, batch, run.run_key())
    threshold = divergence_threshold("softmax", 5)
    assert threshold < float(metrics["last_loss"]) < np.inf and np.isfinite(float(metrics["last_loss"]))
    assert int(metrics["skipped_in_row"]) == 1 and int(metrics["bad_leaf"]) == -1
    for name in ("params", "moments", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(new_state, name), getattr(state, name))


def test_overflowing_update_is_detected_in_the_same_step(compiled_step):
    """Loss and gradient are finite and below the threshold; only the learning rate makes the parameters overflow."""
    run, step, batch = compiled_step
    new_state, metrics = step(make_initial_state(run), batch, run.run_key())
    assert float(metrics["last_loss"]) < divergence_threshold("softmax", 5)
    assert int(metrics["skipped_in_row"]) == 1 and int(metrics["skipped"]) == 1
    leaf = jax.tree.leaves(new_state.params)[int(metrics["bad_leaf"])]
    assert int(metrics["bad_leaf"]) >= 0 and float(jnp.abs(leaf).max()) > LARGEST


def make_monitor(tiny, folder, limit=3, steps=()):
    """Return a monitor, its checkpoints at `steps`, and the list of records that it writes."""
    tiny.optim.max_skipped = limit
    checkpoints, records = Checkpoints(folder / "checkpoints", 9, score=Score("top1")), []
    for step in steps:
        checkpoints.save(step, {"x": np.full(3, float(step))})
    checkpoints.wait()

    def write(*entry):
        records.append(entry)

    names = ["head.bias", "head.kernel"]
    monitor = DivergenceMonitor(tiny.optim, divergence_threshold("softmax", 5), names, checkpoints, write)
    return monitor, checkpoints, records


def make_metrics(in_row=0, loss=2.0, leaf=-1):
    return {"skipped_in_row": jnp.int32(in_row), "last_loss": jnp.float32(loss), "bad_leaf": jnp.int32(leaf)}


def test_steps_are_checked_late_and_all_at_once(tiny, tmp_path, capfd):
    monitor, checkpoints, _ = make_monitor(tiny, tmp_path)
    with checkpoints:
        for step in range(1, IN_FLIGHT + 1):
            monitor.on_step(step, make_metrics(1, np.nan, 1))
        assert monitor.skipped == 0
        monitor.check_pending_steps()
        assert monitor.skipped == 1
        assert mentions(capfd.readouterr().err, "step 1", "head.kernel")
        monitor.on_step(9, make_metrics(0))
        monitor.check_pending_steps()
        assert monitor.skipped == 0


@pytest.mark.parametrize(("leaf", "name"), [(-1, None), (1, "head.kernel")])
def test_abort_names_the_step_to_resume_from(tiny, tmp_path, leaf, name):
    """Step 7 has the first bad loss: the update of step 6 may have caused it, the update of step 4 cannot have."""
    monitor, checkpoints, records = make_monitor(tiny, tmp_path, steps=(2, 4, 6))
    folder = checkpoints.folder
    with checkpoints:
        for step, in_row in ((6, 0), (7, 1), (8, 2), (9, 3)):
            monitor.on_step(step, make_metrics(in_row, 1e7 if in_row else 2.0, leaf))
        with refuses(
            3, "step 7", name or "1e+07", "step 4", f"delete 6 in {folder}", "optim.lr", 0.003, error=TrainingError
        ):
            monitor.check_pending_steps()
        assert checkpoints.steps == [2, 4, 6]  # nothing saved is lost
    assert records == [(9, "abort", {"first_bad_step": 7, "leaf": name, "skipped_in_row": 3})]


@pytest.mark.parametrize("values", [{"loss": 1e9}, {"loss": 2.0, "ema_loss": np.inf}], ids=str)
def test_diverged_evaluation_aborts_the_run(tiny, tmp_path, values):
    monitor, checkpoints, records = make_monitor(tiny, tmp_path, steps=(2, 4))
    with checkpoints:
        monitor.on_evaluation(4, {"loss": 3.0, "top1": 0.2, "ema_loss": 2.0})
        with refuses("step 4", f"{list(values)[-1]}={list(values.values())[-1]:.3g}", "step 2", error=TrainingError):
            monitor.on_evaluation(4, values)
    assert records[0][2]["first_bad_step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(("first_bad", "ends"), [(3, True), (1, False)], ids=["last step", "every step"])
def test_run_of_few_steps_ends_unless_all_are_skipped(plain, one_device, tmp_path, monkeypatch, capfd, first_bad, ends):
    """Resuming repeats a step bit for bit, so a run that one skipped step ended could never be finished."""
    plain.update(batch_size=8, total_steps=3, log_every=2)
    plain.eval.update(every=0, batch_size=1024)
    plain.checkpoint.every, plain.probe.every = 1, 0
    original, run_key = steps.make_gradient, jax.random.split(jax.random.key(plain.seed))[1]
    bad = jnp.stack([jax.random.key_data(jax.random.fold_in(run_key, step - 1)) for step in range(first_bad, 4)])

    def make_gradient(*args, **options):
        gradient = original(*args, **options)

        def with_nan(weights, batch, key):
            loss, gradients, statistics = gradient(weights, batch, key)
            is_bad = (jax.random.key_data(key)[None] == bad).all(-1).any()
            return jnp.where(is_bad, jnp.nan, loss), gradients, statistics

        return with_nan

    monkeypatch.setattr(steps, "make_gradient", make_gradient)
    if ends:
        assert train(plain, tmp_path) == 0 and mentions(capfd.readouterr().err, "step 3", "skipped")
        assert json.loads((tmp_path / "summary.json").read_text())["final"]["loss"] < np.inf
    else:
        with refuses(3, "step 1", error=TrainingError):
            train(plain, tmp_path)
