"""What was saved comes back bit for bit; what is damaged is said, set aside and never lost."""

import concurrent.futures
import errno
import json
import math
import shutil
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from messages import mentions, refuses
from small_runs import fresh_state

from leanformer.errors import CheckpointError
from leanformer.runtime import integrity
from leanformer.tasks.scores import Score
from leanformer.training import train_setup
from leanformer.training.checkpoint import Checkpoints


TOP1 = Score("top1")


@pytest.fixture
def run(tiny, meshes):
    return train_setup.build(tiny, examples=64, mesh=meshes(1, 1))


@pytest.fixture
def state(run):
    return fresh_state(run)


def save(folder, state, steps, scores=()):
    with Checkpoints(folder, score=TOP1) as saved:
        for step in steps:
            saved.save(step, state, score=dict(scores).get(step), seconds={"steps": float(step)})
            saved.wait()
        return saved.steps


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_round_trip(tmp_path, run, state):
    save(tmp_path / "c", state, [3])
    with Checkpoints(tmp_path / "c") as saved:
        result, books = saved.restore(run.state)
    equal(result, state)
    assert books == {"steps": 3.0} and type(result) is type(state)


def test_nothing_saved_is_none(tmp_path, run):
    with Checkpoints(tmp_path / "c") as saved:
        assert saved.restore(run.state) is None and saved.best() is None


def test_keeps_the_latest_and_the_best(tmp_path, state):
    kept = save(tmp_path / "c", state, [1, 2, 3, 4, 5], {1: 0.5, 2: 0.9, 3: 0.7})
    assert kept == [2, 4, 5]
    with Checkpoints(tmp_path / "c") as saved:
        assert saved.best() == 2


def test_a_score_may_come_after_its_checkpoint(tmp_path, state):
    """A run stopped where evaluation was due has saved without a score, and evaluates when it goes on."""
    with Checkpoints(tmp_path / "c", score=TOP1) as saved:
        saved.save(1, state, score=0.5)
        saved.save(2, state)
        saved.wait()
    with Checkpoints(tmp_path / "c", score=TOP1) as saved:
        saved.report(2, 0.9)
        assert saved.best() == 2
    with Checkpoints(tmp_path / "c") as saved:  # as `evaluate --best` opens them
        assert saved.best() == 2
        for step in (3, 4):
            saved.save(step, state, score=0.1 * step)
        saved.wait()
        assert saved.steps == [2, 3, 4]


def test_a_score_says_which_way_is_better(tmp_path, state):
    with Checkpoints(tmp_path / "c", keep=1, score=Score("error", higher=False)) as saved:
        for step, error in enumerate((0.5, 0.2, np.nan, 0.4), 1):
            saved.save(step, state, score=error)
        saved.wait()
        assert saved.steps == [2, 4] and saved.best() == 2
    with Checkpoints(tmp_path / "c") as saved:  # by whoever does not know the task
        assert saved.best() == 2 and saved.score == Score("error", higher=False)


def test_the_scores_of_older_runs_are_top1(tmp_path, state):
    save(tmp_path / "c", state, [1, 2])
    for step, top1 in ((1, 0.9), (2, 0.3)):
        (tmp_path / "c" / str(step) / "score.json").write_text(json.dumps({"top1": top1}))
    with Checkpoints(tmp_path / "c") as saved:
        assert saved.best() == 1 and saved.score == TOP1 and saved.scores == {1: 0.9, 2: 0.3}


def test_a_score_that_json_has_none_for_never_wins(tmp_path, state):
    """NaN, which other writers of JSON make null of."""
    save(tmp_path / "c", state, [1, 2])
    for step, error in ((1, 0.9), (2, None)):
        record = {"score": error, "of": "error", "higher": False}
        (tmp_path / "c" / str(step) / "score.json").write_text(json.dumps(record))
    with Checkpoints(tmp_path / "c") as saved:
        assert saved.best() == 1 and math.isnan(saved.scores[2])


def test_what_a_cut_off_save_left_is_cleared_away_by_its_run_alone(tmp_path, state):
    save(tmp_path / "c", state, [1])
    left = tmp_path / "c" / "5.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "1", left)
    with Checkpoints(tmp_path / "c") as reader:
        assert reader.steps == [1] and left.exists()  # it may be a save under way
    with Checkpoints(tmp_path / "c", score=TOP1) as saved:
        saved.save(2, state)
        saved.wait()
        assert saved.steps == [1, 2] and not left.exists()


