"""Vectorised training of several runs: weights, records and folders equal those of separate runs."""

import json
import shutil

import jax
import numpy as np
import pytest
from commands import run_in_process
from messages import mentions, refuses
from rounding import difference_norm, leaves_by_name

from leanformer import config, train
from leanformer import train_vmap as command
from leanformer.errors import TrainingError
from leanformer.runtime.mesh import make_mesh
from leanformer.sweeps.grid import VmapGroup, group_runs, make_runs
from leanformer.tasks.points import PointRegression
from leanformer.training import metrics_log, train_setup, vmap
from leanformer.training.checkpoint import Checkpoints


STEPS = 12


def make_config(seed, lr):
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


RUNS = {"a": (0, 0.01), "b": (1, 0.003)}  # seed and learning rate


def load_weights(folder, c, step=STEPS):
    template = train_setup.build(c, examples=None, mesh=make_mesh(devices=jax.devices()[:1])).state
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return leaves_by_name(checkpoints.restore(template, step)[0].params)


def read_records(folder):
    entries = metrics_log.read_records(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in metrics_log.TIMING} for record in entries]


# A vectorised program is compiled differently from that of one run. Their gradients differ by float32 rounding, by
# e = 1e-5 of a gradient's typical element (`rounding.LEAF_TOLERANCE` is the bound, for longer sums). AdamW divides a
# gradient by its size, so the direction of an element differs by e / |x|, and by at most 2, where x is the element
# divided by its typical size. For normally distributed x the root mean square is sqrt(3 e) = 0.5 % of all directions,
# almost all of it in elements near zero. So a single weight may be off by 2 lr after any step, and weights are
# compared by the norm of their change in training instead. An element's error changes the loss in proportion to its
# gradient, which is small where the error is large: 12 steps change the loss by 12 lr e sqrt(P) |g| = 1e-5 for P = 700
# parameters and a gradient of norm 1 at lr = 0.003.
UPDATE_RTOL, LOSS_RTOL = 0.02, 1e-4


def compare_weights(result, expected, before):
    """Return the distance between weights relative to the distance that training moved from `before` to `expected`."""
    return difference_norm(result, expected) / difference_norm(expected, before)


def get_losses(entries):
    return np.array([record["loss"] for record in entries])


def test_vectorised_runs_equal_separate_runs(tmp_path, one_device, monkeypatch):
    """Compare one of three runs, interrupted in an evaluation and resumed; the third has 10 % more learning rate."""
    values = RUNS | {"c": (1, 0.0033)}
    configs = {name: make_config(*value) for name, value in values.items()}
    runs = [(tmp_path / name, c) for name, c in configs.items()]
    calls = iter(range(STEPS))

    def stop_in_evaluation(self):
        """Request a stop before run b is evaluated at step 6; called once per step and per evaluation batch."""
        self.status = 75
        return next(calls) == 10

    with monkeypatch.context() as patch:
        patch.setattr(train.StopRequest, "now", stop_in_evaluation)
        assert command.train(runs) == 75
    evaluations = {
        name: {record["step"] for record in read_records(tmp_path / name) if record["kind"] == "eval"}
        for name in values
    }
    assert evaluations == {"a": set(), "b": set(), "c": set()}  # the evaluation is repeated after the resume
    assert command.train(runs) == 0
    assert train.train(configs["b"], tmp_path / "alone") == 0

    halfway, expected = (load_weights(tmp_path / "alone", configs["b"], step) for step in (STEPS // 2, STEPS))
    assert compare_weights(load_weights(tmp_path / "b", configs["b"]), expected, halfway) < UPDATE_RTOL
    assert compare_weights(load_weights(tmp_path / "c", configs["c"]), expected, halfway) > 3 * UPDATE_RTOL
    vectorised, separate, faster = (read_records(tmp_path / name) for name in ("b", "alone", "c"))
    assert [(r["step"], r["kind"], r.keys()) for r in vectorised] == [
        (r["step"], r["kind"], r.keys()) for r in separate
    ]
    np.testing.assert_allclose(get_losses(vectorised), get_losses(separate), rtol=LOSS_RTOL)
    assert np.abs(get_losses(faster) / get_losses(separate) - 1).max() > 10 * LOSS_RTOL
    np.testing.assert_allclose(*([r.get("lr", 0) for r in run] for run in (vectorised, separate)), rtol=1e-6)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "b", tmp_path / "alone")]
    assert summaries[0].keys() == summaries[1].keys() and [s["vmapped_runs"] for s in summaries] == [3, 1]
    assert summaries[0]["score"]["score"] == pytest.approx(summaries[1]["score"]["score"], rel=LOSS_RTOL)
    (tmp_path / "b" / "summary.json").unlink()  # as after a kill between two summaries
    assert command.train(runs) == 0 and json.loads((tmp_path / "b" / "summary.json").read_text())["steps"] == STEPS
    written = (tmp_path / "b" / "summary.json").stat().st_mtime_ns
    assert command.train(runs) == 0 and (tmp_path / "b" / "summary.json").stat().st_mtime_ns == written
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "12")
    with refuses("a 12", "b 6", "c 12"):
        command.train(runs)


