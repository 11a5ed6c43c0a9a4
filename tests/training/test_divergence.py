"""Divergence: steps past learning are skipped and counted, and a run that cannot go on names the step to go on from."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses
from small_runs import fresh_state

from leanformer import config
from leanformer.errors import TrainingError
from leanformer.runtime import mesh as sharding
from leanformer.tasks import losses
from leanformer.train import train
from leanformer.training import metrics_log, train_setup
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.divergence import DivergenceMonitor
from leanformer.training.step import IN_FLIGHT, LARGEST
from tests.training.test_step import batch_of


def test_the_ceiling_is_a_hundred_times_a_guess():
    uniform = jnp.zeros((1, 7))
    for loss in ("softmax", "sigmoid"):
        guess = losses.classify(uniform, jax.nn.one_hot(jnp.array([3]), 7), loss)
        np.testing.assert_allclose(losses.divergence_threshold(loss, 7), 100 * float(guess[0]), rtol=1e-5)
    assert losses.divergence_threshold("softmax", 1) > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", np.inf),
        ("optim.lr", 1e39),  # infinite in float32
        ("optim.warmup_lr", np.nan),
        ("optim.final_lr", np.nan),
        ("optim.weight_decay", np.inf),
        ("data.mean", (np.nan,)),
        ("augment.crop_ratio", (0.5, np.inf)),
        ("hang_seconds", np.inf),
        ("optim.eps", 0.0),
        ("optim.eps", 1e-50),  # 0 in float32
        ("optim.b2", 0.99999999),  # 1 in float32
        ("optim.b1", 1.0),
    ],
)
def test_no_key_takes_what_is_not_finite(tiny, key, value):
    tiny.update_from_flattened_dict({key: value})
    with refuses(f"{key}={value}"):
        config.check(tiny)


def test_every_number_of_every_config_may_not_be_nan(tiny):
    def places(tree, prefix=""):
        for name, value in tree.items():
            if hasattr(value, "items"):
                yield from places(value, f"{prefix}{name}.")
            elif isinstance(value, float) or (isinstance(value, tuple) and value and isinstance(value[0], float)):
                yield prefix + name, value

    result = list(places(tiny))
    assert len(result) > 25
    for name, value in result:
        c = tiny.copy_and_resolve_references()
        c.update_from_flattened_dict({name: np.nan if isinstance(value, float) else (np.nan, *value[1:])})
        with refuses(name):
            config.check(c)


@pytest.fixture(scope="module")
def stepped():
    """A compiled step of a tiny model, what it takes, and a batch."""
    c = config.base()
    c.update(batch_size=8, total_epochs=0.0, total_steps=6, dtype="float32", log_every=1)
    c.model.update(image_size=14, patch_size=7, channels=1, num_classes=5, width=12, depth=1)
    c.model.update(num_heads=3, head_dim=8, mlp_dim=20)
    c.data.update(mean=(0.5,), std=(0.5,))
    c.optim.update(warmup_epochs=0.0, ema=0.9, lr=3e37, weight_decay=0.0, clip_norm=0.0)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    run = train_setup.build(c, examples=64, mesh=mesh)
    batch = run.put(batch_of(np.random.default_rng(0), c))
    return run, jax.jit(run.train_step), batch


def test_a_step_past_learning_is_skipped(stepped):
    run, step, batch = stepped
    state = fresh_state(run)
    state.params["head"]["bias"] = jnp.array([0.0, 0.0, 0.0, 0.0, 1e5])
    after, metrics = step(state, batch, run.run_key())
    ceiling = losses.divergence_threshold("softmax", 5)
    assert ceiling < float(metrics["last_loss"]) < np.inf and np.isfinite(float(metrics["last_loss"]))
    assert int(metrics["skipped_in_row"]) == 1 and int(metrics["bad_leaf"]) == -1
    for name in ("params", "moments", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))


def test_an_update_that_overflows_is_seen_in_the_step_that_makes_it(stepped):
    """Loss and gradient are finite and healthy; the rate alone takes the parameters out of bounds."""
    run, step, batch = stepped
    after, metrics = step(fresh_state(run), batch, run.run_key())
    assert float(metrics["last_loss"]) < losses.divergence_threshold("softmax", 5)
    assert int(metrics["skipped_in_row"]) == 1 and int(metrics["skipped"]) == 1
    leaf = jax.tree.leaves(after.params)[int(metrics["bad_leaf"])]
    assert int(metrics["bad_leaf"]) >= 0 and float(jnp.abs(leaf).max()) > LARGEST


def monitored(tiny, folder, limit=3, steps=()):
    """Return a monitor, its checkpoints of `steps`, and the list of records that it writes."""
    tiny.optim.max_skipped = limit
    saved, records = Checkpoints(folder / "checkpoints", 9), []
    for step in steps:
        saved.save(step, {"x": np.full(3, float(step))})
    saved.wait()

    def write(*entry):
        records.append(entry)

    names = ["head.bias", "head.kernel"]
    return DivergenceMonitor(tiny.optim, losses.divergence_threshold("softmax", 5), names, saved, write), saved, records


def metrics(in_row=0, loss=2.0, leaf=-1):
    return {"skipped_in_row": jnp.int32(in_row), "last_loss": jnp.float32(loss), "bad_leaf": jnp.int32(leaf)}


def test_steps_are_looked_at_late_and_all_when_asked(tiny, tmp_path, capfd):
    watched, saved, _ = monitored(tiny, tmp_path)
    with saved:
        for step in range(1, IN_FLIGHT + 1):
            watched.on_step(step, metrics(1, np.nan, 1))
        assert watched.skipped == 0
        watched.settle()
        assert watched.skipped == 1
        assert mentions(capfd.readouterr().err, "step 1", "head.kernel")
        watched.on_step(9, metrics(0))
        watched.settle()
        assert watched.skipped == 0


def test_the_end_names_the_step_to_go_on_from(tiny, tmp_path, capfd):
    """The first bad loss is of step 7: the update of step 6 may have made it, that of step 4 not."""
    watched, saved, records = monitored(tiny, tmp_path, steps=(2, 4, 6))
    with saved:
        for step, in_row in ((6, 0), (7, 1), (8, 2), (9, 3)):
            watched.on_step(step, metrics(in_row, 1e7 if in_row else 2.0))
        with refuses(3, "step 7", "1e+07", "step 4", "optim.lr", 0.003, error=TrainingError):
            watched.settle()
        assert saved.steps == [2, 4]
    assert [path.name for path in (tmp_path / "checkpoints_diverged").iterdir()] == ["6"]
    assert records == [(9, "abort", {"first_bad_step": 7, "leaf": None, "skipped_in_row": 3, "resume_from": 4})]
    assert mentions(capfd.readouterr().err, "step 6", tmp_path / "checkpoints_diverged" / "6")


def test_nothing_left_is_told(tiny, tmp_path):
    watched, saved, _ = monitored(tiny, tmp_path, steps=(6,))
    with saved, refuses("step 6", "loss=nan", error=TrainingError) as caught:
        watched.on_evaluation(6, {"loss": np.nan, "top1": 0.1})
    assert not saved.steps and not re.search(r"from step \d", str(caught.value))


@pytest.mark.parametrize("values", [{"loss": 1e9}, {"loss": 2.0, "ema_loss": np.inf}], ids=str)
def test_an_evaluation_past_learning_ends_the_run(tiny, tmp_path, values):
    watched, saved, records = monitored(tiny, tmp_path, steps=(2, 4))
    with saved:
        watched.on_evaluation(4, {"loss": 3.0, "top1": 0.2, "ema_loss": 2.0})
        with refuses("step 4", f"{list(values)[-1]}={list(values.values())[-1]:.3g}", "step 2", error=TrainingError):
            watched.on_evaluation(4, values)
    assert records[0][2]["first_bad_step"] == 5


@pytest.fixture
def short(plain, one_device):
    plain.update(batch_size=8, total_steps=12)
    plain.optim.update(weight_decay=0.3, ema=0.0)
    plain.eval.update(every=0, batch_size=1024)
    plain.checkpoint.update(every=1, keep=2)
    plain.probe.every = 0
    return plain


@pytest.mark.slow
def test_a_run_that_diverged_goes_on_at_a_lower_rate_to_the_same_end(short, tmp_path, capfd, keeping):
    whole, other = tmp_path / "whole", tmp_path / "other"
    short.checkpoint.keep = 12
    assert train(short, whole) == 0
    (other / "checkpoints").mkdir(parents=True)
    for step in ("4", "5"):  # what a run that was killed after step 5 leaves
        shutil.copytree(whole / "checkpoints" / step, other / "checkpoints" / step)
    short.checkpoint.keep, short.optim.max_skipped = 2, 3
    short.optim.lr = 1e6
    with refuses("step 5", "optim.lr", error=TrainingError):
        train(short, other)
    short.optim.lr = 0.003
    assert train(short, other) == 0
    assert mentions(capfd.readouterr().out, "step 5")
    ends = [json.loads((folder / "summary.json").read_text())["final"] for folder in (whole, other)]
    assert ends[0] == ends[1] and ends[0]["loss"] < losses.divergence_threshold("softmax", 5)


@pytest.mark.slow
def test_a_short_run_without_one_good_step_is_no_success(short, tmp_path, monkeypatch):
    short.total_steps = 3
    monkeypatch.setattr(losses, "divergence_threshold", lambda *_: 0.0)
    with refuses(3, error=TrainingError):
        train(short, tmp_path)
    assert not Checkpoints(tmp_path / "checkpoints").steps and not (tmp_path / "summary.json").exists()
    assert metrics_log.read_records(tmp_path / "metrics.jsonl")[-1]["kind"] == "abort"
