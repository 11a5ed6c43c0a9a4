"""Sweeps: the grid, skipped runs, failed runs with their reasons, SLURM arrays, and interruptions without loss."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import fake_runs
import pytest
from commands import ROOT, run_in_process, start, subprocess_environment
from messages import mentions, refuses
from processes import read_records_by_step

from leanformer import sweep
from leanformer.config import iterate_keys
from leanformer.sweeps import runs


CONFIGS = [str(ROOT / "configs" / f"{name}.py") for name in ("quickstart", "quickstart_baseline")]
SMALL = {"total_epochs": 0, "total_steps": 150, "batch_size": 16, "eval.every": 0, "eval.batch_size": 512}
SMALL |= {"log_every": 1, "optim.warmup_epochs": 0, "probe.every": 0, "checkpoint.every": 50}
SMALL |= {"model.depth": 1, "model.width": 16}


def test_runs_are_the_product_of_the_grid(tmp_path):
    result = runs.make_runs(CONFIGS, ["model.num_heads=2,4", "optim.lr=1e-3"], ["model.depth=1"], 2, tmp_path)
    assert len(result) == 2 * 2 * 1 * 2
    assert result[1].workdir == tmp_path / "quickstart,num_heads=2,lr=1e-3,seed=1"
    for word in ("--config.model.num_heads=2", "--config.seed=1", "--config.model.depth=1", f"--config={CONFIGS[0]}"):
        assert word in result[1].command


def test_keys_of_one_flag_move_together(tmp_path):
    result = runs.make_runs(CONFIGS[:1], ["model.num_heads,model.head_dim=2x32,4x16,8x8"], [], 1, tmp_path)
    assert [run.workdir.name for run in result] == [
        f"quickstart,num_heads={heads},head_dim={64 // heads},seed=0" for heads in (2, 4, 8)
    ]
    assert [(run.config.model.num_heads, run.config.model.head_dim) for run in result] == [(2, 32), (4, 16), (8, 8)]


@pytest.mark.parametrize(
    ("configs", "over", "names"),
    [  # flat names: nested folders would not be recognised as runs, and paths with the same last part would collide
        (CONFIGS[:1], ["init_from.path=/a/x,/b/x"], ["quickstart,path=_a_x,seed=0", "quickstart,path=_b_x,seed=0"]),
        (["vit_b:depth=8", "heads=14", CONFIGS[0]], [], ["vit_b,depth=8,heads=14,seed=0", "quickstart,seed=0"]),
    ],
)
def test_folders_are_named_after_configs_and_values(configs, over, names, tmp_path):
    result = runs.make_runs(configs, over, [], 1, tmp_path)
    assert [run.workdir for run in result] == [tmp_path / name for name in names]


@pytest.mark.parametrize(
    ("configs", "over", "fixed", "parts"),
    [
        (["nowhere.py"], [], [], ["nowhere.py"]),
        (CONFIGS, ["model.num_heads"], [], ['--over="model.num_heads"', "KEY=VALUE"]),
        (CONFIGS, ["model.num_heads,model.head_dim=2x32,4"], [], ["--over=model.num_heads", 4, 2]),
        (CONFIGS, ["seed=1,2"], [], ["--seeds=N", "seed"]),
        (CONFIGS, [], ["seed=5"], ["--seeds=N", "seed"]),
        (CONFIGS, ["optim.lr=1e-3"], ["optim.lr=1e-2"], ["optim.lr", "twice"]),
        (CONFIGS[:1] * 2, ["model.width=1"], [], ["quickstart,width=1,seed=0"]),  # runs of the same name
    ],
)
def test_invalid_sweeps_are_refused(configs, over, fixed, parts, tmp_path):
    with refuses(*parts):
        runs.make_runs(configs, over, fixed, 1, tmp_path)


def test_nothing_starts_if_one_run_is_invalid(tmp_path):
    words = [f"--config={CONFIGS[0]},vit_b:depth=8", "--over=model.head_dim=16,0", "--seeds=2", f"--workdir={tmp_path}"]
    status, out, err = run_in_process(["", "", "leanformer.sweep", *words])
    assert (status, out) == (2, "") and not list(tmp_path.iterdir())
    assert mentions(err, "quickstart,head_dim=0,seed=0", "model.head_dim=0", 1)


@pytest.fixture
def unfinished_sweep(tmp_path, monkeypatch):
    """Write three runs, the last of them unfinished; return them and a list of what is started later."""
    started = []
    monkeypatch.setattr(runs, "_run_here", lambda pending, *_: started.append([*pending]))
    monkeypatch.setattr(sweep, "compare_finished", lambda *_: None)
    members = runs.make_runs(CONFIGS[:1], ["model.depth=1,2,3"], ["total_epochs=3.0"], 1, tmp_path)
    for depth, run in enumerate(members, 1):
        fake_runs.write_run(run.workdir, changes={"model.depth": depth, "total_epochs": 3.0}, ended=depth < 3)
    return members, started


def repeat_sweep(folder, *words, over="model.depth=1,2,3", epochs="3.0"):
    length = () if any("total_epochs" in word for word in words) else (f"--set=total_epochs={epochs}",)
    words = [f"--config={CONFIGS[0]}", f"--over={over}", *length, f"--workdir={folder}", *words]
    return run_in_process(["", "", "leanformer.sweep", *words])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--set=optim.lr=0.5"], ["quickstart,depth=1,seed=0", "optim.lr=0.002", 0.5, "--workdir"]),
        (["--set=total_epochs=1.0"], ["quickstart,depth=1,seed=0", "total_epochs=3.0", 1.0, "--workdir"]),
        (["--slurm=partition=x"], ["--slurm=partition=x", "--cluster=slurm"]),
    ],
)
def test_changed_configs_and_wrong_flags_start_nothing(unfinished_sweep, tmp_path, words, parts):
    status, out, err = repeat_sweep(tmp_path, *words)
    assert (status, out) == (2, "") and mentions(err, *parts) and not unfinished_sweep[1]
    assert [run.finished for run in unfinished_sweep[0]] == [True, True, False]


def test_grid_points_seeds_and_keys_without_effect_on_results_may_be_added(unfinished_sweep, tmp_path):
    same = ("--set=data.workers=3", "--set=probe.every=7", "--set=model.remat=block")
    repeat_sweep(tmp_path, "--seeds=2", *same, over="model.depth=1,2,3,4")
    assert [run.workdir.name for run in unfinished_sweep[1][0]] == [
        *("quickstart,depth=1,seed=1", "quickstart,depth=2,seed=1", "quickstart,depth=3,seed=0"),
        *("quickstart,depth=3,seed=1", "quickstart,depth=4,seed=0", "quickstart,depth=4,seed=1"),
    ]


def test_longer_training_resumes_finished_runs(unfinished_sweep, tmp_path):
    members, started = unfinished_sweep
    _, out, _ = repeat_sweep(tmp_path, epochs="4.0")
    assert mentions(out, "quickstart,depth=1,seed=0", "total_epochs", "3.0 -> 4.0")
    assert [run.workdir for run in started[0]] == [run.workdir for run in members]


class FakeRun(runs.SweepRun):
    """Run whose command is a shell script."""

    @property
    def command(self):
        return ["bash", "-c", self.words[0]]


def make_script(folder, score):
    """Return a script that finishes a run, or one that fails if `score` is None."""
    if score is None:
        return "echo it broke; exit 3"
    source = fake_runs.write_run(folder.with_name(f"{folder.name}_made"), score)
    return f"test ! -e {folder}/summary.json && mkdir -p {folder} && cp {source}/* {folder}"


@pytest.fixture
def fake_sweep_runs(tmp_path):
    """Return three runs: one that is extended, a new one, and one that fails."""
    (tmp_path / "logs").mkdir()
    fake_runs.write_run(tmp_path / "a", 0.1)
    scores = {"a": 0.5, "b": 0.75, "c": None}
    return [FakeRun(tmp_path / name, (make_script(tmp_path / name, score),)) for name, score in scores.items()]


@pytest.fixture
def make_flags(monkeypatch):
    """Return a function that makes flags; the tests keep their handlers of signals."""
    monkeypatch.setattr(runs.signal, "signal", lambda *_: None)
    return lambda **values: runs.cli.Values(**{"slurm": (), "minutes": 5, "parallel": 2} | values)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Install an sbatch that executes its script for each index, and records its flags."""
    script = tmp_path / "sbatch"
    script.write_text(
        f'#!/bin/bash\necho "$@" >{tmp_path}/flags\n[[ "$*" == *nope* ]] && exit 1\necho "Submitted batch job 7"\n'
        'sleep 0.5; for i in 0 1 2; do SLURM_ARRAY_TASK_ID=$i bash "${@: -1}"; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "flags"


def test_slurm_executes_the_runs_as_an_array(fake_sweep_runs, sbatch, tmp_path, make_flags, capsys):
    flags = make_flags(slurm=("gpus_per_node=8", "partition=x"))
    runs._run_as_array(fake_sweep_runs, tmp_path / "logs", os.environ, flags)
    assert mentions(sbatch.read_text(), "--array=0-2%2", "--time=5", "--gpus-per-node=8", "--partition=x")
    assert mentions(capsys.readouterr().out, 7) and [run.finished for run in fake_sweep_runs] == [True, True, False]
    assert runs._end_of_log(fake_sweep_runs[2], tmp_path / "logs") == "it broke"


def test_refused_array_keeps_finished_runs(fake_sweep_runs, sbatch, tmp_path, make_flags):
    with refuses("--partition=nope"):
        runs._run_as_array(fake_sweep_runs, tmp_path / "logs", os.environ, make_flags(slurm=("partition=nope",)))
    assert [run.finished for run in fake_sweep_runs] == [True, False, False]


@pytest.mark.parametrize(
    ("environment", "installed", "shares"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 8, ["4,5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "1,2,3"}, 8, ["1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, ["", ""]),
        ({}, 4, ["0,1", "2,3"]),
        ({}, 0, [None, None]),
        ({"JAX_PLATFORMS": "cpu"}, 1, [None, None]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4", "CUDA_VISIBLE_DEVICES": "5"}, 8, ["5", "5"]),
    ],
)
def test_gpus_are_divided_among_parallel_runs(monkeypatch, environment, installed, shares):
    monkeypatch.setattr(runs.mesh, "count_gpus", lambda: installed)
    result = runs.environments({"HOME": "/", **environment}, 2)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in result] == shares
    assert all(environment.keys() <= one.keys() and one["HOME"] == "/" for one in result)


def test_more_parallel_runs_than_gpus_are_refused(monkeypatch):
    """Each would take 75 % of the memory of the same GPUs."""
    monkeypatch.setattr(runs.mesh, "count_gpus", lambda: 2)
    with refuses("--parallel=3", 2, "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        runs.environments({"HOME": "/"}, 3)


def test_run_is_stopped_if_its_sweep_is_killed_and_its_process_imports_no_jax(tmp_path):
    """The sweep is a shell that starts the child and ends."""
    state = tmp_path / "state"
    trap = f"trap 'echo saved >{state}; exit 75' TERM; echo >{tmp_path}/begun; while :; do sleep 0.1; done"
    child = [sys.executable, "-X", "importtime", "-m", "leanformer.sweeps.child", "bash", "-c", trap]
    shell = f'"$@" 2>{tmp_path}/imports & while ! test -e {tmp_path}/begun; do sleep 0.1; done'
    subprocess.run(["bash", "-c", shell, "sweep", *child], env=subprocess_environment(), cwd=ROOT, timeout=60)
    end = time.monotonic() + 30
    while not state.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert state.read_text() == "saved\n" and " jax" not in (tmp_path / "imports").read_text()


def test_sweep_ends_with_a_comparison_of_its_runs(tmp_path, capsys):
    folder = fake_runs.write_sweep(tmp_path / "s", depths=(2,), seeds=2)
    result = [runs.SweepRun(path, ()) for path in folder.iterdir()]
    sweep.compare_finished(folder, [runs.SweepRun(tmp_path / "none", ())])
    assert not (folder / "compare").exists()
    sweep.compare_finished(folder, result)
    assert mentions(capsys.readouterr().out, "4 runs", "2 configurations")
    assert (folder / "compare" / "compare.html").stat().st_size > 10_000
    fake_runs.write_run(folder / "other", changes={"data.name": "synthetic"}, seed=7)
    sweep.compare_finished(folder, result)
    assert mentions(capsys.readouterr().out, "data.name", "'bundled:fashion_mnist'", "'synthetic'")


def start_sweep(folder, configs, *more):
    fixed = [f"--set={key}={value}" for key, value in SMALL.items()]
    words = [sys.executable, "-m", "leanformer.sweep", f"--config={','.join(configs)}", f"--workdir={folder}"]
    return start([*words, *fixed, *more], subprocess_environment(cache=None))  # the runs have a cache of their own


@pytest.mark.slow
def test_interrupted_sweep_is_completed_by_a_second_command(tmp_path):
    """2 configs x 2 seeds, one run finished by an earlier command. The sweep is stopped while the second run trains;
    that run saves, and the next command runs only what is missing. Runs of one shape are compiled once."""
    earlier_run = runs.make_runs(CONFIGS[1:], [], [f"{key}={value}" for key, value in SMALL.items()], 2, tmp_path)[1]
    finished = fake_runs.write_run(
        earlier_run.workdir, changes=[(k, v) for k, v in iterate_keys(earlier_run.config) if k != "eval.more"]
    )
    first_sweep = start_sweep(tmp_path, CONFIGS, "--seeds=2")
    second_run = tmp_path / "quickstart,seed=1"
    end = time.monotonic() + 240
    while len(read_records_by_step(second_run, "train")) < 5 and time.monotonic() < end and first_sweep.poll() is None:
        time.sleep(0.01)
    assert len([*(tmp_path / "compiled").glob("jit_train_step-*-cache")]) == 1
    first_sweep.send_signal(signal.SIGUSR1)  # as SLURM's --signal does
    out, err = first_sweep.communicate(timeout=120)
    assert first_sweep.returncode == 75 and mentions(out, 1) and "Traceback" not in err, err
    modified = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert {path.parent.name for path in modified} == {"quickstart,seed=0", finished.name}
    saved = max(int(path.name) for path in (second_run / "checkpoints").glob("*") if path.name.isdecimal())
    assert saved == max(read_records_by_step(second_run, "train")) < SMALL["total_steps"]

    second_sweep = start_sweep(tmp_path, CONFIGS, "--seeds=2")
    out, err = second_sweep.communicate(timeout=400)
    assert second_sweep.returncode == 0, err
    assert mentions(out, "4 runs", "2 already finished")
    assert len(re.findall(r"^  \S+,seed=\d +top-1 accuracy ", out, re.MULTILINE)) == 4
    assert len([*tmp_path.glob("*/summary.json")]) == 4
    assert all(path.stat().st_mtime_ns == time_before for path, time_before in modified.items())
    assert sorted(read_records_by_step(second_run, "train")) == [*range(1, SMALL["total_steps"] + 1)]
    assert mentions((tmp_path / "logs" / f"{second_run.name}.log").read_text(), f"step {saved}", second_run)


@pytest.mark.slow
def test_failed_run_is_listed_with_its_log(tmp_path):
    process = start_sweep(tmp_path, CONFIGS[:1], "--over=data.name=folder:/no/such/place")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and mentions(err, "FAILED", "/no/such/place")
    assert len(json.loads((tmp_path / "sweep.json").read_text())["failed"]) == 1
