"""The `train` command: refused configs and data, and a run that is killed and resumed."""

import json
import random
import time

import numpy as np
import pytest
from commands import check_refused, command, run, start
from messages import mentions
from PIL import Image
from small_runs import assert_same_run, read_records


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


@pytest.mark.slow
def test_killed_run_resumes_bit_exactly(tmp_path):
    """Three times kill -9 at random moments of training, saving and evaluating; the same command resumes the run."""
    generator, killed, whole = random.Random(20505), tmp_path / "killed", tmp_path / "whole"
    for _ in range(3):
        count = len(read_records(killed))
        process = start(command("train", killed, TINY))
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline and len(read_records(killed)) < count + 2:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        process.kill()
        process.communicate()
    assert 0 < len(read_records(killed)) < 12
    for workdir in (killed, whole):
        status, _, err = run(command("train", workdir, TINY))
        assert status == 0, err
    assert_same_run(killed, whole, 40)


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
