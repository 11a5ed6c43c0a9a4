"""Checkpoints: bit-exact round trips, damaged checkpoints are reported and moved aside, failed saves are reported."""

import concurrent.futures
import errno
import json
import math
import shutil

import jax
import numpy as np
import pytest
from messages import mentions, refuses
from small_runs import make_initial_state

from leanformer.errors import CheckpointError
from leanformer.runtime import integrity, multihost
from leanformer.tasks.scores import Score
from leanformer.training import train_setup
from leanformer.training.checkpoint import Checkpoints


TOP1 = Score("top1")


@pytest.fixture
def run(tiny, meshes):
    return train_setup.build(tiny, examples=64, mesh=meshes(1, 1))


@pytest.fixture
def state(run):
    return make_initial_state(run)


def save(folder, state, steps, scores=()):
    with Checkpoints(folder, score=TOP1) as checkpoints:
        for step in steps:
            about = {"seconds": {"steps": float(step)}, "examples": 8 * step}
            checkpoints.save(step, state, score=dict(scores).get(step), **about)
            checkpoints.wait()
        return checkpoints.steps


def find_largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_empty_folder_restores_none(tmp_path, run):
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.restore(run.state) is None and checkpoints.best() is None


def test_keeps_the_latest_and_the_best(tmp_path, state):
    steps = save(tmp_path / "c", state, [1, 2, 3, 4, 5], {1: 0.5, 2: 0.9, 3: 0.7})
    assert steps == [2, 4, 5]
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.best() == 2


def test_score_can_be_reported_after_its_save(tmp_path, state):
    """A run stopped before a due evaluation saves without a score, and evaluates after it resumes."""
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        checkpoints.save(1, state, score=0.5)
        checkpoints.save(2, state)
        checkpoints.wait()
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        checkpoints.report(2, 0.9)
        assert checkpoints.best() == 2
    with Checkpoints(tmp_path / "c") as checkpoints:  # as `evaluate --best` opens them
        assert checkpoints.best() == 2
        for step in (3, 4):
            checkpoints.save(step, state, score=0.1 * step)
        checkpoints.wait()
        assert checkpoints.steps == [2, 3, 4]


def test_score_direction_is_stored(tmp_path, state):
    with Checkpoints(tmp_path / "c", keep=1, score=Score("error", higher=False)) as checkpoints:
        for step, error in enumerate((0.5, 0.2, np.nan, 0.4), 1):
            checkpoints.save(step, state, score=error)
        checkpoints.wait()
        assert checkpoints.steps == [2, 4] and checkpoints.best() == 2
    with Checkpoints(tmp_path / "c") as checkpoints:  # opened without knowing the task
        assert checkpoints.best() == 2 and checkpoints.score == Score("error", higher=False)


@pytest.mark.parametrize(
    ("records", "score", "second"),
    [
        ([{"top1": 0.9}, {"top1": 0.3}], TOP1, 0.3),  # of older runs
        ([{"score": x, "of": "error", "higher": False} for x in (0.9, None)], Score("error", False), math.nan),
    ],
)
def test_scores_in_files_are_read(tmp_path, state, records, score, second):
    """NaN scores, which other JSON writers store as null, are never the best."""
    save(tmp_path / "c", state, [1, 2])
    for step, record in enumerate(records, 1):
        (tmp_path / "c" / str(step) / "score.json").write_text(json.dumps(record))
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.best() == 1 and checkpoints.score == score
        assert checkpoints.scores == pytest.approx({1: 0.9, 2: second}, nan_ok=True)


