"""Workdirs: only commands that train change the files of a run; broken or read-only files give one message."""

import json

import numpy as np
import pytest
from commands import command, run_in_process
from messages import mentions, refuses

from leanformer import config as configs
from leanformer import pretrained
from leanformer.errors import WeightsError, WorkdirError
from leanformer.runtime import files
from leanformer.runtime.stopping import StopRequest
from leanformer.tasks import artifacts
from leanformer.train import train
from leanformer.training import run_files


@pytest.fixture
def two_steps(plain, one_device):
    """Config of a run of two steps."""
    plain.update(total_steps=2, batch_size=8)
    plain.eval.update(every=0, batch_size=1024)
    plain.probe.every = 0
    return plain


@pytest.mark.slow
def test_failed_start_writes_no_config(two_steps, tmp_path, capfd, monkeypatch):
    pretrained.write(tmp_path / "other.safetensors", {"x": np.zeros(3)})
    two_steps.init_from.path = str(tmp_path / "other.safetensors")
    run = tmp_path / "run"
    with pytest.raises(WeightsError):
        train(two_steps, run)
    two_steps.init_from.path = None
    with monkeypatch.context() as patch:
        patch.setattr("leanformer.data.images.sources.Synthetic.__getitem__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(two_steps, run)
    assert not (run / "config.json").exists()
    two_steps.optim.lr = 0.5
    assert train(two_steps, run) == 0
    assert "optim.lr" not in capfd.readouterr().err and artifacts.load_config(run).optim.lr == 0.5


@pytest.mark.slow
def test_extended_run_has_no_summary_until_it_ends(two_steps, tmp_path, monkeypatch):
    """Otherwise readers of finished runs would use the summary of the shorter run."""
    assert train(two_steps, tmp_path) == 0 and files.read_json(tmp_path / "summary.json")["steps"] == 2

    def request_stop(self):
        self.status = 75
        return True

    two_steps.total_steps = 5
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "now", request_stop)
        assert train(two_steps, tmp_path) == 75
    assert not (tmp_path / "summary.json").exists() and artifacts.load_config(tmp_path).total_steps == 5
    assert train(two_steps, tmp_path) == 0 and files.read_json(tmp_path / "summary.json")["steps"] == 5


@pytest.mark.slow
def test_run_longer_than_its_config_is_evaluated_where_it_is(two_steps, tmp_path, capfd):
    """Otherwise an older score, or none, would be that of its last step."""
    two_steps.total_steps = 4
    two_steps.checkpoint.every = 3
    assert train(two_steps, tmp_path) == 0
    summary = files.read_json(tmp_path / "summary.json")
    (tmp_path / "summary.json").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if '"eval"' not in line))
    two_steps.total_steps = 2
    assert train(two_steps, tmp_path) == 0 and mentions(capfd.readouterr().out, "4 steps", 2, "not trained")
    again = files.read_json(tmp_path / "summary.json")
    assert again["steps"] == again["final"]["step"] == 4 and again["final"]["loss"] == summary["final"]["loss"]


@pytest.mark.slow
def test_examples_are_counted_over_changes_of_the_batch_size(two_steps, tmp_path, monkeypatch):
    assert train(two_steps, tmp_path) == 0 and files.read_json(tmp_path / "summary.json")["examples_seen"] == 2 * 8
    two_steps.update(total_steps=5, batch_size=16, log_every=100)
    with monkeypatch.context() as patch:
        answers = iter([False, True])
        patch.setattr(StopRequest, "now", lambda self: next(answers))
        train(two_steps, tmp_path)  # stopped at step 4, without a train record since step 2
    assert train(two_steps, tmp_path) == 0
    assert files.read_json(tmp_path / "summary.json")["examples_seen"] == 2 * 8 + 3 * 16


@pytest.mark.slow
def test_run_with_deleted_records_still_ends(two_steps, tmp_path):
    """Without a training record there is no speed to report."""
    assert train(two_steps, tmp_path) == 0
    (tmp_path / "summary.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    with refuses(tmp_path / "metrics.jsonl", error=WorkdirError):  # the best checkpoint would be unknown
        train(two_steps, tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert train(two_steps, tmp_path) == 0
    summary = files.read_json(tmp_path / "summary.json")
    assert summary["examples_per_s"] is None and summary["steps"] == 2 and summary["final"]["step"] == 2


def test_run_of_another_task_or_architecture_is_refused_without_warnings(tmp_path, capfd):
    images, texts = (configs.load(f"configs/{name}.py") for name in ("quickstart", "quickstart_gpt"))
    run_files.write_config(tmp_path, images)
    with refuses('task="language"', 'task="images"'):
        run_files.warn_changes(tmp_path, texts, {})
    with images.unlocked():
        images.model.name = "xcit"
    with refuses('model.name="xcit"', 'model.name="vit"'):
        run_files.warn_changes(tmp_path, images, {})
    assert capfd.readouterr().err == ""


READERS = {
    "train": ["--config=configs/quickstart.py", "--config.data.name=synthetic", "--workdir=DIR"],
    "evaluate": ["--workdir=DIR"],
    "probe": ["--workdir=DIR"],
    "predict": ["--workdir=DIR", "picture.png"],
    "convert": ["--weights=DIR", "--out=DIR/out"],
}


def run_failing_command(name, folder):
    """Run a command that must fail with one message and status 2, and return the message."""
    flags = [word.replace("DIR", str(folder)) for word in READERS[name]]
    status, _, err = run_in_process([*command(name, config=None), *flags])
    assert status == 2 and err.count("Error: ") == 1, err
    return err


@pytest.mark.parametrize(
    "content", [b'{"config": {"seed": 0,', b"\xff\xfe\x00", b"[]", b'{"config": {"seed": 0, "model": 3}}']
)
def test_broken_config_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with refuses(tmp_path / "config.json", error=WorkdirError):
        artifacts.load_config(tmp_path)


@pytest.mark.parametrize("name", ["evaluate", "probe", "predict", "convert"])
def test_broken_config_is_one_message(name, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{")
    assert mentions(run_failing_command(name, tmp_path), tmp_path / "config.json")


def test_train_refuses_broken_records_and_config(two_steps, tmp_path):
    run_files.write_config(tmp_path, two_steps)
    good = {"step": 1, "kind": "train", "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(good)}\n{{"step": 2, "ki\n{json.dumps(good)}\n')
    assert mentions(run_failing_command("train", tmp_path), tmp_path / "metrics.jsonl", "line 2", '{"step": 2, "ki')
    (tmp_path / "config.json").write_text("{")
    assert mentions(run_failing_command("train", tmp_path), tmp_path / "config.json")


def test_invalid_record_is_refused_and_partial_line_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "eval", "top1": 0.5}\n\n{"step": 2, "kind": "ev\xc3')
    assert run_files.read_records(path) == [{"step": 1, "kind": "eval", "top1": 0.5}]
    path.write_text('{"step": 1, "loss": 0.5}\n')
    with refuses(path, "step", "kind", "{'step': 1, 'loss': 0.5}", error=WorkdirError):
        run_files.read_records(path)
