"""Early stopping: a run ends after `eval.patience` evaluations without improvement, also after a resume."""

import json
import shutil

import pytest
from messages import mentions, refuses

from leanformer import config, train
from leanformer.runtime.stopping import StopRequest
from leanformer.tasks import artifacts
from leanformer.tasks.scores import Score
from leanformer.training import metrics_log


@pytest.mark.parametrize(
    ("scores", "since"),
    [({}, 0), ({5: 0.1}, 0), ({5: 0.3, 10: 0.2, 15: 0.1}, 2), ({5: 0.3, 10: 0.3}, 1), ({10: 0.1, 5: 0.2, 15: 0.3}, 0)],
)
def test_evaluations_since_the_best(scores, since):
    assert Score("top1").since_best(scores) == since


@pytest.fixture
def stagnant(plain, one_device):
    """Config of a run that learns nothing: no evaluation is better than the first, at step 2."""
    plain.update(total_steps=20, log_every=5)
    plain.model.depth = 1
    plain.augment.rand_magnitude = 0.0
    plain.optim.update(lr=0.0, warmup_lr=0.0, ema=0.0)
    plain.eval.update(every=2, patience=2)
    plain.checkpoint.every = 20
    plain.probe.update(every=20, examples=8, measures=("tokens",))
    return plain


def read_steps(workdir, kind):
    return [r["step"] for r in metrics_log.read_records(workdir / "metrics.jsonl") if r["kind"] == kind]


def read_records(workdir):
    records = metrics_log.read_records(workdir / "metrics.jsonl")
    return [{key: x for key, x in record.items() if key not in metrics_log.TIMING} for record in records]


def read_summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


@pytest.mark.slow
def test_stagnant_run_stops_early_with_all_outputs(stagnant, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    assert train.train(stagnant, workdir) == 0
    assert mentions(capsys.readouterr().out, "step 6", 20, "eval.patience")
    assert read_steps(workdir, "eval") == [2, 4, 6] and read_steps(workdir, "probe") == [0, 6]
    assert read_steps(workdir, "train") == [5, 6]
    assert read_summary(workdir)["steps"] == 6 and read_summary(workdir)["stopped_early"]
    assert read_summary(workdir)["final"]["step"] == 6
    assert (workdir / "checkpoints" / "6").is_dir() and (workdir / "plots").is_dir()

    assert train.train(stagnant, workdir) == 0
    assert mentions(capsys.readouterr().out, "6 steps", "eval.patience") and read_steps(workdir, "eval") == [2, 4, 6]

    # As after a kill following the last save: the evaluation is repeated, without further training steps.
    killed = tmp_path / "killed"
    shutil.copytree(workdir, killed)
    (killed / "summary.json").unlink()
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = next(
        i for i, line in enumerate(lines) if json.loads(line)["kind"] == "eval" and json.loads(line)["step"] == 6
    )
    (killed / "metrics.jsonl").write_text("".join(lines[:last]))
    stagnant.total_steps = 21
    assert train.train(stagnant, killed) == 0
    assert read_summary(killed)["steps"] == 6 and read_steps(killed, "eval") == [2, 4, 6]
    assert artifacts.load_config(killed).total_steps == 21  # otherwise a sweep would extend it again and again

    # Stopped in the evaluation that ends the run, before it is known to be the last.
    stopped, during = tmp_path / "stopped", StopRequest.during

    def stop_in_third_evaluation(self, items, feed):
        self.status = 75 * (read_steps(stopped, "eval") == [2, 4])
        return during(self, items, feed)

    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "during", stop_in_third_evaluation)
        assert train.train(stagnant, stopped) == 75 and read_steps(stopped, "train") == [5]
    assert train.train(stagnant, stopped) == 0
    assert read_records(stopped) == read_records(workdir)

    stagnant.total_steps = 20
    stagnant.eval.patience = 3
    assert train.train(stagnant, workdir) == 0
    assert read_summary(workdir)["steps"] == 8 and read_steps(workdir, "eval") == [2, 4, 6, 8]


def test_patience_requires_evaluations():
    c = config.base()
    c.eval.update(patience=3, every=0)
    with refuses("eval.patience=3", "eval.every=0"):
        config.check(c)
