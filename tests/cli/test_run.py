"""A training run of two steps, and every other command applied to its folder."""

import csv
import json
import os
import socket

import numpy as np
import pytest
from commands import check_refused, command, run, run_in_process
from golden import check_page
from messages import mentions
from PIL import Image
from small_runs import read_records

from leanformer import text
from leanformer.conditioning import tables


SMALL = {  # no features that only add compile time: test_train has mixup, erasing and accumulation
    **{"total_epochs": 0.0, "total_steps": 2, "batch_size": 32, "log_every": 1},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "model.depth": 2},
    **{"augment.mixup": 0.0, "augment.cutmix": 0.0, "optim.ema": 0.9},
    **{"eval.every": 0, "checkpoint.every": 1, "probe.every": 1, "probe.examples": 8},
    "probe.measures": ("tokens", "attention_entropy"),  # others are singular or not depending on rounding
    **{"optim.warmup_epochs": 0.0, "optim.warmup_steps": 1},
}


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """Train for two steps, and return the run's folder and the command's output."""
    workdir = tmp_path_factory.mktemp("run") / "small"
    status, out, err = run(command("train", workdir, SMALL))
    assert status == 0, err
    return workdir, out


@pytest.fixture
def workdir(trained_run):
    return trained_run[0]


def test_train_prints_the_expected_pages(trained_run):
    workdir, out = trained_run
    check_page("train", out, [workdir])
    assert mentions(out, "width 24", "num_heads 4", "mlp_dim 32", "data 1, fsdp 1, tensor 1", "1 process")


def test_train_writes_records_checkpoints_and_plots(workdir):
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["steps"], summary["unreadable_examples"]) == (2, 0)
    assert summary["final"]["examples"] == 2000
    assert {"top1", "top5", "loss", "ema_top1", "ema_loss"} <= summary["final"].keys()
    assert {p.name for p in (workdir / "plots").iterdir()} == {"loss.png", "accuracy.png", "lr.png", "conditioning.png"}
    assert json.loads((workdir / "config.json").read_text())["config"]["model"]["width"] == 24
    assert list((workdir / "tensorboard").iterdir())
    steps = {kind: [record["step"] for record in read_records(workdir, kind)] for kind in ("train", "eval", "probe")}
    assert steps == {"train": [1, 2], "eval": [2], "probe": [0, 1, 2]}
    tokens = read_records(workdir, "probe")[0]["tokens"]
    assert len(tokens["median"]) == 2
    assert all(low <= high for low, high in zip(tokens["q10"], tokens["q90"], strict=True))


def test_a_dry_run_writes_nothing(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    hidden = [workdir, tmp_path, os.environ["XLA_FLAGS"]]
    for name, folder in (("train_dry_run", tmp_path / "new"), ("train_dry_run_resumed", workdir)):
        before = sorted(folder.rglob("*"))
        status, out, err = run_in_process([*command("train", folder, SMALL), "--dry_run"])
        assert status == 0, err
        check_page(name, out, hidden)
        assert sorted(folder.rglob("*")) == before


def test_evaluate_agrees_with_the_last_record(workdir):
    """The values are bit-equal, as program and device are the same."""
    status, out, err = run_in_process(command("evaluate", workdir, config=None))
    assert status == 0, err
    result = json.loads((workdir / "evaluation.json").read_text())
    (last,) = read_records(workdir, "eval")
    assert {key: result[key] for key in last if key != "kind"} == {k: v for k, v in last.items() if k != "kind"}
    assert text.lookup("ema_top1").axis in out
    with (workdir / "confusion.csv").open(newline="") as file:
        matrix = np.array([row[1:] for row in csv.reader(file)][1:], float)
    accuracy = np.trace(matrix) / matrix.sum()  # of the EMA weights, if the run has them
    assert accuracy == pytest.approx(result["ema_top1"], abs=1e-9) != pytest.approx(result["top1"], abs=1e-9)
    assert [*result["accuracy_by_class"].values()] == pytest.approx(np.diag(matrix) / matrix.sum(axis=1))


def test_finished_run_is_unchanged(workdir):
    before = (workdir / "metrics.jsonl").read_bytes()
    status, out, err = run_in_process(command("train", workdir, SMALL))
    assert status == 0 and mentions(out, 2, workdir, "total_steps"), err
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_predict_uses_the_class_names_of_the_run(workdir, tmp_path):
    Image.fromarray(np.zeros((30, 21), np.uint8)).save(tmp_path / "a.png")
    status, out, err = run_in_process([*command("predict", workdir, config=None), "--top=3", str(tmp_path / "a.png")])
    assert status == 0, err
    (line,) = map(json.loads, out.splitlines())
    names = json.loads((workdir / "classes.json").read_text())
    assert len(line["classes"]) == 3 and {result["class"] for result in line["classes"]} <= {*names}


def test_probe_of_all_checkpoints_and_head_counts(workdir):
    status, out, err = run_in_process([*command("probe", workdir, config=None), "--all", "--heads=4", "--seeds=1"])
    assert status == 0, err
    result = json.loads((workdir / "probe" / "probe.json").read_text())
    for snapshot in result["snapshots"]:  # test_probe checks the layout of tables
        assert tables.format_table(snapshot["measures"]) in out
    assert tables.format_sweep(result["sweep"]) in out and mentions(out, workdir, 8, "float32")
    assert [snapshot["step"] for snapshot in result["snapshots"]] == [1, 2] and result["examples"] == 8
    assert result["versions"]["jax"] and len(result["sweep"]["points"]) == 2
    assert all(len(entry["layers"]) == 2 for entry in result["snapshots"][-1]["measures"].values())
    names = {"by_layer.png", "over_steps.png", "over_heads.png", "spectra.png"}
    assert {p.name for p in (workdir / "probe").iterdir()} == names | {"probe.json"}
    assert all((workdir / "probe" / name).stat().st_size > 10_000 for name in names)


def test_cost_of_two_configs():
    words = [*command("cost", config="rank_nn_small"), "--against=rank_nn_small", "--against.model.depth=2"]
    status, out, err = run_in_process([*words, "--config.batch_size=32", "--against.batch_size=32", "--json"])
    assert status == 0, err
    result = json.loads(out)
    assert result["batch_size"] == 32 and result["against"]["modules"].keys() == result["modules"].keys()
    for key in ("params", "forward_flops", "train_flops", "train_memory_bytes"):
        assert 0 < result["ratios"][key] == result[key] / result["against"][key] < 1


def test_prepare_check_reports_the_data(tmp_path):
    status, out, _ = run_in_process([*command("prepare"), "check"])
    assert status == 0
    check_page("prepare_check", out)
    assert mentions(out, 10000, 2000)
    check_refused([*command("prepare", changes={"data.name": f"folder:{tmp_path}"}), "check"], tmp_path, "train")
    check_refused(command("prepare"), "check", "build")
