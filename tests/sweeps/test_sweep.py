"""Sweeps: the grid, what is skipped, what failed and why, and an interruption that loses nothing."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import made_runs
import pytest
from commands import environment, inside
from messages import mentions, refuses
from processes import QUICK, ROOT, records

from leanformer import sweep
from leanformer.config import key_docs
from leanformer.sweeps import executor, member_process


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


def test_members_are_the_product(tmp_path):
    result = sweep.make_runs(CONFIGS, ["model.num_heads=2,4", "optim.lr=1e-3"], ["model.depth=1"], 2, tmp_path)
    assert len(result) == 2 * 2 * 1 * 2
    assert result[1].workdir == tmp_path / "quickstart,num_heads=2,lr=1e-3,seed=1"
    for word in ("--config.model.num_heads=2", "--config.seed=1", "--config.model.depth=1", f"--config={CONFIGS[0]}"):
        assert word in result[1].command


def test_a_value_that_is_a_path_is_no_folder_of_folders(tmp_path):
    """Or nobody would find the run again, and two paths of one last part would be one."""
    result = sweep.make_runs(CONFIGS[:1], ["init_from.path=/a/x,/b/x"], [], 1, tmp_path)
    names = ["quickstart,path=_a_x,seed=0", "quickstart,path=_b_x,seed=0"]
    assert [member.workdir for member in result] == [tmp_path / name for name in names]
    assert "--config.init_from.path=/b/x" in result[1].command
    with refuses("model.depth"):
        sweep.make_runs(CONFIGS[:1], ["model.depth=1,2"], ["model.depth=3"], 1, tmp_path)


@pytest.mark.parametrize(
    ("configs", "over", "seeds", "parts"),
    [
        ([], [], 1, ["--config", 0]),
        (["nowhere.py"], [], 1, ["nowhere.py"]),
        (CONFIGS, ["model.num_heads"], 1, ['--over="model.num_heads"', "KEY=VALUE"]),
        (CONFIGS, [], 0, ["--seeds=0", 1]),
        (CONFIGS, ["seed=1,2"], 1, ["--seeds=N", "seed"]),
        (CONFIGS, ["model.depth=1,2", "model.depth=3"], 1, ["model.depth", "--over"]),
    ],
)
def test_what_cannot_be(configs, over, seeds, parts, tmp_path):
    with refuses(*parts):
        sweep.make_runs(configs, over, [], seeds, tmp_path)


def test_members_of_one_name_are_refused(tmp_path):
    with refuses("--over"):
        sweep.make_runs([CONFIGS[0]] * 2, ["model.width=1", "optim.width=2"], [], 1, tmp_path)


def test_a_config_with_arguments_is_a_member(tmp_path):
    result = sweep.make_runs(["vit_b:depth=8", "heads=14", CONFIGS[0], "vit_b:depth=9"], [], [], 2, tmp_path)
    names = ["vit_b,depth=8,heads=14,seed=0", "quickstart,seed=0", "vit_b,depth=9,seed=0"]
    assert [member.workdir.name for member in result[::2]] == names
    assert result[0].words[0] == f"--config={ROOT / 'configs' / 'vit_b.py'}:depth=8,heads=14"
    executor.check(result)


def test_nothing_starts_where_one_member_cannot_work(tmp_path):
    words = [f"--config={CONFIGS[0]},vit_b:depth=8", "--over=model.head_dim=16,0", "--seeds=2", f"--workdir={tmp_path}"]
    status, out, err = inside(["", "", "leanformer.sweep", *words])
    assert (status, out) == (2, "") and not list(tmp_path.iterdir())
    assert mentions(err, "quickstart,head_dim=0,seed=0", "model.head_dim=0", 1)
    words[1] = "--over=model.hed_dim=16"
    status, _, err = inside(["", "", "leanformer.sweep", *words])
    assert status == 2 and mentions(err, "quickstart,hed_dim=16,seed=0", '"hed_dim"', '"head_dim"')
    assert not list(tmp_path.iterdir())


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Three members of which the last has not ended, and what was started since."""
    started = []
    monkeypatch.setattr(executor, "run", lambda units, *_: started.append([*units]) or {})
    monkeypatch.setattr(sweep, "_compare", lambda *_: None)
    members = sweep.make_runs(CONFIGS[:1], ["model.depth=1,2,3"], ["total_epochs=3.0"], 1, tmp_path)
    for depth, member in enumerate(members, 1):
        made_runs.write(member.workdir, changes={"model.depth": depth, "total_epochs": 3.0}, ended=depth < 3)
    return members, started


