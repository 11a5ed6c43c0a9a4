"""Workdirs: only commands that train change the files of a run; broken or read-only files give one message."""

import json

import pytest
from messages import mentions, refuses

from leanformer import config as configs
from leanformer.errors import WorkdirError
from leanformer.runtime import files
from leanformer.runtime.stopping import StopRequest
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
def test_extended_run_has_no_summary_until_it_ends(two_steps, tmp_path, monkeypatch, capfd):
    """Otherwise readers of finished runs would use the summary of the shorter run. The new learning rate is told."""
    assert train(two_steps, tmp_path) == 0 and files.read_json(tmp_path / "config.json")["changed"] == []
    assert files.read_json(tmp_path / "summary.json")["steps"] == 2

    def request_stop(self):
        self.status = 75
        return True

    two_steps.total_steps = 5
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "now", request_stop)
        assert train(two_steps, tmp_path) == 75
    assert mentions(capfd.readouterr().out, "learning rate", "schedule of 5 steps")
    assert not (tmp_path / "summary.json").exists() and run_files.load_config(tmp_path).total_steps == 5
    assert train(two_steps, tmp_path) == 0 and files.read_json(tmp_path / "summary.json")["steps"] == 5
    assert files.read_json(tmp_path / "config.json")["changed"] == ["total_steps"]


def test_run_of_another_task_or_architecture_is_refused_without_warnings(tmp_path, capfd):
    images, texts = (configs.load(f"configs/{name}.py") for name in ("quickstart", "quickstart_gpt"))
    run_files.write_config(tmp_path, images)
    with refuses('task="language"', 'task="images"'):
        run_files.warn_changes(tmp_path, texts, {})
    images.unlock()
    images.model.name = "xcit"
    with refuses('model.name="xcit"', 'model.name="vit"'):
        run_files.warn_changes(tmp_path, images, {})
    images.model.name, images.eval.examples = "vit", 7  # the scores until then are of all examples
    with refuses('eval.examples="7"', "eval.more"):
        run_files.warn_changes(tmp_path, images, {})
    assert capfd.readouterr().err == ""


def test_partial_line_of_records_is_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "kind": "eval", "top1": 0.5}\n\n{"step": 2, "kind": "ev\xc3')
    assert run_files.read_records(tmp_path) == [{"step": 1, "kind": "eval", "top1": 0.5}]


def test_resuming_needs_whole_records(tmp_path):
    with refuses(tmp_path / "metrics.jsonl", error=WorkdirError):  # the best checkpoint would be unknown
        run_files.Recorder(tmp_path, start=2, total=4)
    good = {"step": 1, "kind": "train", "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(good)}\n{{"step": 2, "ki\n{json.dumps(good)}\n')
    with refuses(tmp_path / "metrics.jsonl", "line 2", '{"step": 2, "ki', error=WorkdirError):
        run_files.Recorder(tmp_path, start=2, total=4)


@pytest.mark.slow
@pytest.mark.parametrize("total", [4, 2])
def test_run_that_was_killed_before_its_summary_is_evaluated_where_it_is(two_steps, tmp_path, capfd, total):
    """Also one longer than its config: otherwise an older score, or none, would be that of its last step."""
    two_steps.total_steps = 4
    two_steps.checkpoint.every = 3
    assert train(two_steps, tmp_path) == 0
    summary = files.read_json(tmp_path / "summary.json")
    (tmp_path / "summary.json").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if '"eval"' not in line))
    two_steps.total_steps = total
    assert train(two_steps, tmp_path) == 0
    assert mentions(capfd.readouterr().out, "4 steps", 2, "not trained") == (total == 2)
    again = files.read_json(tmp_path / "summary.json")
    assert again["steps"] == again["final"]["step"] == 4 and again["final"]["loss"] == summary["final"]["loss"]
