"""Runs as one program: the weights, records and folders that each would have alone."""

import json

import jax
import numpy as np
import pytest
from messages import mentions, refuses
from rounding import by_name, distance

from leanformer import config, train
from leanformer import train_vmap as command
from leanformer.errors import TrainingError
from leanformer.runtime.mesh import make_mesh
from leanformer.sweeps.grid import VmapGroup, group_runs, make_runs
from leanformer.tasks.points import PointRegression
from leanformer.training import metrics_log, train_setup, vmap
from leanformer.training.checkpoint import Checkpoints


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
    like = train_setup.build(c, examples=None, mesh=make_mesh(devices=jax.devices()[:1])).state
    with Checkpoints(folder / "checkpoints") as saved:
        return by_name(saved.restore(like, step)[0].params)


def records(folder):
    result = metrics_log.read_records(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in metrics_log.TIMING} for record in result]


# Runs side by side are another program than one alone: their gradients differ by float32 rounding, by e = 1e-5 of a
# gradient's typical element (`rounding.LEAF` is the bound, for much longer sums). AdamW divides a gradient by its own
# size, so the direction of an element differs by e / |x|, x being the element over its typical size, and at most by 2:
# for normal x that is sqrt(3 e) = 0.5 % of all directions, in the mean square, and almost all of it in elements near
# zero. A single weight may so be off by 2 lr after any step, whatever the tolerance: weights are compared by the norm
# of what was trained. A loss feels an element's error by its gradient, which is small where the error is large: 12
# steps change it by 12 lr e sqrt(P) |g| = 1e-5 for P = 700 parameters and a gradient of norm 1 at lr = 0.003.
WAY, CURVE = 0.02, 1e-4


def way_off(found, expected, before):
    """Return the distance between weights, over the way that training went from `before` to those expected."""
    return distance(found, expected) / distance(expected, before)


def curve(records):
    return np.array([record["loss"] for record in records])


def test_they_are_what_each_is_alone(tmp_path, one_device, monkeypatch):
    """One of three, stopped within an evaluation and gone on with; the third learns by a tenth faster than it."""
    values = MEMBERS | {"c": (1, 0.0033)}
    configs = {name: small(*value) for name, value in values.items()}
    members = [(tmp_path / name, c) for name, c in configs.items()]
    asked = iter(range(STEPS))

    def stopped(self):
        """Asked once a step, and before each batch of an evaluation: before that of the second run at step 6."""
        self.status = 75
        return next(asked) == 10

    with monkeypatch.context() as patch:
        patch.setattr(command.StopRequest, "now", stopped)
        assert command.train(members) == 75
    done = {
        name: {record["step"] for record in records(tmp_path / name) if record["kind"] == "eval"} for name in values
    }
    assert done == {"a": set(), "b": set(), "c": set()}  # evaluated again when it resumes
    assert command.train(members) == 0
    assert train.train(configs["b"], tmp_path / "alone") == 0

    halfway, expected = (weights(tmp_path / "alone", configs["b"], step) for step in (STEPS // 2, STEPS))
    assert way_off(weights(tmp_path / "b", configs["b"]), expected, halfway) < WAY
    assert way_off(weights(tmp_path / "c", configs["c"]), expected, halfway) > 3 * WAY
    ours, theirs, faster = (records(tmp_path / name) for name in ("b", "alone", "c"))
    assert [(r["step"], r["kind"], r.keys()) for r in ours] == [(r["step"], r["kind"], r.keys()) for r in theirs]
    np.testing.assert_allclose(curve(ours), curve(theirs), rtol=CURVE)
    assert np.abs(curve(faster) / curve(theirs) - 1).max() > 10 * CURVE
    np.testing.assert_allclose(*([r.get("lr", 0) for r in run] for run in (ours, theirs)), rtol=1e-6)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "b", tmp_path / "alone")]
    assert summaries[0].keys() == summaries[1].keys() and [s["vmapped_runs"] for s in summaries] == [3, 1]
    assert summaries[0]["score"]["score"] == pytest.approx(summaries[1]["score"]["score"], rel=CURVE)
    with refuses("a 12", "b 12", "c 12"):
        command.train(members)