def again(folder, *words, over="model.depth=1,2,3", epochs="3.0"):
    words = [f"--config={CONFIGS[0]}", f"--over={over}", f"--set=total_epochs={epochs}", f"--workdir={folder}", *words]
    return inside(["", "", "leanformer.sweep", *words])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--set=optim.lr=0.5"], ["quickstart,depth=1,seed=0", "optim.lr=0.002", 0.5, "--workdir"]),
        (["--set=total_epochs=1.0"], ["quickstart,depth=1,seed=0", "total_epochs=3.0", 1.0, "--workdir"]),
        (["--set=data.dir=elsewhere"], ["data.dir=None", "elsewhere", "--workdir"]),
        (["--set=total_epochs=4.0", "--set=model.width=48"], ["model.width=96", 48]),
        (
            ["--set=optim.lr=1.0", "--set=optim.b1=0.5", "--set=model.width=48", "--set=batch_size=8", "--vmap"],
            ["model.width=96", 48, "optim.b1=0.9", 0.5, 1],
        ),
    ],
)
def test_a_member_that_was_asked_something_else_is_refused(begun, tmp_path, words, parts):
    status, out, err = again(tmp_path, *words)
    assert (status, out) == (2, "") and mentions(err, *parts) and not begun[1]
    assert err.strip().count("\n") == 0


def test_one_that_has_not_ended_is_refused_too(begun, tmp_path):
    for member in begun[0][:2]:
        (member.workdir / "summary.json").unlink()
        (member.workdir / "config.json").unlink()
    status, _, err = again(tmp_path, "--set=optim.lr=0.5")
    assert status == 2 and mentions(err, "quickstart,depth=3,seed=0", "optim.lr=0.002", 0.5) and not begun[1]


def test_points_and_seeds_may_be_added(begun, tmp_path):
    again(tmp_path, "--seeds=2", over="model.depth=1,2,3,4")
    assert [member.workdir.name for member in begun[1][0]] == [
        *("quickstart,depth=1,seed=1", "quickstart,depth=2,seed=1", "quickstart,depth=3,seed=0"),
        *("quickstart,depth=3,seed=1", "quickstart,depth=4,seed=0", "quickstart,depth=4,seed=1"),
    ]


def test_what_changes_no_figure_may_change_and_is_told(begun, tmp_path):
    _, out, err = again(tmp_path, "--set=data.workers=3", "--set=probe.every=7")
    assert mentions(out, "data.workers", "probe.every")
    assert err == ""
    assert [member.workdir.name for member in begun[1][0]] == ["quickstart,depth=3,seed=0"]


@pytest.mark.parametrize("together", [[], ["--vmap"]])
def test_asked_to_train_for_longer_they_go_on(begun, tmp_path, together):
    """An end of before is none now, whether or not what trains on gets to one."""
    members, started = begun
    _, out, _ = again(tmp_path, *together, epochs="4.0")
    assert mentions(out, "quickstart,depth=1,seed=0", "total_epochs", "3.0 -> 4.0")
    assert [member.workdir for member in started[0]] == [member.workdir for member in members]
    assert not any(member.finished for member in members)


def test_what_cannot_be_one_program_leaves_what_has_ended(begun, tmp_path):
    status, _, err = again(tmp_path, "--vmap", "--set=mesh.data=2", epochs="4.0")
    assert status == 2 and mentions(err, "mesh") and not begun[1]
    assert [member.finished for member in begun[0]] == [True, True, False]


def test_it_ends_with_what_its_members_say_together(tmp_path, capsys):
    result = [sweep.SweepRun(path, ()) for path in made_runs.sweep(tmp_path / "s", depths=(2,), seeds=2).iterdir()]
    sweep._compare(tmp_path / "s", [sweep.SweepRun(tmp_path / "none", ())])
    assert not (tmp_path / "s" / "compare").exists()
    sweep._compare(tmp_path / "s", result)
    assert mentions(capsys.readouterr().out, "4 runs", "2 configurations")
    assert (tmp_path / "s" / "compare" / "compare.html").stat().st_size > 10_000
    made_runs.write(tmp_path / "s" / "other", changes={"data.name": "synthetic"}, seed=7)
    sweep._compare(tmp_path / "s", result)
    assert mentions(capsys.readouterr().out, "data.name", "'bundled:fashion_mnist'", "'synthetic'")


