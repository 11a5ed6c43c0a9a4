"""Custom tasks: `regression_task`, one file and one registry line, trains, is evaluated and is swept."""

import functools
import json
import math
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regression_task
from commands import ROOT, run, subprocess_environment
from flax import nnx
from messages import mentions, refuses
from random_weights import fill_weights
from small_runs import read_records

from leanformer import evaluate, tasks, train
from leanformer.errors import DataError
from leanformer.training import evaluators, optimizers, run_files, train_setup
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture
def points(tiny):
    """Return the tiny config with points instead of images."""
    with tiny.unlocked():  # as in docs/guide.md
        tiny.eval.more.other = {"split": "others", "every": 4}
    tiny.update(task="regression", total_steps=6)
    tiny.data.update(eval_split="held out")
    tiny.eval.every = 2
    tiny.optim.update(lr=1e-2, ema=0.0)
    tiny.checkpoint.update(every=3, keep=9)
    tiny.probe.update(every=6, examples=8)
    tiny.loss = "softmax"
    return tiny


def test_other_data_of_another_process_are_refused(points, monkeypatch):
    monkeypatch.setattr(tasks.multihost, "all_gather_host", lambda facts: [facts, facts | {"examples of held out": 1}])
    with refuses("Processes 0 and 1", "'examples of held out'", error=DataError):
        tasks.open_data(tasks.build_task(points).data, points)


def test_custom_task_trains_and_is_evaluated(points, tmp_path, monkeypatch, capsys, one_device):
    train_setup.check(points)
    assert train.train(points, tmp_path / "whole") == 0
    out = capsys.readouterr().out
    assert mentions(out, "37", "other", "targets", f"{regression_task.OUTPUTS} numbers")

    with Checkpoints(tmp_path / "whole" / "checkpoints") as saved:
        best, scores, score = saved.best(), saved.scores, saved.score
    result = read_records(tmp_path / "whole")
    assert [r["step"] for r in result if r["kind"] == "eval"] == [2, 4, 6]
    assert [r["step"] for r in result if r["kind"] == "eval other"] == [4, 6]
    evals = {r["step"]: r for r in result if r["kind"] == "eval"}
    assert all(r["examples"] == 37 and sum(r["by_output"]) == pytest.approx(r["error"]) for r in evals.values())
    assert score == regression_task.Regression.score and scores == {step: r["error"] for step, r in evals.items()}
    assert best == min(scores, key=scores.get)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["score"] == {"score": evals[6]["error"], "of": "error", "higher": False}
    assert (tmp_path / "whole" / "plots" / "error.png").is_file()

    data_class, opened = regression_task.RegressionData, []
    open_split = data_class.open
    monkeypatch.setattr(data_class, "open", lambda *arguments: opened.append(arguments[1]) or open_split(*arguments))
    assert evaluate.main([f"--workdir={tmp_path / 'whole'}", "--split=others"]) == 0
    assert opened == ["train", "others"]  # the run's other evaluation splits are not opened
    again = json.loads((tmp_path / "whole" / "evaluation.json").read_text())
    others = next(r for r in result if r["kind"] == "eval other" and r["step"] == 6)
    # Float32 sums over 37 examples and 5 outputs, in another order on other devices: at most 185 x 6e-8.
    assert again["error"] == pytest.approx(others["error"], rel=1e-5)
    assert abs(again["error"] / evals[6]["error"] - 1) > 1e-3


class MaskedRegression(regression_task.Regression):
    """Regression objective with a mask per example: unscored ones do not count, like padding."""

    def loss_denominator(self, batch):
        return jnp.sum(batch["scored"])

    def loss(self, model, part, batch_aux, key):
        errors = jnp.square(model(part["grid"]) - part["values"]).sum(axis=1)
        return jnp.where(part["scored"], errors, 0).sum()