def test_one_that_goes_astray_is_named_and_the_others_are_kept(tmp_path, monkeypatch, capfd):
    configs = {name: small(*values) for name, values in MEMBERS.items()}
    for c in configs.values():
        c.optim.max_skipped = 2
    make_step = vmap.make_step

    def overflowing(runs):
        """From step 8 on the second run's loss is not finite."""
        step = make_step(runs)

        def changed(states, batches, keys):
            last = jax.numpy.where(states.step[1] >= 7, jax.numpy.nan, 1.0)
            by = jax.numpy.stack([jax.numpy.ones(()), last])
            return step(states, batches | {"points": batches["points"] * by[:, None, None, None]}, keys)

        return changed

    monkeypatch.setattr(vmap, "make_step", overflowing)
    with refuses("b", 2, "step 6", error=TrainingError):
        command.train([(tmp_path / name, c) for name, c in configs.items()])
    assert mentions(capfd.readouterr().err, "step 8")
    assert records(tmp_path / "b")[-1]["kind"] == "abort" and records(tmp_path / "a")[-1]["kind"] != "abort"
    saved = [weights(tmp_path / name, c, 6) for name, c in configs.items()]
    assert all(np.isfinite(leaf).all() for tree in saved for leaf in tree.values())


def test_they_are_saved_all_or_none(tmp_path, monkeypatch):
    """The best state of one is not that of all, but only from equal steps can they go on together."""
    scores = {"a": (3.0, 1.0, 2.0), "b": (3.0, 2.0, 1.0)}
    report_score = Checkpoints.report
    monkeypatch.setattr(
        Checkpoints,
        "report",
        lambda saved, step, _: report_score(saved, step, scores[saved.folder.parent.name][step // 4 - 1]),
    )
    for c in (configs := {name: small(*values) for name, values in MEMBERS.items()}).values():
        c.eval.every, c.checkpoint.every = 4, 0
        with c.unlocked():
            c.eval.more = {}
    assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 0
    assert [sorted(int(p.name) for p in (tmp_path / n / "checkpoints").iterdir()) for n in "ab"] == [[4, 8, 12]] * 2


def test_short_runs_without_one_good_step_are_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(PointRegression, "ceiling", -1.0)
    configs = {name: small(*values) for name, values in MEMBERS.items()}
    for c in configs.values():
        c.update(total_steps=2, log_every=10)
        c.optim.warmup_steps = 1
        c.eval.every = 0
    with refuses("a", 2, error=TrainingError):
        command.train([(tmp_path / name, c) for name, c in configs.items()])
    assert not (tmp_path / "a" / "summary.json").exists()


def test_which_can_be_trained_together(tmp_path):
    same, other = small(0, 0.01), small(1, 0.02)
    vmap.check([same, other])
    assert vmap.group_key(same) == vmap.group_key(other)
    other.model.mlp_dim = 4
    assert vmap.group_key(same) != vmap.group_key(other)
    with refuses("model.mlp_dim", "seed", "optim.lr"):
        vmap.check([same, other])
    same.eval.patience = 3
    with refuses("eval.patience=3"):
        vmap.check([same])


def test_members_are_grouped_by_shape_and_by_how_far_they_are(tmp_path):
    result = make_runs(["rank_nn_small:rank=8", "rank_nn_small:rank=4"], ["optim.lr=0.1,0.2"], [], 2, tmp_path)
    groups = group_runs(result)
    assert [len(group.runs) for group in groups] == [4, 4] and all(isinstance(group, VmapGroup) for group in groups)
    assert [member for group in groups for member in group.runs] == result
    (result[0].workdir / "checkpoints" / "5").mkdir(parents=True)
    assert [len(unit.runs) for unit in group_runs(result)] == [1, 3, 4]
    program, *flags = groups[0].command[2:]
    assert program == "leanformer.train_vmap" and len(flags) == 4
    assert json.loads(flags[1].removeprefix("--member="))[0] == str(result[1].workdir)