def test_diverged_run_is_named_and_others_stay_usable(tmp_path, monkeypatch, capfd):
    configs = {name: make_config(*values) for name, values in RUNS.items()}
    for c in configs.values():
        c.optim.max_skipped = 2
    make_step = vmap.make_step

    def make_diverging_step(runs):
        """Return a step with a non-finite loss of the second run from step 8 on."""
        step = make_step(runs)

        def run_step(states, batches, keys):
            last = jax.numpy.where(states.step[1] >= 7, jax.numpy.nan, 1.0)
            factors = jax.numpy.stack([jax.numpy.ones(()), last])
            return step(states, batches | {"points": batches["points"] * factors[:, None, None, None]}, keys)

        return run_step

    monkeypatch.setattr(vmap, "make_step", make_diverging_step)
    with refuses("b", 2, "step 6", error=TrainingError):
        command.train([(tmp_path / name, c) for name, c in configs.items()])
    assert mentions(capfd.readouterr().err, "step 8")
    assert read_records(tmp_path / "b")[-1]["kind"] == "abort" and read_records(tmp_path / "a")[-1]["kind"] != "abort"
    trees = [load_weights(tmp_path / name, c, 6) for name, c in configs.items()]
    assert all(np.isfinite(leaf).all() for tree in trees for leaf in tree.values())


def test_checkpoints_are_saved_for_all_runs_or_none(tmp_path, monkeypatch):
    """Runs have different best steps, but they can resume together only from equal steps."""
    scores = {"a": (3.0, 1.0, 2.0), "b": (3.0, 2.0, 1.0)}
    report_score = Checkpoints.report
    monkeypatch.setattr(
        Checkpoints,
        "report",
        lambda checkpoints, step, _: report_score(
            checkpoints, step, scores[checkpoints.folder.parent.name][step // 4 - 1]
        ),
    )
    for c in (configs := {name: make_config(*values) for name, values in RUNS.items()}).values():
        c.eval.every, c.checkpoint.every = 4, 0
        with c.unlocked():
            c.eval.more = {}
    assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 0
    assert [sorted(int(p.name) for p in (tmp_path / n / "checkpoints").iterdir()) for n in "ab"] == [[4, 8, 12]] * 2


def test_short_runs_without_a_good_step_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(PointRegression, "ceiling", -1.0)
    configs = {name: make_config(*values) for name, values in RUNS.items()}
    for c in configs.values():
        c.update(total_steps=2, log_every=10)
        c.optim.warmup_steps = 1
        c.eval.every = 0
    with refuses("a", 2, error=TrainingError):
        command.train([(tmp_path / name, c) for name, c in configs.items()])
    assert not (tmp_path / "a" / "summary.json").exists()


def test_only_compatible_runs_train_together(tmp_path):
    same, other = make_config(0, 0.01), make_config(1, 0.02)
    vmap.check([same, other])
    assert vmap.group_key(same) == vmap.group_key(other)
    other.model.mlp_dim = 4
    assert vmap.group_key(same) != vmap.group_key(other)
    with refuses("model.mlp_dim", "seed", "optim.lr"):
        vmap.check([same, other])
    with refuses("Runs differ in"):
        vmap.check([same, config.language()])
    same.eval.patience = 3
    with refuses("eval.patience=3"):
        vmap.check([same])


@pytest.mark.parametrize(("flag", "key"), [("--config.optim.lr=-1", "optim.lr"), ("--config.seed=-3", "seed=-3")])
def test_every_run_is_checked(flag, key, tmp_path):
    members = [[str(tmp_path / name), "--config=rank_nn_small", *more] for name, more in (("a", []), ("b", [flag]))]
    words = [f"--member={json.dumps(member)}" for member in members]
    status, _, err = run_in_process(["", "", "leanformer.train_vmap", *words])
    assert status == 2 and mentions(err, key) and not [*tmp_path.iterdir()]


def test_a_rate_of_the_head_keeps_runs_of_other_rates_apart():
    """The program has head_lr / lr as a constant."""
    configs = [make_config(seed, lr) for seed, lr in ((0, 0.01), (1, 0.01), (0, 0.003))]
    assert len({vmap.group_key(c) for c in configs}) == 1
    for c in configs:
        c.optim.head_lr = 0.001
    assert len({vmap.group_key(c) for c in configs}) == 2
    vmap.check(configs[:2])
    with refuses("optim.lr", "optim.head_lr"):
        vmap.check(configs)


def test_runs_are_grouped_by_architecture_and_progress(tmp_path):
    result = make_runs(["rank_nn_small:rank=8", "rank_nn_small:rank=4"], ["optim.lr=0.1,0.2"], [], 2, tmp_path)
    groups = group_runs(result)
    assert [len(group.runs) for group in groups] == [4, 4] and all(isinstance(group, VmapGroup) for group in groups)
    assert [member for group in groups for member in group.runs] == result
    (result[0].workdir / "checkpoints" / "5").mkdir(parents=True)
    assert [len(unit.runs) for unit in group_runs(result)] == [1, 3, 4]
    result[1].workdir.mkdir()
    (result[1].workdir / "metrics.jsonl").write_text('{"step": 2, "kind": "abort"}\n')
    assert [len(unit.runs) for unit in group_runs(result)] == [1, 1, 2, 4]
    program, *flags = groups[0].command[2:]
    assert program == "leanformer.train_vmap" and len(flags) == 4
    assert json.loads(flags[1].removeprefix("--member="))[0] == str(result[1].workdir)