def test_loss_is_the_mean_over_the_whole_batch(rng):
    """Micro-batches of different weight do not change the loss: it is their sum divided by the total weight."""
    graphdef, *weights = nnx.split(fill_weights(lambda: nnx.Linear(7, 5, rngs=nnx.Rngs(0))), nnx.Param, nnx.BatchStat)
    batch = {name: rng.standard_normal((8, size)) for name, size in (("grid", 7), ("values", 5))}
    batch["scored"] = np.array([1, 1, 1, 1, 1, 0, 0, 0], bool)  # per micro-batch of two: 2, 2, 1 and 0
    options = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "mask": None}
    optimizer, weights = optimizers.OPTIMIZERS["adamw"](**options), tuple(map(nnx.as_pure, weights))
    initial = steps.init_state(weights, optimizer, ema=False)
    gradient = functools.partial(steps.make_gradient, graphdef, MaskedRegression(), freeze=lambda params: params)
    settings = {"divergence_loss": math.inf, "clip_norm": 0.0, "ema": 0.0, "log_every": 1}
    step = functools.partial(steps.make_train_step, optimizer=optimizer, schedule=lambda step: (0.1, 0.9), **settings)
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    results = [jax.jit(step(gradient(accumulate=n)))(initial, arrays, jax.random.key(0))[1] for n in (1, 4)]
    kernel, bias = (np.asarray(weights[0][name], np.float64) for name in ("kernel", "bias"))
    errors = (batch["grid"] @ kernel + bias - batch["values"])[:5]
    expected = np.square(errors).sum() / 5
    gradients = 2 * batch["grid"][:5].T @ errors / 5, 2 * errors.sum(axis=0) / 5
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients))
    for metrics in results:  # float32 sums of 40 terms: 40 x 6e-8 at most
        assert float(metrics["loss"]) == pytest.approx(expected, rel=3e-6)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=3e-6)


def test_per_example_metrics_cover_the_whole_split(points, meshes):
    """A rank correlation over a split does not depend on batch size, padding or devices."""
    ranks = []
    for mesh, size in ((meshes(1, 1), 5), (meshes(4, 2), 8)):
        points.eval.batch_size = size
        run = train_setup.set_up_training(points, examples=None, mesh=mesh)
        weights, split = fill_weights(run.state.weights), run.task.data.open("held out")
        result = steps.evaluate(
            jax.jit(run.model.eval_step(run.task.objective)),
            run.task.objective.metrics,
            {"": weights},
            evaluators.evaluation_batches(run.config, run.model, run.task.data, split),
        )
        ranks.append(result["rank_correlation"])
    examples = [run.task.data.prepare(split[index]) for index in range(len(split))]
    grids, values = (np.stack([example[name] for example in examples]) for name in ("grid", "values"))
    forward = jax.jit(lambda weights, grids: nnx.merge(run.model.graphdef, *weights)(grids)[0])
    outputs = forward(jax.device_get(weights), jnp.asarray(grids))
    order = [np.argsort(np.argsort(column)) for column in (outputs[:, 0], values[:, 0])]
    np.testing.assert_allclose(ranks, np.corrcoef(*order)[0, 1], rtol=1e-9)  # outputs are 1e-3 apart, or more
    assert np.diff(np.sort(outputs[:, 0])).min() > 1e-4
    assert abs(ranks[0]) > 1e-3


def test_epochs_of_an_endless_source_are_refused(points, meshes):
    points.update(total_steps=0, total_epochs=1.0)
    with refuses("total_epochs=1.0", "--config.total_steps"):
        train_setup.set_up_training(points, examples=None, mesh=meshes(1, 1))
    points.update(total_steps=5, total_epochs=0.0)
    points.optim.warmup_epochs = 1.0
    with refuses("optim.warmup_epochs=1.0"):
        train_setup.set_up_training(points, examples=None, mesh=meshes(1, 1))


@pytest.mark.slow
def test_custom_task_is_swept(points, tmp_path):
    """Use the sweep command; its processes know the task because they import the module that registers it."""
    config = tmp_path / "points.py"
    lines = ["from pathlib import Path", "from leanformer.training import run_files", "", "", "def get_config():"]
    config.write_text("\n".join([*lines, f"    return run_files.load_config(Path({str(tmp_path)!r}))", ""]))
    run_files.write_config(tmp_path, points)
    (tmp_path / "sitecustomize.py").write_text("import regression_task\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT)])}
    command = [sys.executable, "-m", "leanformer.sweep", f"--config={config}", f"--workdir={tmp_path / 'sweep'}"]
    status, out, err = run([*command, "--seeds=2"], env=subprocess_environment() | variables)
    assert status == 0, err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2
    assert len(re.findall(r"^  points,seed=\d +normalised error ", out, re.MULTILINE)) == 2
