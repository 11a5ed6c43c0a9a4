"""Sweeps: the grid, what is skipped, what failed and why, and an interruption that loses nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train import ROOT, environment

from leanformer import sweep
from leanformer.errors import ConfigError


CONFIGS = [str(ROOT / "configs" / f"{name}.py") for name in ("quickstart", "quickstart_baseline")]
SMALL = {
    **{"total_epochs": 0, "total_steps": 6, "batch_size": 16, "eval.every": 0, "eval.batch_size": 500, "log_every": 2},
    **{"optim.warmup_epochs": 0, "probe.every": 0, "checkpoint.every": 2, "model.depth": 1, "model.width": 16},
}


def test_members_are_the_product(tmp_path):
    found = sweep.members(CONFIGS, ["model.num_heads=2,4", "optim.lr=1e-3"], ["model.depth=1"], 2, tmp_path)
    assert len(found) == 2 * 2 * 1 * 2
    assert found[1].workdir == tmp_path / "quickstart,num_heads=2,lr=1e-3,seed=1"
    for word in ("--config.model.num_heads=2", "--config.seed=1", "--config.model.depth=1", f"--config={CONFIGS[0]}"):
        assert word in found[1].command


@pytest.mark.parametrize(
    ("configs", "over", "seeds", "message"),
    [
        ([], [], 1, "--config: none cannot be found"),
        (["nowhere.py"], [], 1, "nowhere.py cannot be found"),
        (CONFIGS, ["model.num_heads"], 1, '--over="model.num_heads" is not KEY=VALUE'),
        (CONFIGS, [], 0, "--seeds=0: at least 1"),
        (CONFIGS, ["model.width=1", "optim.width=2"], 1, "the same name|cannot"),
    ],
)
def test_what_cannot_be(configs, over, seeds, message, tmp_path):
    if over == ["model.width=1", "optim.width=2"]:
        configs = [CONFIGS[0], CONFIGS[0]]
    with pytest.raises(ConfigError, match=message):
        sweep.members(configs, over, [], seeds, tmp_path)


def command(folder, *words):
    fixed = [f"--set={key}={value}" for key, value in SMALL.items()]
    return [
        sys.executable,
        "-m",
        "leanformer.sweep",
        f"--config={','.join(CONFIGS)}",
        f"--workdir={folder}",
        *fixed,
        *words,
    ]


@pytest.mark.slow
def test_interrupted_and_run_again(tmp_path):
    """2 configs x 2 seeds: killed after the first is finished; the second command runs only what is missing."""
    words = command(tmp_path, "--seeds=2")
    first = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    summaries = lambda: sorted(tmp_path.glob("*/summary.json"))  # noqa: E731
    end = time.monotonic() + 240
    while not summaries() and time.monotonic() < end and first.poll() is None:
        time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    first.wait(120)
    before = {path: path.stat().st_mtime_ns for path in summaries()}
    assert 1 <= len(before) < 4

    again = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert again.returncode == 0, again.stderr
    assert f"4 members, {len(before)} finished already" in again.stdout
    assert len(summaries()) == 4
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert again.stdout.count("top1") == 4


@pytest.mark.slow
def test_a_failed_member_is_listed_with_its_log(tmp_path):
    words = command(tmp_path, "--over=model.head_dim=0")
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stderr and "model.head_dim=0 must be at least 1" in done.stderr
    assert len(json.loads((Path(tmp_path) / "sweep.json").read_text())["failed"]) == 2
