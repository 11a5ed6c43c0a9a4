"""Sweeps: the grid, skipped runs, failed runs with their reasons, and interruptions without loss."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import types

import fake_runs
import pytest
from commands import run_in_process, subprocess_environment
from messages import mentions, refuses
from processes import FAST_COMPILE_FLAGS, ROOT, read_records_by_step

from leanformer import sweep
from leanformer.config import key_docs
from leanformer.runtime import signals
from leanformer.sweeps import executor, grid, member_process


CONFIGS = [str(ROOT / "configs" / f"{name}.py") for name in ("quickstart", "quickstart_baseline")]
SMALL = {
    **{
        "total_epochs": 0,
        "total_steps": 150,
        "batch_size": 16,
        "eval.every": 0,
        "eval.batch_size": 512,
        "log_every": 1,
    },
    **{"optim.warmup_epochs": 0, "probe.every": 0, "checkpoint.every": 50, "model.depth": 1, "model.width": 16},
}


def test_runs_are_the_product_of_the_grid(tmp_path):
    result = sweep.make_runs(CONFIGS, ["model.num_heads=2,4", "optim.lr=1e-3"], ["model.depth=1"], 2, tmp_path)
    assert len(result) == 2 * 2 * 1 * 2
    assert result[1].workdir == tmp_path / "quickstart,num_heads=2,lr=1e-3,seed=1"
    for word in ("--config.model.num_heads=2", "--config.seed=1", "--config.model.depth=1", f"--config={CONFIGS[0]}"):
        assert word in result[1].command


def test_folder_of_another_task_is_refused(tmp_path):
    """A length that only one of the two configs has cannot be compared."""
    (member,) = sweep.make_runs([str(ROOT / "configs" / "quickstart_gpt.py")], [], ["total_tokens=1e6"], 1, tmp_path)
    fake_runs.write_run(member.workdir)
    with refuses(member.workdir):
        grid.select_unfinished([member])


class FakeJob:
    """Job of a run that ends at the second look, with a score or without."""

    def __init__(self, workdir, value):
        self.looks, self.workdir, self.value = 0, workdir, value

    def done(self):
        self.looks += 1
        if self.looks == 2 and self.value is not None:
            fake_runs.write_run(self.workdir, self.value)
        return self.looks >= 2

    def exception(self):
        return None

    def stdout(self):
        return "log"

    stderr = stdout


def test_every_run_that_ends_prints_score_and_time_left(tmp_path, capsys, monkeypatch):
    runs = sweep.make_runs(CONFIGS[:1], ["model.num_heads=2,4,8"], [], 1, tmp_path)
    jobs = {tuple(run.command): FakeJob(run.workdir, value) for run, value in zip(runs, (0.5, 0.75, None), strict=True)}
    fake = types.SimpleNamespace(submit=lambda _, command, *place: jobs[tuple(command)])
    monkeypatch.setattr(executor.time, "sleep", lambda _: None)
    failed = executor._run_here(fake, runs, [{}])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"[1/3] {runs[0].workdir.name}  top-1 accuracy 50 %  loss 0.5") and first.endswith("s left")
    assert "75 %" in second and "left" not in third and third.endswith("failed") and [*failed] == [runs[2]]


def test_path_values_make_flat_folder_names(tmp_path):
    """Nested folders would not be recognised as runs, and paths with the same last part would collide."""
    result = sweep.make_runs(CONFIGS[:1], ["init_from.path=/a/x,/b/x"], [], 1, tmp_path)
    names = ["quickstart,path=_a_x,seed=0", "quickstart,path=_b_x,seed=0"]
    assert [run.workdir for run in result] == [tmp_path / name for name in names]
    assert "--config.init_from.path=/b/x" in result[1].command


@pytest.mark.parametrize(
    ("configs", "over", "fixed", "seeds", "parts"),
    [
        ([], [], [], 1, ["--config", 0]),
        (["nowhere.py"], [], [], 1, ["nowhere.py"]),
        (CONFIGS, ["model.num_heads"], [], 1, ['--over="model.num_heads"', "KEY=VALUE"]),
        (CONFIGS, [], [], 0, ["--seeds=0", 1]),
        (CONFIGS, ["seed=1,2"], [], 1, ["--seeds=N", "seed"]),
        (CONFIGS, ["model.depth=1,2", "model.depth=3"], [], 1, ["model.depth", "--over"]),
        (CONFIGS, ["model.depth=1,2"], ["model.depth=3"], 1, ["model.depth", "--over"]),
        (CONFIGS, [], ["optim.lr=1e-3", "optim.lr=1e-2"], 1, ["optim.lr", "--set"]),
        (CONFIGS[:1] * 2, ["model.width=1", "optim.width=2"], [], 1, ["--over"]),  # runs of the same name
    ],
)
def test_invalid_sweeps_are_refused(configs, over, fixed, seeds, parts, tmp_path):
    with refuses(*parts):
        sweep.make_runs(configs, over, fixed, seeds, tmp_path)


def test_runs_of_equal_configs_are_refused(tmp_path):
    members = sweep.make_runs(CONFIGS[:1], ["optim.lr=1e-3,0.001"], [], 2, tmp_path)
    with refuses("lr=1e-3", "lr=0.001"):
        executor.check(members)
    executor.check(sweep.make_runs(CONFIGS[:1], ["optim.lr=1e-3,0.002"], [], 2, tmp_path))


def test_config_with_arguments_is_one_run(tmp_path):
    result = sweep.make_runs(["vit_b:depth=8", "heads=14", CONFIGS[0], "vit_b:depth=9"], [], [], 2, tmp_path)
    names = ["vit_b,depth=8,heads=14,seed=0", "quickstart,seed=0", "vit_b,depth=9,seed=0"]
    assert [run.workdir.name for run in result[::2]] == names
    assert result[0].words[0] == f"--config={ROOT / 'configs' / 'vit_b.py'}:depth=8,heads=14"
    executor.check(result)


def test_nothing_starts_if_one_run_is_invalid(tmp_path):
    words = [f"--config={CONFIGS[0]},vit_b:depth=8", "--over=model.head_dim=16,0", "--seeds=2", f"--workdir={tmp_path}"]
    status, out, err = run_in_process(["", "", "leanformer.sweep", *words])
    assert (status, out) == (2, "") and not list(tmp_path.iterdir())
    assert mentions(err, "quickstart,head_dim=0,seed=0", "model.head_dim=0", 1)
    words[1] = "--over=model.hed_dim=16"
    status, _, err = run_in_process(["", "", "leanformer.sweep", *words])
    assert status == 2 and mentions(err, "quickstart,hed_dim=16,seed=0", '"hed_dim"', '"head_dim"')
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unfinished_sweep(tmp_path, monkeypatch):
    """Write three runs, the last of them unfinished; return them and a list of what is started later."""
    started = []
    monkeypatch.setattr(executor, "run", lambda units, *_: started.append([*units]) or {})
    monkeypatch.setattr(sweep, "_compare", lambda *_: None)
    runs = sweep.make_runs(CONFIGS[:1], ["model.depth=1,2,3"], ["total_epochs=3.0"], 1, tmp_path)
    for depth, run in enumerate(runs, 1):
        fake_runs.write_run(run.workdir, changes={"model.depth": depth, "total_epochs": 3.0}, ended=depth < 3)
    return runs, started


def repeat_sweep(folder, *words, over="model.depth=1,2,3", epochs="3.0"):
    length = () if any("total_epochs" in word for word in words) else (f"--set=total_epochs={epochs}",)
    words = [f"--config={CONFIGS[0]}", f"--over={over}", *length, f"--workdir={folder}", *words]
    return run_in_process(["", "", "leanformer.sweep", *words])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--set=optim.lr=0.5"], ["quickstart,depth=1,seed=0", "optim.lr=0.002", 0.5, "--workdir"]),
        (["--set=total_epochs=1.0"], ["quickstart,depth=1,seed=0", "total_epochs=3.0", 1.0, "--workdir"]),
        (["--set=data.dir=elsewhere"], ["data.dir=None", "elsewhere", "--workdir"]),
        (["--set=total_epochs=4.0", "--set=model.width=48"], ["model.width=96", 48]),
        (
            ["--set=optim.lr=1.0", "--set=optim.b1=0.5", "--set=model.width=48", "--set=batch_size=8"],
            ["model.width=96", 48, "optim.b1=0.9", 0.5, 1],
        ),
    ],
)
def test_changed_config_of_a_finished_run_is_refused(unfinished_sweep, tmp_path, words, parts):
    status, out, err = repeat_sweep(tmp_path, *words)
    assert (status, out) == (2, "") and mentions(err, *parts) and not unfinished_sweep[1]
    assert err.strip().count("\n") == 0


def test_changed_config_of_an_unfinished_run_is_refused(unfinished_sweep, tmp_path):
    for run in unfinished_sweep[0][:2]:
        (run.workdir / "summary.json").unlink()
        (run.workdir / "config.json").unlink()
    status, _, err = repeat_sweep(tmp_path, "--set=optim.lr=0.5")
    assert status == 2 and mentions(err, "quickstart,depth=3,seed=0", "optim.lr=0.002", 0.5) and not unfinished_sweep[1]


def test_grid_points_and_seeds_may_be_added(unfinished_sweep, tmp_path):
    repeat_sweep(tmp_path, "--seeds=2", over="model.depth=1,2,3,4")
    assert [run.workdir.name for run in unfinished_sweep[1][0]] == [
        *("quickstart,depth=1,seed=1", "quickstart,depth=2,seed=1", "quickstart,depth=3,seed=0"),
        *("quickstart,depth=3,seed=1", "quickstart,depth=4,seed=0", "quickstart,depth=4,seed=1"),
    ]


def test_keys_without_effect_on_results_may_change(unfinished_sweep, tmp_path):
    _, out, err = repeat_sweep(tmp_path, "--set=data.workers=3", "--set=probe.every=7")
    assert mentions(out, "data.workers", "probe.every")
    assert err == ""
    assert [run.workdir.name for run in unfinished_sweep[1][0]] == ["quickstart,depth=3,seed=0"]


def test_longer_training_resumes_finished_runs(unfinished_sweep, tmp_path):
    runs, started = unfinished_sweep
    _, out, _ = repeat_sweep(tmp_path, epochs="4.0")
    assert mentions(out, "quickstart,depth=1,seed=0", "total_epochs", "3.0 -> 4.0")
    assert [member.workdir for member in started[0]] == [run.workdir for run in runs]


def test_started_runs_no_longer_count_as_finished(tmp_path, monkeypatch):
    """Whether or not the longer training ends."""
    runs = [sweep.SweepRun(fake_runs.write_run(tmp_path / name), ()) for name in "ab"]
    assert all(run.finished for run in runs)
    monkeypatch.setattr(executor, "_run_here", lambda *_: {})
    flags = types.SimpleNamespace(cluster="local", slurm=(), minutes=5)
    with executor._handle_signals(signal.SIG_DFL, *signals.STATUS):
        executor.run(runs, executor.make_executor(tmp_path / "logs", flags), [{}], flags)
    assert not any(run.finished for run in runs)


def test_sweep_ends_with_a_comparison_of_its_runs(tmp_path, capsys):
    result = [
        sweep.SweepRun(path, ()) for path in fake_runs.write_sweep(tmp_path / "s", depths=(2,), seeds=2).iterdir()
    ]
    sweep._compare(tmp_path / "s", [sweep.SweepRun(tmp_path / "none", ())])
    assert not (tmp_path / "s" / "compare").exists()
    sweep._compare(tmp_path / "s", result)
    assert mentions(capsys.readouterr().out, "4 runs", "2 configurations")
    assert (tmp_path / "s" / "compare" / "compare.html").stat().st_size > 10_000
    fake_runs.write_run(tmp_path / "s" / "other", changes={"data.name": "synthetic"}, seed=7)
    sweep._compare(tmp_path / "s", result)
    assert mentions(capsys.readouterr().out, "data.name", "'bundled:fashion_mnist'", "'synthetic'")


@pytest.mark.parametrize(
    ("visible", "parallel", "shares"),
    [
        *((None, 2, [None, None]), ("0,3", 1, ["0,3"]), ("4,5,6,7", 2, ["4,5", "6,7"]), ("1,2,3", 2, ["1", "2"])),
        *(("-1", 2, ["-1", "-1"]), ("", 2, ["", ""])),
    ],
)
def test_gpus_are_divided_among_parallel_runs(visible, parallel, shares):
    """-1 hides all GPUs."""
    environ = {"HOME": "/", **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    result = executor.environments(environ, parallel)
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in result] == shares
    assert {env["HOME"] for env in result} == {"/"}


def test_more_parallel_runs_than_gpus_are_refused():
    with refuses("--parallel=3", "CUDA_VISIBLE_DEVICES", 2):
        executor.environments({"CUDA_VISIBLE_DEVICES": "0,1"}, 3)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("--parallel=0", [1]),
        ("--parallel=-1", [1]),
        ("--minutes=-1", [1]),
        ("--seeds=0", [1]),
        ("--cluster=slurm", ["srun", "--cluster=local"]),
        ("--slurm=partition=x", ["--cluster=local", "--cluster=slurm"]),
    ],
)
def test_impossible_execution_is_refused_before_the_sweep(unfinished_sweep, tmp_path, monkeypatch, word, parts):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, out, err = repeat_sweep(tmp_path, word)
    assert (status, out) == (2, "") and mentions(err, word, *parts) and not unfinished_sweep[1]
    assert [run.finished for run in unfinished_sweep[0]] == [True, True, False]


def test_runs_see_the_gpus_that_submitit_would_hide(monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(member_process.signal, "signal", lambda *_: None)
    member_process.run(["sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES; exit 3"], {"CUDA_VISIBLE_DEVICES": "5"})
    out, err = capfd.readouterr()
    assert out == "sees 5\n" and mentions(err, "status 3")


def test_run_is_stopped_with_sigterm_if_its_sweep_was_killed(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(member_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(member_process, "EVERY", 0.05)
    command = ["sh", "-c", f"trap 'echo saved > {tmp_path / 'state'}; exit 75' TERM; while :; do sleep 0.1; done"]
    sweep = subprocess.Popen(["sleep", "0.5"])
    threading.Thread(target=sweep.wait).start()  # or it would stay as a zombie
    member_process.run(command, dict(os.environ), sweep.pid)
    assert (tmp_path / "state").read_text() == "saved\n" and mentions(capfd.readouterr().err, 75)
    member_process.run(["sh", "-c", "sleep 0.3; exit 3"], dict(os.environ), os.getpid())
    assert mentions(capfd.readouterr().err, 3)


def test_waiting_process_of_a_run_imports_no_jax():
    """submitit's process of a run unpickles `member_process.run`."""
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])); assert 'jax' not in sys.modules"
    process = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(member_process.run).hex()], cwd=ROOT, env=subprocess_environment()
    )
    assert process.returncode == 0


