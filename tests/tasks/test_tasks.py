"""A kind of task is one file and one line of a registry: `regression_task` trains, stops, goes on and is compared."""

import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regression_task
from commands import ROOT, environment, run
from flax import nnx

from leanformer import evaluate, tasks, train
from leanformer.errors import ConfigError
from leanformer.training import checks, experiment, report, streams
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture
def points(tiny):
    """The tiny run, of points and not of images."""
    with tiny.unlocked():  # as the README has it
        tiny.eval.more.other = {"split": "others", "every": 4}
    tiny.update(task="regression", total_steps=6)
    tiny.data.update(eval_split="held out")
    tiny.eval.every = 2
    tiny.optim.update(lr=1e-2, ema=0.0)
    tiny.checkpoint.update(every=3, keep=9)
    tiny.probe.update(every=6, examples=8)
    tiny.loss = "softmax"
    return tiny


def records(workdir):
    found = report.read_records(workdir / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in report.TIMING} for record in found]


def final(workdir, c, meshes):
    run = experiment.build(c, examples=None, mesh=meshes(1, 1))
    with Checkpoints(workdir / "checkpoints") as saved:
        return saved.restore(run.like)[0], saved.best(), saved.scores, saved.score


def test_it_trains_is_killed_goes_on_and_is_evaluated(points, tmp_path, meshes, monkeypatch, capsys):
    checks.check(points)
    assert train.train(points, tmp_path / "whole") == 0
    out = capsys.readouterr().out
    assert "endless to train on, 37 to evaluate on, 37 to evaluate on as other" in out and "targets" in out

    put = streams.put
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(streams, "put", lambda run, host: put(run, host) if 3 not in host["index"] // 16 else cut())
        train.train(points, tmp_path / "killed")
    assert train.train(points, tmp_path / "killed") == 0

    (state, best, scores, score), (other, *_) = (final(tmp_path / name, points, meshes) for name in ("whole", "killed"))
    jax.tree.map(np.testing.assert_array_equal, state, other)
    found = records(tmp_path / "whole")
    assert found == records(tmp_path / "killed")
    assert [r["step"] for r in found if r["kind"] == "eval"] == [2, 4, 6]
    assert [r["step"] for r in found if r["kind"] == "eval other"] == [4, 6]
    evals = {r["step"]: r for r in found if r["kind"] == "eval"}
    assert all(r["examples"] == 37 and sum(r["by_output"]) == pytest.approx(r["error"]) for r in evals.values())
    assert score == regression_task.Regression.score and scores == {step: r["error"] for step, r in evals.items()}
    assert best == min(scores, key=scores.get)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["score"] == {"score": evals[6]["error"], "of": "error", "higher": False}
    assert (tmp_path / "whole" / "plots" / "error.png").is_file()

    kind, opened = regression_task.Regression, []
    of_split = kind.open
    monkeypatch.setattr(kind, "open", lambda *given: opened.append(given[1]) or of_split(*given))
    assert evaluate.main([f"--workdir={tmp_path / 'whole'}", "--split=others"]) == 0
    assert opened == ["train", "others"]  # and none that the run was evaluated on besides
    again = json.loads((tmp_path / "whole" / "evaluation.json").read_text())
    others = next(r for r in found if r["kind"] == "eval other" and r["step"] == 6)
    assert again["error"] == pytest.approx(others["error"], rel=1e-6) != evals[6]["error"]


def cut():
    raise RuntimeError("power cut")


def test_the_loss_does_not_depend_on_accumulation(points, meshes):
    """Sums over micro-batches, divided by the weight of the whole batch."""
    found = []
    for accumulate in (1, 4):
        points.accumulate = accumulate
        run = experiment.build(points, examples=None, mesh=meshes(1, 1))
        host = streams.train_batches(run, run.task.open("train"))[0]
        _, metrics = jax.jit(run.train_step)(run.initial_state(), streams.put(run, host), run.run_key())
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert found[0][0] > 1


def test_what_no_sum_can_tell_is_told_of_every_example(points, meshes):
    """A rank correlation over a split, whatever the batch, the padding and the devices."""
    ranks = []
    for mesh, size in ((meshes(1, 1), 16), (meshes(1, 1), 5), (meshes(4, 2), 8)):
        points.eval.batch_size = size
        run = experiment.build(points, examples=None, mesh=mesh)
        weights, split = run.initial_state().weights, run.task.open("held out")
        found = steps.evaluate(jax.jit(run.eval_step), run.task.metrics, {"": weights}, streams.evaluation(run, split))
        ranks.append(found["rank_correlation"])
    examples = [run.task.prepare(split[index]) for index in range(len(split))]
    grids, values = (np.stack([example[name] for example in examples]) for name in ("grid", "values"))
    outputs, _ = nnx.merge(run.graphdef, *jax.device_get(weights))(jnp.asarray(grids))
    order = [np.argsort(np.argsort(column)) for column in (outputs[:, 0], values[:, 0])]
    np.testing.assert_allclose(ranks, np.corrcoef(*order)[0, 1], rtol=1e-9)
    assert abs(ranks[0]) > 1e-3


def test_what_has_no_end_has_no_epochs(points, meshes):
    points.update(total_steps=0, total_epochs=1.0)
    with pytest.raises(ConfigError, match="total_epochs=1.0, and the training data have no end. Set --config.total_e"):
        experiment.build(points, examples=None, mesh=meshes(1, 1))
    points.update(total_steps=5, total_epochs=0.0)
    points.optim.warmup_epochs = 1.0
    with pytest.raises(ConfigError, match="optim.warmup_epochs=1.0, and the training data have no end"):
        experiment.build(points, examples=None, mesh=meshes(1, 1))


@pytest.mark.parametrize("more", [{"split": "x"}, {"split": "x", "every": -1}, {"split": 3, "every": 1}, "x"], ids=repr)
def test_another_evaluation_that_is_not_whole(tiny, more):
    with tiny.unlocked():
        tiny.eval.more.other = more
    with pytest.raises(ConfigError, match=r"eval.more.other=.*: give the split's name and how often"):
        checks.check(tiny)


def test_a_task_that_is_not_known(tiny):
    tiny.task = "divination"
    with pytest.raises(ConfigError, match='task="divination" is not known: choose one of images, sequences'):
        tasks.of(tiny)


def test_a_run_from_before_there_were_tasks_is_opened(tiny, tmp_path):
    report.write_config(tmp_path, tiny)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["config"]["task"], content["config"]["eval"]["more"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = report.read_config(tmp_path)
    assert found.task == "images" and found.eval.more.to_dict() == {}


@pytest.mark.slow
def test_it_is_swept(points, tmp_path):
    """By the ordinary command: the kind is known wherever the line of the registry is run."""
    config = tmp_path / "points.py"
    lines = ["from pathlib import Path", "from leanformer.training import report", "", "", "def get_config():"]
    config.write_text("\n".join([*lines, f"    return report.read_config(Path({str(tmp_path)!r}))", ""]))
    report.write_config(tmp_path, points)
    (tmp_path / "sitecustomize.py").write_text("import regression_task\n")
    known = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT)])}
    words = [sys.executable, "-m", "leanformer.sweep", f"--config={config}", f"--workdir={tmp_path / 'sweep'}"]
    status, out, err = run([*words, "--seeds=2"], env=environment() | known)
    assert status == 0, err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2
    assert len(re.findall(r"^  points,seed=\d +error ", out, re.MULTILINE)) == 2