@pytest.mark.parametrize(
    ("visible", "parallel", "shares"),
    [(None, 2, [None, None]), ("0,3", 1, ["0,3"]), ("4,5,6,7", 2, ["4,5", "6,7"]), ("1,2,3", 2, ["1", "2"])],
)
def test_gpus_are_shared_out_among_members_at_once(visible, parallel, shares):
    environ = {"HOME": "/", **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    result = executor.environments(environ, parallel)
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in result] == shares
    assert {place["HOME"] for place in result} == {"/"}


def test_more_members_at_once_than_gpus_are_refused():
    with refuses("--parallel=3", "CUDA_VISIBLE_DEVICES", 2):
        executor.environments({"CUDA_VISIBLE_DEVICES": "0,1"}, 3)


def test_members_see_the_gpus_that_submitit_would_hide(monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(member_process.signal, "signal", lambda *_: None)
    member_process.run(["sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES; exit 3"], {"CUDA_VISIBLE_DEVICES": "5"})
    out, err = capfd.readouterr()
    assert out == "sees 5\n" and mentions(err, "status 3")


def test_a_member_is_told_to_save_when_its_sweep_was_killed(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(member_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(member_process, "EVERY", 0.05)
    member = ["sh", "-c", f"trap 'echo saved > {tmp_path / 'state'}; exit 75' TERM; while :; do sleep 0.1; done"]
    sweep = subprocess.Popen(["sleep", "0.5"])
    threading.Thread(target=sweep.wait).start()  # or it would stay as a zombie
    member_process.run(member, dict(os.environ), sweep.pid)
    assert (tmp_path / "state").read_text() == "saved\n" and mentions(capfd.readouterr().err, 75)
    member_process.run(["sh", "-c", "sleep 0.3; exit 3"], dict(os.environ), os.getpid())
    assert mentions(capfd.readouterr().err, 3)


def test_what_only_waits_for_a_member_loads_no_jax():
    """submitit's process of each member, which unpickles `member_process.run`."""
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])); assert 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(member_process.run).hex()], cwd=ROOT, env=environment()
    )
    assert done.returncode == 0


def start(folder, cache, configs, *more):
    fixed = [f"--set={key}={value}" for key, value in SMALL.items()]
    words = [sys.executable, "-m", "leanformer.sweep", f"--config={','.join(configs)}", f"--workdir={folder}"]
    quick = {"XLA_FLAGS": QUICK, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "CUDA_VISIBLE_DEVICES": "5"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*words, *fixed, *more], cwd=ROOT, env=environment() | quick, **pipes)


@pytest.mark.slow
def test_interrupted_and_run_again(tmp_path):
    """2 configs x 2 seeds, one of them done by an earlier command; stopped while the second trains: that one saves, and
    the next command runs only what is missing."""
    one = sweep.make_runs(CONFIGS[1:], [], [f"{key}={value}" for key, value in SMALL.items()], 2, tmp_path)[1]
    finished = made_runs.write(
        one.workdir, changes=[(k, v) for k, v in key_docs.iterate_keys(one.config) if k != "eval.more"]
    )
    first = start(tmp_path, tmp_path / "cache", CONFIGS, "--seeds=2")
    second = tmp_path / "quickstart,seed=1"
    end = time.monotonic() + 240
    while len(records(second, "train")) < 5 and time.monotonic() < end and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 75 and mentions(out, 1) and "Traceback" not in err, err
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert {path.parent.name for path in done} == {"quickstart,seed=0", finished.name}
    saved = max(int(path.name) for path in (second / "checkpoints").glob("*") if path.name.isdecimal())
    assert saved == max(records(second, "train")) < SMALL["total_steps"]

    again = start(tmp_path, tmp_path / "cache", CONFIGS, "--seeds=2")
    out, err = again.communicate(timeout=400)
    assert again.returncode == 0, err
    assert (
        mentions(out, "4 runs", "2 already finished")
        and len(re.findall(r"^  \S+,seed=\d +top1 ", out, re.MULTILINE)) == 4
    )
    assert len([*tmp_path.glob("*/summary.json")]) == 4
    assert all(path.stat().st_mtime_ns == then for path, then in done.items())
    assert sorted(records(second, "train")) == [*range(1, SMALL["total_steps"] + 1)]
    logs = "\n".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))
    assert mentions(logs, f"step {saved}", second)


@pytest.mark.slow
def test_a_failed_member_is_listed_with_its_log(tmp_path):
    failing = start(tmp_path, tmp_path / "cache", CONFIGS[:1], "--over=data.name=folder:/no/such/place")
    _, err = failing.communicate(timeout=300)
    assert failing.returncode == 1
    assert mentions(err, "FAILED", "/no/such/place", "status 2")
    assert len(json.loads((tmp_path / "sweep.json").read_text())["failed"]) == 1