def test_partial_save_is_deleted_by_training_only(tmp_path, state):
    save(tmp_path / "c", state, [1])
    partial = tmp_path / "c" / "5.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "1", partial)
    with Checkpoints(tmp_path / "c") as reader:
        assert reader.steps == [1] and partial.exists()  # it may be a save in progress
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.steps == [1, 2] and not partial.exists()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda path: path.unlink()])
def test_damaged_newest_checkpoint_falls_back_with_warning(tmp_path, run, state, capfd, damage):
    save(tmp_path / "c", state, [1, 2], {1: 0.5, 2: 0.6})
    damage(find_largest_file(tmp_path / "c" / "2"))
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        result, seconds, examples = checkpoints.restore(run.state)
        assert checkpoints.steps == [1] and seconds == {"steps": 1.0} and examples == 8
        assert checkpoints.scores == {1: 0.5}  # of the damaged weights nothing is left
        checkpoints.save(2, result)  # the step can be saved again
    assert_equal_trees(result, state)
    assert (tmp_path / "c_damaged" / "2").is_dir()  # the damaged one is not deleted
    assert mentions(capfd.readouterr().err, "step 2", "step 1", tmp_path / "c_damaged" / "2")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("_CHECKPOINT_METADATA", b'"commit_timestamp', b'"commit_tiiestamp'),
        ("metrics/metrics", b'"top1"', b'"top1'),
        ("metrics/metrics", b'"of"', b'"og"'),
    ],
)
def test_damaged_metadata_is_moved_aside_by_training_only(tmp_path, run, state, capfd, name, old, new):
    """These files of every checkpoint are read when the folder is opened."""
    folder = tmp_path / "c"
    save(folder, state, [1, 2], {1: 0.5, 2: 0.6})
    content = (folder / "2" / name).read_bytes()
    assert old in content
    (folder / "2" / name).write_bytes(content.replace(old, new))
    with refuses(folder, "step 2", name, error=CheckpointError):
        Checkpoints(folder)
    assert (folder / "2").is_dir()
    with Checkpoints(folder, score=TOP1) as checkpoints:
        assert checkpoints.steps == [1] and checkpoints.best() == 1
        assert_equal_trees(checkpoints.restore(run.state)[0], state)
    assert (tmp_path / "c_damaged" / "2").is_dir()
    assert mentions(capfd.readouterr().err, "step 2", tmp_path / "c_damaged" / "2")


def test_all_damaged_metadata_raise_and_stay_in_place(tmp_path, state, monkeypatch):
    """Values that processes exchange are JSON."""
    save(tmp_path / "c", state, [1, 2])
    monkeypatch.setattr(multihost, "broadcast_from_primary", lambda content: json.loads(json.dumps(content)))
    for step in ("1", "2"):
        path = tmp_path / "c" / step / "_CHECKPOINT_METADATA"
        path.write_bytes(path.read_bytes().replace(b'"commit_timestamp', b'"commit_tiiestamp'))
    with refuses(tmp_path / "c", "step 1", "step 2", "--workdir", error=CheckpointError):
        Checkpoints(tmp_path / "c", score=TOP1)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["1", "2"]


def test_all_damaged_checkpoints_raise_and_stay_in_place(tmp_path, run, state):
    save(tmp_path / "c", state, [1, 2])
    for step in ("1", "2"):
        truncate(find_largest_file(tmp_path / "c" / step))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with refuses(tmp_path / "c", "step 1", "step 2", "--workdir", error=CheckpointError):
            checkpoints.restore(run.state)
        assert checkpoints.steps == [1, 2]
    assert not (tmp_path / "c_damaged").exists()


def test_shape_mismatch_names_the_parameter(tmp_path, run, state, tiny, meshes):
    save(tmp_path / "c", state, [1])
    tiny.model.update(mlp_dim=21)
    other = train_setup.build(tiny, examples=64, mesh=meshes(1, 1))
    with (
        Checkpoints(tmp_path / "c") as checkpoints,
        refuses("ema.0.blocks.layers.mlp.up.kernel", "(3, 12, 20)", "(3, 12, 21)", error=CheckpointError),
    ):
        checkpoints.restore(other.state)
    assert not (tmp_path / "c_damaged").exists()


def test_missing_step_is_refused(tmp_path, run, state):
    save(tmp_path / "c", state, [1])
    with Checkpoints(tmp_path / "c") as checkpoints, refuses(tmp_path / "c", "step 7", "[1]", error=CheckpointError):
        checkpoints.restore(run.state, 7)


def test_failed_background_save_is_reported_once(tmp_path, state, monkeypatch):
    """The next poll, the next save or the final wait raises the error, whichever comes first."""
    save(tmp_path / "c", state, [1])

    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(integrity, "write_checksums", fail)
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        for step, report in ((2, checkpoints.poll), (3, checkpoints.wait)):
            checkpoints.save(step, state)
            concurrent.futures.wait([checkpoints._pending])
            with refuses(tmp_path / "c", "MiB", error=CheckpointError):
                report()
            checkpoints.poll()
            checkpoints.wait()
