"""Metrics log: cut to the restored step, without partial lines or bare NaN; config files, plots and progress lines."""

import json
import math

import pytest
from messages import mentions, refuses
from small_runs import make_small_config

from leanformer.costs import devices
from leanformer.tasks import Score
from leanformer.training import run_files, train_setup


def write_records(path, *records, tail=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + tail)


def test_resume_drops_records_after_the_restored_step(tmp_path):
    write_records(
        tmp_path / "metrics.jsonl", *({"step": s, "kind": "train", "loss": s} for s in (2, 4, 6)), tail='{"step": 8'
    )
    with run_files.Recorder(tmp_path, start=4, total=9) as record:
        assert record.has(4, "train") and not record.has(6, "train") and not record.has(4, "eval")
        record.write(6, "train", {"loss": 0.5})
    result = run_files.read_records(tmp_path)
    assert [(r["step"], r["loss"]) for r in result] == [(2, 2), (4, 4), (6, 0.5)]


def test_start_from_scratch_keeps_no_record(tmp_path):
    """A record of step 0 may describe another model, if a run ended before its first step."""
    write_records(tmp_path / "metrics.jsonl", {"step": 0, "kind": "probe"})
    with run_files.Recorder(tmp_path, start=0, total=9) as record:
        assert not record.has(0, "probe")
        record.begin()
    assert run_files.read_records(tmp_path) == []


def test_mfu_is_training_flops_over_peak_flops(tmp_path, monkeypatch, meshes):
    c = make_small_config("points", tmp_path)
    c.dtype = "bfloat16"
    monkeypatch.setattr(devices, "peak_flops", lambda device: 3e9)
    setup = train_setup.set_up_training(c, examples=16, mesh=meshes(2, 1))
    forward, training = setup.flops_per_example
    assert training > 2 * forward and setup.peak_examples == pytest.approx(2 * 3e9 / training)


def test_non_finite_scores_are_written_as_null_and_read_as_nan(tmp_path):
    with run_files.Recorder(tmp_path, start=0, total=9) as record:
        for step, value in ((1, 0.5), (2, float("nan"))):
            record.write(step, "eval", {"error": value})
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"step": 2, "kind": "eval", "error": None}
    result = run_files.read_scores(tmp_path, "error")
    assert result[1] == 0.5 and math.isnan(result[2]) and Score("error", higher=False).best(result) == 1


def test_workdir_is_locked_by_one_run(tmp_path):
    with run_files.lock_workdir(tmp_path / "run"):
        with refuses(tmp_path / "run"), run_files.lock_workdir(tmp_path / "run", 0.3):
            pass
        with run_files.lock_workdir(tmp_path / "other"):
            pass
    with run_files.lock_workdir(tmp_path / "run", 0.0):
        pass


def test_changes_of_config_data_and_environment_are_reported(tmp_path, tiny, capfd, monkeypatch):
    run_files.warn_changes(tmp_path, tiny, {})
    run_files.write_config(tmp_path, tiny, examples={"train": 64})
    run_files.warn_changes(tmp_path, tiny, {"train": 64})
    assert capfd.readouterr().err == ""
    tiny.optim.lr = 0.5
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    run_files.warn_changes(tmp_path, tiny, {"train": 63})
    assert run_files.load_config(tmp_path).optim.lr == 0.003
    run_files.write_config(tmp_path, tiny)
    assert mentions(capfd.readouterr().err, "optim.lr", "0.003 -> 0.5", "train: 64 -> 63", "NVIDIA_TF32_OVERRIDE")
    assert run_files.load_config(tmp_path).optim.lr == 0.5
