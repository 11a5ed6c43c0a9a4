"""Evaluators: the recipe of the module docstring, reserved names, and the steps at which they are due."""

import json
import types

import optax
import pytest
from commands import command, run
from messages import refuses
from small_runs import make_small_config

from leanformer import train
from leanformer.costs import devices
from leanformer.errors import TrainingError
from leanformer.training import evaluators, run_files, train_setup
from leanformer.training.evaluators import Evaluator


RECIPE = """
import optax
from leanformer.training.evaluators import Evaluator


def make_evaluators(trainer):
    return {"norm": Evaluator(2, lambda state: {"l2": optax.global_norm(state.params)})}
"""


@pytest.mark.slow
def test_evaluator_recipe_works_from_a_config_file(tmp_path):
    """The recipe of the module docstring works in a config file, with the command."""
    assert "def make_evaluators(trainer):" in evaluators.__doc__
    path = tmp_path / "mine.py"
    path.write_text(f"from leanformer import config\n{RECIPE}\n\ndef get_config():\n    return config.points()\n")
    changes = {"batch_size": 4, "total_steps": 5, "eval.batch_size": 4, "data.examples": 8, "log_every": 5}
    changes |= {"data.points": 4, "data.dim": 8, "model.width": 8, "model.head_dim": 4, "model.num_heads": 2}
    changes |= {"model.mlp_dim": 8, "optim.warmup_steps": 1}
    status, _, err = run(command("train", tmp_path / "run", changes, config=path))
    assert status == 0, err
    records = run_files.read_records(tmp_path / "run", "norm")
    assert [record["step"] for record in records] == [2, 4, 5] and all(record["l2"] > 0 for record in records)
    assert "norm" not in json.loads((tmp_path / "run" / "summary.json").read_text())["final"]


@pytest.mark.parametrize("name", ["eval", "eval test", "probe", "train"])
def test_reserved_record_names_are_refused(name, tmp_path):
    c = make_small_config("points", tmp_path)
    setup = train_setup.set_up_training(c, examples=None)
    trainer = types.SimpleNamespace(setup=setup, held_out={"": setup.task.data.open(c.data.eval_split)})
    with refuses(repr(name)):
        evaluators.make(trainer, more=lambda trainer: {name: Evaluator(1, dict)})


@pytest.mark.parametrize(
    ("every", "at_start", "steps"), [(3, False, [3, 6, 7]), (3, True, [0, 3, 6, 7]), (0, False, [7]), (9, True, [0, 7])]
)
def test_evaluator_due_steps(every, at_start, steps):
    evaluator = Evaluator(every, optax.global_norm, at_start)
    assert [step for step in range(8) if evaluator.due(step, last=7)] == steps


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key"), [("eval", "eval.batch_size"), ("probe", "probe.examples")])
def test_evaluator_that_exceeds_memory_is_refused_before_training(kind, key, plain, tmp_path, monkeypatch, one_device):
    """The programs of evaluators are compiled before the first step, with the memory of the optimizer's state."""
    sizes = {"eval.batch_size": 16, "probe.examples": 16} | {key: 512}
    plain.eval.batch_size, plain.probe.examples, plain.probe.every = *sizes.values(), 1
    original, peaks = evaluators.peak_memory, {}
    monkeypatch.setattr(evaluators, "peak_memory", lambda *args: peaks.update(original(*args)) or peaks)
    monkeypatch.setattr(devices, "memory_limit", lambda _: max(peaks.values(), default=2**40) - 1)
    with refuses(kind, f"{key}=512", error=TrainingError):
        train.train(plain, tmp_path)
    assert peaks.keys() == {"eval", "probe"} and not (tmp_path / "metrics.jsonl").exists()
    run = train_setup.set_up_training(plain, examples=64)
    states = devices.count_bytes((run.state.params, run.state.moments, run.state.ema))
    assert min(peaks.values()) > states > 4 * devices.count_bytes(run.state.params) - 100