def test_a_list_cut_off_in_the_writing_condemns_nothing(tmp_path, run, state):
    save(tmp_path / "c", state, [1])
    (tmp_path / "c" / "1" / "files.json").rename(tmp_path / "c" / "1" / "files.json.part")
    with Checkpoints(tmp_path / "c") as saved:
        equal(saved.restore(run.state)[0], state)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda path: path.unlink()])
def test_a_damaged_newest_falls_back_loudly(tmp_path, run, state, capfd, damage):
    save(tmp_path / "c", state, [1, 2])
    damage(largest_file(tmp_path / "c" / "2"))
    with Checkpoints(tmp_path / "c", score=TOP1) as saved:
        result, books = saved.restore(run.state)
        assert saved.steps == [1] and books == {"steps": 1.0}
        saved.save(2, result)  # the step can be saved again
    equal(result, state)
    assert (tmp_path / "c_damaged" / "2").is_dir()  # and the damaged one is still there
    assert mentions(capfd.readouterr().err, "step 2", "step 1", tmp_path / "c_damaged" / "2")


def test_all_damaged_is_an_error_that_moves_nothing(tmp_path, run, state):
    save(tmp_path / "c", state, [1, 2])
    for step in ("1", "2"):
        truncate(largest_file(tmp_path / "c" / step))
    with Checkpoints(tmp_path / "c") as saved:
        with refuses(tmp_path / "c", "step 1", "step 2", "--workdir", error=CheckpointError):
            saved.restore(run.state)
        assert saved.steps == [1, 2]
    assert not (tmp_path / "c_damaged").exists()


def test_another_models_checkpoint_is_refused_by_name(tmp_path, run, state, tiny, meshes):
    save(tmp_path / "c", state, [1])
    tiny.model.update(mlp_dim=21)
    other = train_setup.build(tiny, examples=64, mesh=meshes(1, 1))
    with (
        Checkpoints(tmp_path / "c") as saved,
        refuses("ema.0.blocks.layers.mlp.up.kernel", "(3, 12, 20)", "(3, 12, 21)", error=CheckpointError),
    ):
        saved.restore(other.state)
    assert not (tmp_path / "c_damaged").exists()


def test_a_step_that_is_not_there(tmp_path, run, state):
    save(tmp_path / "c", state, [1])
    with Checkpoints(tmp_path / "c") as saved, refuses(tmp_path / "c", "step 7", "[1]", error=CheckpointError):
        saved.restore(run.state, 7)


def test_restores_onto_another_mesh(tmp_path, run, state, tiny, meshes):
    save(tmp_path / "c", state, [1])
    spread = train_setup.build(tiny, examples=64, mesh=meshes(1, 8))
    with Checkpoints(tmp_path / "c") as saved:
        result, _ = saved.restore(spread.state)
    equal(jax.device_get(result), jax.device_get(state))
    assert jax.tree.leaves(result.params)[0].sharding.mesh.shape["fsdp"] == 8


def test_a_save_that_failed_in_the_background_is_told_once(tmp_path, state, monkeypatch):
    """By the next poll, the next save or the wait at the end, whichever comes first."""
    save(tmp_path / "c", state, [1])

    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(integrity, "write_checksums", fail)
    with Checkpoints(tmp_path / "c", score=TOP1) as saved:
        for step, tell in ((2, saved.poll), (3, saved.wait)):
            saved.save(step, state)
            concurrent.futures.wait([saved._pending])
            with refuses(tmp_path / "c", "MiB", error=CheckpointError):
                tell()
            saved.poll()
            saved.wait()


@pytest.mark.slow
def test_a_full_disk_is_told_and_loses_nothing(tmp_path):
    """A limit on file sizes stands for a full disk; the error comes up at the next poll."""
    program = f"""
        import resource, signal, sys, time, warnings
        import jax.numpy as jnp
        from absl import logging
        from leanformer.training.checkpoint import Checkpoints
        from leanformer.errors import CheckpointError
        logging.set_verbosity(logging.FATAL)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        state = {{"w": jnp.arange(100_000.0)}}
        with Checkpoints({str(tmp_path / "c")!r}) as saved:
            saved.save(1, state)
            saved.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            saved.save(2, state)
            try:
                for _ in range(600):
                    time.sleep(0.1)
                    saved.poll()
            except CheckpointError as error:
                print("TOLD:", error)
            print("STEPS:", saved.steps)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert mentions(done.stdout, "TOLD:", tmp_path / "c", "MiB", "STEPS: [1]")
