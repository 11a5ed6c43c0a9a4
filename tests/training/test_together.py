"""Runs as one program: the weights, records and folders that each would have alone."""

import json

import jax
import numpy as np
import pytest

from leanformer import config, train
from leanformer import together as command
from leanformer.errors import ConfigError, TrainingError
from leanformer.runtime.mesh import make_mesh
from leanformer.tasks.points import Points
from leanformer.training import experiment, report, together
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.grid import Group, grouped, members


STEPS = 12


def small(seed, lr):
    c = config.points()
    c.update(seed=seed, batch_size=8, total_steps=STEPS, log_every=3)
    c.data.update(points=5, dim=7, examples=8)
    c.model.update(width=7, head_dim=3, num_heads=2, mlp_dim=11)
    c.optim.update(lr=lr, warmup_steps=3, ema=0.9)
    c.eval.update(every=6, batch_size=8)
    with c.unlocked():
        c.eval.more.other = {"split": "other", "every": 4}
    c.checkpoint.update(every=6, keep=9)
    c.loggers = ()
    return c


MEMBERS = {"a": (0, 0.01), "b": (1, 0.003)}  # seed and learning rate


def weights(folder, c, step=STEPS):
    like = experiment.build(c, examples=None, mesh=make_mesh(devices=jax.devices()[:1])).like
    with Checkpoints(folder / "checkpoints") as saved:
        return jax.tree.leaves(saved.restore(like, step)[0].weights)


def records(folder):
    found = report.read_records(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in report.TIMING} for record in found]


def test_they_are_what_each_is_alone(tmp_path, one_device, monkeypatch):
    configs = {name: small(*values) for name, values in MEMBERS.items()}

    asked = iter(range(STEPS))

    def stopped(self):
        """Asked once a step, and before each batch of an evaluation: before that of the second run at step 6."""
        self.status = 75
        return next(asked) == 9

    with monkeypatch.context() as patch:
        patch.setattr(command.StopRequest, "now", stopped)
        assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 75
    done = {name: {record["step"] for record in records(tmp_path / name) if record["kind"] == "eval"} for name in "ab"}
    assert done == {"a": {6}, "b": set()}
    assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 0
    found = {name: weights(tmp_path / name, c) for name, c in configs.items()}
    assert train.train(configs["b"], tmp_path / "alone") == 0
    for one, other in zip(found["b"], weights(tmp_path / "alone", configs["b"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    ours, theirs = records(tmp_path / "b"), records(tmp_path / "alone")
    assert [(r["step"], r["kind"], r.keys()) for r in ours] == [(r["step"], r["kind"], r.keys()) for r in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(*([r.get("lr", 0), r["loss"]] for r in (one, other)), rtol=1e-4)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "b", tmp_path / "alone")]
    assert summaries[0].keys() == summaries[1].keys() and [s["together"] for s in summaries] == [2, 1]
    assert summaries[0]["score"]["score"] == pytest.approx(summaries[1]["score"]["score"], rel=1e-4)
    assert np.abs(np.asarray(found["a"][0]) - found["b"][0]).max() > 1e-4
    with pytest.raises(ConfigError, match="go on from one step before the end, found a 12, b 12"):
        command.train([(tmp_path / name, configs[name]) for name in "ab"])


def test_one_that_goes_astray_is_named_and_the_others_are_kept(tmp_path, monkeypatch, capfd):
    configs = {name: small(*values) for name, values in MEMBERS.items()}
    for c in configs.values():
        c.optim.max_skipped = 2
    make_step = together.make_step

    def overflowing(runs):
        """From step 8 on the second run's loss is not finite."""
        step = make_step(runs)

        def changed(states, batches, keys):
            last = jax.numpy.where(states.step[1] >= 7, jax.numpy.nan, 1.0)
            by = jax.numpy.stack([jax.numpy.ones(()), last])
            return step(states, batches | {"points": batches["points"] * by[:, None, None, None]}, keys)

        return changed

    monkeypatch.setattr(together, "make_step", overflowing)
    with pytest.raises(TrainingError, match="^b: 2 steps .* not finite.* sweep trains it apart .* from step 6"):
        command.train([(tmp_path / name, c) for name, c in configs.items()])
    assert "STEP 8 IS NOT FINITE, SKIPPED" in capfd.readouterr().err
    assert records(tmp_path / "b")[-1]["kind"] == "abort" and records(tmp_path / "a")[-1]["kind"] != "abort"
    assert all(np.isfinite(leaf).all() for name, c in configs.items() for leaf in weights(tmp_path / name, c, 6))


def test_they_are_saved_all_or_none(tmp_path, monkeypatch):
    """The best state of one is not that of all, but only from equal steps can they go on together."""
    scores = {"a": (3.0, 1.0, 2.0), "b": (3.0, 2.0, 1.0)}
    evaluated = Checkpoints.evaluated
    monkeypatch.setattr(
        Checkpoints,
        "evaluated",
        lambda saved, step, _: evaluated(saved, step, scores[saved.folder.parent.name][step // 4 - 1]),
    )
    for c in (configs := {name: small(*values) for name, values in MEMBERS.items()}).values():
        c.eval.every, c.checkpoint.every = 4, 0
        with c.unlocked():
            c.eval.more = {}
    assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 0
    assert [sorted(int(p.name) for p in (tmp_path / n / "checkpoints").iterdir()) for n in "ab"] == [[4, 8, 12]] * 2


def test_short_runs_without_one_good_step_are_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(Points, "ceiling", -1.0)
    configs = {name: small(*values) for name, values in MEMBERS.items()}
    for c in configs.values():
        c.update(total_steps=2, log_every=10)
        c.optim.warmup_steps = 1
        c.eval.every = 0
    with pytest.raises(TrainingError, match="^a: 2 steps in a row were past learning"):
        command.train([(tmp_path / name, c) for name, c in configs.items()])
    assert not (tmp_path / "a" / "summary.json").exists()


def test_which_can_be_trained_together(tmp_path):
    same, other = small(0, 0.01), small(1, 0.02)
    together.check([same, other])
    assert together.shape(same) == together.shape(other)
    other.model.mlp_dim = 4
    assert together.shape(same) != together.shape(other)
    with pytest.raises(ConfigError, match="Runs differ in model.mlp_dim: together they can differ in seed, optim.lr"):
        together.check([same, other])
    same.eval.patience = 3
    with pytest.raises(ConfigError, match="where eval.patience=3 may end each at another step. Train them one by one"):
        together.check([same])


def test_members_are_grouped_by_shape_and_by_how_far_they_are(tmp_path):
    found = members(["rank_nn_small:rank=8", "rank_nn_small:rank=4"], ["optim.lr=0.1,0.2"], [], 2, tmp_path)
    groups = grouped(found)
    assert [len(group.members) for group in groups] == [4, 4] and all(isinstance(group, Group) for group in groups)
    assert [member for group in groups for member in group.members] == found
    (found[0].workdir / "checkpoints" / "5").mkdir(parents=True)
    assert [len(unit.members) for unit in grouped(found)] == [1, 3, 4]
    program, *flags = groups[0].command[2:]
    assert program == "leanformer.together" and len(flags) == 4
    assert json.loads(flags[1].removeprefix("--member="))[0] == str(found[1].workdir)