def start(folder, cache, configs, *more):
    fixed = [f"--set={key}={value}" for key, value in SMALL.items()]
    words = [sys.executable, "-m", "leanformer.sweep", f"--config={','.join(configs)}", f"--workdir={folder}"]
    quick = {"XLA_FLAGS": FAST_COMPILE_FLAGS, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "CUDA_VISIBLE_DEVICES": "5"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*words, *fixed, *more], cwd=ROOT, env=subprocess_environment() | quick, **pipes)


@pytest.mark.slow
def test_interrupted_sweep_is_completed_by_a_second_command(tmp_path):
    """2 configs x 2 seeds, one run finished by an earlier command. The sweep is stopped while the second run trains;
    that run saves, and the next command runs only what is missing."""
    earlier_run = sweep.make_runs(CONFIGS[1:], [], [f"{key}={value}" for key, value in SMALL.items()], 2, tmp_path)[1]
    finished = fake_runs.write_run(
        earlier_run.workdir, changes=[(k, v) for k, v in key_docs.iterate_keys(earlier_run.config) if k != "eval.more"]
    )
    first_sweep = start(tmp_path, tmp_path / "cache", CONFIGS, "--seeds=2")
    second_run = tmp_path / "quickstart,seed=1"
    end = time.monotonic() + 240
    while len(read_records_by_step(second_run, "train")) < 5 and time.monotonic() < end and first_sweep.poll() is None:
        time.sleep(0.01)
    first_sweep.send_signal(signal.SIGUSR1)  # as SLURM's --signal does
    out, err = first_sweep.communicate(timeout=120)
    assert first_sweep.returncode == 75 and mentions(out, 1) and "Traceback" not in err, err
    modified = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert {path.parent.name for path in modified} == {"quickstart,seed=0", finished.name}
    saved = max(int(path.name) for path in (second_run / "checkpoints").glob("*") if path.name.isdecimal())
    assert saved == max(read_records_by_step(second_run, "train")) < SMALL["total_steps"]

    second_sweep = start(tmp_path, tmp_path / "cache", CONFIGS, "--seeds=2")
    out, err = second_sweep.communicate(timeout=400)
    assert second_sweep.returncode == 0, err
    assert (
        mentions(out, "4 runs", "2 already finished")
        and len(re.findall(r"^  \S+,seed=\d +top-1 accuracy ", out, re.MULTILINE)) == 4
    )
    assert len([*tmp_path.glob("*/summary.json")]) == 4
    assert all(path.stat().st_mtime_ns == time_before for path, time_before in modified.items())
    assert sorted(read_records_by_step(second_run, "train")) == [*range(1, SMALL["total_steps"] + 1)]
    logs = "\n".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))
    assert mentions(logs, f"step {saved}", second_run)


@pytest.mark.slow
def test_failed_run_is_listed_with_its_log(tmp_path):
    process = start(tmp_path, tmp_path / "cache", CONFIGS[:1], "--over=data.name=folder:/no/such/place")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert mentions(err, "FAILED", "/no/such/place", "status 2")
    assert len(json.loads((tmp_path / "sweep.json").read_text())["failed"]) == 1
