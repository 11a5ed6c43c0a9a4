"""The command line, from a config to plots: real runs in processes of their own."""

import json
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from commands import ROOT, command, environment, inside, run
from jax.sharding import AxisType
from PIL import Image

from leanformer.runtime.mesh import BATCH
from leanformer.training import experiment, report
from leanformer.training.checkpoint import Checkpoints


TINY = {  # a real run with everything random switched on: mixup, cutmix, erasing, drop path, averaging, accumulation
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


def final_state(workdir):
    """The newest checkpoint, on one device."""
    c = report.read_config(workdir)
    mesh = jax.make_mesh((1, 1), BATCH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    like = experiment.build(c, examples=10_000, mesh=mesh).like
    with Checkpoints(workdir / "checkpoints") as saved:
        return saved.restore(like)[0]


def record(workdir):
    """metrics.jsonl without what the clock measured."""
    found = report.read_records(workdir / "metrics.jsonl")
    return [{key: value for key, value in r.items() if key not in report.TIMING} for r in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    status, out, err = run(command("train", workdir, TINY))
    assert status == 0, err
    return workdir, out


def assert_same_run(workdir, other):
    a, b = final_state(workdir), final_state(other)
    assert int(a.step) == 40
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert record(workdir) == record(other)


@pytest.mark.slow
def test_a_run_leaves_everything_it_promises(undisturbed):
    workdir, out = undisturbed
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 40 and summary["final"]["examples"] == 2000 and summary["unreadable_examples"] == 0
    assert {"top1", "top5", "loss", "ema_top1", "ema_loss"} <= summary["final"].keys()
    assert {p.name for p in (workdir / "plots").iterdir()} == {"loss.png", "accuracy.png", "lr.png", "conditioning.png"}
    assert json.loads((workdir / "config.json").read_text())["config"]["model"]["width"] == 24
    assert list((workdir / "tensorboard").iterdir())
    for said in ("parameters", "FLOPs per example", "peak memory", "attention", "32 global = 16 a device", "mesh"):
        assert said in out
    kinds = {kind: [r["step"] for r in record(workdir) if r["kind"] == kind] for kind in ("train", "eval", "probe")}
    assert kinds == {"train": [*range(5, 41, 5)], "eval": [10, 20, 30, 40], "probe": [0, 10, 20, 30, 40]}
    probed = next(r for r in record(workdir) if r["kind"] == "probe")["attention_output"]
    assert len(probed["median"]) == 3 and all(
        low <= high for low, high in zip(probed["q10"], probed["q90"], strict=True)
    )


@pytest.mark.slow
def test_killed_three_times_and_resumed_bit_for_bit(undisturbed, tmp_path):
    """kill -9 at random moments of training, saving and evaluating; the same command goes on each time."""
    chance = random.Random(20505)
    for _ in range(3):
        begun = len(record(tmp_path))
        process = subprocess.Popen(
            command("train", tmp_path, TINY),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline and len(record(tmp_path)) < begun + 2:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < len(record(tmp_path)) < 12
    status, out, err = run(command("train", tmp_path, TINY))
    assert status == 0, err
    assert "Going on from step" in out
    assert_same_run(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(undisturbed, tmp_path):
    process = subprocess.Popen(
        command("train", tmp_path, TINY),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline and len(record(tmp_path)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Saved at step" in out and f"--workdir={tmp_path}" in out and "SIGINT: saving" in err
    status, _, err = run(command("train", tmp_path, TINY))
    assert status == 0, err
    assert_same_run(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_evaluate_agrees_with_the_last_record(undisturbed):
    workdir, _ = undisturbed
    status, out, err = run(command("evaluate", workdir, config=None))
    assert status == 0, err
    found = json.loads((workdir / "evaluation.json").read_text())
    last = [r for r in record(workdir) if r["kind"] == "eval"][-1]
    assert {k: found[k] for k in last if k != "kind"} == {k: v for k, v in last.items() if k != "kind"}
    assert "ema_top1" in out


@pytest.mark.slow
def test_a_finished_run_says_so(undisturbed, one_device):
    status, out, err = inside(command("train", undisturbed[0], TINY))
    assert status == 0 and "complete: 40 steps" in out, err


@pytest.mark.slow
def test_a_run_killed_before_its_summary_makes_it_later(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    (workdir / "summary.json").unlink()
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(lines[:-2]))  # without the last evaluation and probe
    status, _, err = run(command("train", workdir, TINY))
    assert status == 0, err
    assert json.loads((workdir / "summary.json").read_text())["final"]["step"] == 40
    assert_same_run(workdir, undisturbed[0])


@pytest.mark.slow
def test_nan_stops_with_step_and_leaf(tmp_path):
    changes = TINY | {"optim.lr": 1e30, "optim.clip_norm": 0.0, "optim.max_skipped": 3, "optim.warmup_epochs": 0.0}
    status, _, err = run(command("train", tmp_path, changes))
    assert status == 2
    assert "3 steps in a row were not finite, from step" in err and "first bad gradient:" in err
    assert "Traceback" not in err
    last = report.read_records(tmp_path / "metrics.jsonl")[-1]
    assert last["kind"] == "abort" and last["skipped_in_row"] == 3 and last["leaf"] in err


BAD = [
    ({"model.widht": 3}, 'Did you mean "width"'),
    ({"model.num_heads": "many"}, "invalid literal for int"),
    ({"model.patch_size": 5}, "nearest patch sizes that fit: 4 or 7"),
    ({"data.name": "folder:/no/such/folder"}, "there is no such folder"),
    ({"data.eval_split": "test"}, "has no test-images-idx3-ubyte"),
    ({"model.num_classes": 3}, "has 10 classes, model.num_classes=3"),
    ({"model.backend": "cudnn", "model.head_dim": 16}, '"cudnn" cannot run: the device is a cpu'),
    ({"model.name": "vti"}, 'model.name="vti" is not a family here. Known: '),
    ({"mesh.fsdp": 3}, "is 0 devices, found 1|cannot"),
    ({"optim.warmup_epochs": 19.999}, "the whole run is"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[next(iter(b[0])) for b in BAD])
def test_bad_input_is_one_message(tmp_path, changes, message):
    status, _, err = inside(command("train", tmp_path, {"total_epochs": 20.0} | changes))
    assert status == 2
    assert re.search(message, err), err
    assert not (tmp_path / "checkpoints").exists()  # before any device work


def test_a_config_that_is_not_there(tmp_path):
    status, _, err = inside(command("train", tmp_path, config="configs/nope.py"))
    assert status == 2 and "The config configs/nope.py cannot be loaded" in err


def test_cost_prints_one_object():
    words = [*command("cost", changes={"batch_size": 8}), "--against=configs/quickstart_baseline.py", "--json"]
    status, out, err = inside(words)
    assert status == 0, err
    found = json.loads(out)
    assert found["params"] == 269_194 and found["against"]["params"] == 678_730
    assert all(found[key] > 0 for key in ("forward_flops", "train_flops", "train_memory_bytes"))


def test_prepare_looks_and_says(tmp_path):
    status, out, _ = inside([*command("prepare"), "check"])
    assert status == 0 and "10000" in out and "2000" in out
    status, _, err = inside([*command("prepare", changes={"data.name": f"folder:{tmp_path}"}), "check"])
    assert status == 2 and 'neither a folder "train"' in err
    status, _, err = inside(command("prepare"))
    assert status == 2 and "one of: check, build, cache; found nothing" in err


@pytest.mark.slow
def test_broken_jpegs_are_named_counted_and_too_many_stop(tmp_path, rng):
    """A folder of JPEGs, one truncated and one no image, read by a worker process."""
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
    assert status == 2 and "examples are unreadable, over data.max_corrupt=0.01" in err and "leaked" not in err


@pytest.mark.slow
def test_a_checkpoint_of_another_shape_leaves_the_run_as_it_was(undisturbed, one_device):
    workdir, _ = undisturbed
    before = (workdir / "config.json").read_text()
    status, _, err = inside(command("train", workdir, TINY | {"model.width": 32, "total_steps": 50}))
    assert status == 2 and "is of another model" in err and "THE CONFIG CHANGED" in err
    assert (workdir / "config.json").read_text() == before
