"""The `train` command: refused configs, and long runs that are killed, stopped and resumed."""

import json
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from commands import ROOT, check_refused, command, run, subprocess_environment
from messages import mentions
from PIL import Image
from small_runs import assert_same_run, read_records

from leanformer.training import run_files


TINY = {  # a real run with everything random switched on: mixup, cutmix, erasing, drop path, EMA, accumulation
    **{"total_epochs": 0.0, "total_steps": 40, "batch_size": 32, "accumulate": 2, "log_every": 5},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "model.drop_path": 0.2},
    **{"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.erase": 0.25, "augment.rand_magnitude": 9.0},
    **{
        "optim.ema": 0.9,
        "optim.warmup_epochs": 0.01,
        "eval.every": 10,
        "checkpoint.every": 8,
        "probe.every": 10,
        "probe.examples": 4,
    },
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    status, out, err = run(command("train", workdir, TINY))
    assert status == 0, err
    return workdir, out


@pytest.mark.slow
def test_records_are_written_when_due(uninterrupted):
    workdir, _ = uninterrupted
    steps = {kind: [r["step"] for r in read_records(workdir, kind)] for kind in ("train", "eval", "probe")}
    assert steps == {"train": [*range(5, 41, 5)], "eval": [10, 20, 30, 40], "probe": [0, 10, 20, 30, 40]}


@pytest.mark.slow
def test_killed_run_resumes_bit_exactly(uninterrupted, tmp_path):
    """Three times kill -9 at random moments of training, saving and evaluating; the same command resumes the run."""
    generator = random.Random(20505)
    for _ in range(3):
        count = len(read_records(tmp_path))
        process = subprocess.Popen(
            command("train", tmp_path, TINY),
            cwd=ROOT,
            env=subprocess_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline and len(read_records(tmp_path)) < count + 2:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < len(read_records(tmp_path)) < 12
    status, _, err = run(command("train", tmp_path, TINY))
    assert status == 0, err
    assert_same_run(tmp_path, uninterrupted[0], 40)


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_how_to_resume(uninterrupted, tmp_path):
    process = subprocess.Popen(
        command("train", tmp_path, TINY),
        cwd=ROOT,
        env=subprocess_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline and len(read_records(tmp_path)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert mentions(out, f"--workdir={tmp_path}") and mentions(err, "SIGINT")
    status, _, err = run(command("train", tmp_path, TINY))
    assert status == 0, err
    assert_same_run(tmp_path, uninterrupted[0], 40)


@pytest.mark.slow
def test_run_killed_before_its_summary_writes_it_on_resume(uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], workdir)
    (workdir / "summary.json").unlink()
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(lines[:-2]))  # without the last evaluation and probe
    status, _, err = run(command("train", workdir, TINY))
    assert status == 0, err
    assert json.loads((workdir / "summary.json").read_text())["final"]["step"] == 40
    assert_same_run(workdir, uninterrupted[0], 40)


@pytest.mark.slow
def test_nan_aborts_with_step_and_leaf(tmp_path):
    changes = TINY | {"optim.lr": 1e30, "optim.clip_norm": 0.0, "optim.max_skipped": 3, "optim.warmup_epochs": 0.0}
    status, _, err = run(command("train", tmp_path, changes))
    assert status == 2
    assert mentions(err, 3) and "Traceback" not in err
    last = run_files.read_records(tmp_path)[-1]
    assert last["kind"] == "abort" and last["skipped_in_row"] == 3 and last["leaf"] in err


BAD = [
    ({"model.patch_size": 5}, ["model.patch_size=5", "model.image_size=28"]),
    ({"data.name": "folder:/no/such/folder"}, ["/no/such/folder"]),
    ({"model.backend": "cudnn", "model.head_dim": 16}, ["cudnn", "cpu"]),
    ({"optim.warmup_epochs": 19.999}, ["optim.warmup_epochs=19.999"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=[next(iter(b[0])) for b in BAD])
def test_bad_input_is_one_message(tmp_path, changes, parts):
    check_refused(command("train", tmp_path, {"total_epochs": 20.0} | changes), *parts)
    assert not (tmp_path / "checkpoints").exists()  # before any device work


@pytest.mark.slow
def test_broken_jpegs_are_reported_and_too_many_abort(tmp_path, rng):
    """A worker process reads a folder of JPEGs, of which one is truncated and one is no image."""
    for label in ("cat", "dog"):
        for split, number in (("train", 30), ("val", 4)):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(number):
                picture = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(picture).save(tmp_path / split / label / f"{i}.jpg")
    truncated, garbage = tmp_path / "train" / "cat" / "3.jpg", tmp_path / "train" / "dog" / "7.jpg"
    truncated.write_bytes(truncated.read_bytes()[:700])
    garbage.write_bytes(b"this is no image")
    changes = {"data.name": f"folder:{tmp_path}", "data.eval_split": "val", "data.workers": 1}
    changes |= {"model.channels": 3, "model.num_classes": 2, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3}
    changes |= {"total_epochs": 0.0, "total_steps": 5, "batch_size": 15, "optim.warmup_epochs": 0.0, "probe.every": 0}
    status, _, err = run(command("train", tmp_path / "few", changes | {"data.max_corrupt": 0.05}))
    assert status == 0, err
    assert str(truncated) in err and str(garbage) in err and "leaked" not in err
    assert json.loads((tmp_path / "few" / "summary.json").read_text())["unreadable_examples"] == 2
    status, _, err = run(command("train", tmp_path / "many", changes | {"data.max_corrupt": 0.01}))
    assert status == 2 and mentions(err, "data.max_corrupt=0.01") and "leaked" not in err
