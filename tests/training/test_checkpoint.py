"""Checkpoints: bit-exact round trips, damaged checkpoints are reported and moved aside, failed saves are reported."""

import concurrent.futures
import errno
import json
import shutil

import jax
import numpy as np
import pytest
from messages import mentions, refuses
from small_runs import make_initial_state

from leanformer.errors import CheckpointError
from leanformer.runtime import files
from leanformer.tasks import Score
from leanformer.training import train_setup
from leanformer.training.checkpoint import Checkpoints


TOP1 = Score("top1")


@pytest.fixture(scope="module")
def run(make_tiny, meshes):
    return train_setup.set_up_training(make_tiny(), examples=64, mesh=meshes(1, 1))


@pytest.fixture(scope="module")
def state(run):
    return make_initial_state(run)


def write_scores(folder, scores, name="top1"):
    """Write the records of evaluations beside a folder of checkpoints, as training does."""
    lines = (json.dumps({"step": step, "kind": "eval", name: value}) + "\n" for step, value in scores.items())
    folder.parent.mkdir(exist_ok=True)
    (folder.parent / "metrics.jsonl").write_text("".join(lines))


def save(folder, state, steps, scores=()):
    write_scores(folder, dict(scores))
    with Checkpoints(folder, score=TOP1) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, seconds={"steps": float(step)}, examples=8 * step)
            checkpoints.wait()
        return checkpoints.steps


def find_largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_latest_and_best_are_kept_and_nan_is_never_best(tmp_path, state):
    assert save(tmp_path / "a", state, [1, 2, 3, 4, 5], {1: 0.5, 2: 0.9, 3: 0.7}) == [2, 4, 5]
    write_scores(tmp_path / "c", {1: 0.5, 2: 0.2, 3: None, 4: 0.4}, "error")
    with Checkpoints(tmp_path / "c", keep=1, score=Score("error", higher=False)) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state)
        checkpoints.wait()
        assert checkpoints.steps == [2, 4] and checkpoints.best() == 2
    with Checkpoints(tmp_path / "c") as checkpoints:  # opened without knowing the task
        assert checkpoints.best() == 2 and checkpoints.score == Score("error", higher=False)


def test_remains_of_killed_saves_and_deletions_are_removed_by_training_only(tmp_path, run, state):
    save(tmp_path / "c", state, [1])
    remains = [tmp_path / "c" / name for name in ("5.orbax-checkpoint-tmp", "deleted-0")]
    for folder in remains:
        shutil.copytree(tmp_path / "c" / "1", folder)
    with Checkpoints(tmp_path / "c") as reader:
        assert reader.steps == [1] and reader.restore(run.state)
    assert all(folder.exists() for folder in remains)  # they may be of a save in progress
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        checkpoints.restore(run.state)
        assert checkpoints.steps == [1] and not any(folder.exists() for folder in remains)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def corrupt_metadata(path):
    file = path.parents[len(path.parts) - path.parts.index("2") - 2] / "_CHECKPOINT_METADATA"
    file.write_bytes(file.read_bytes()[:-3])


SLOW = [pytest.param(damage, marks=pytest.mark.slow) for damage in (flip_a_bit, lambda path: path.unlink())]


@pytest.mark.parametrize("damage", [truncate, corrupt_metadata, *SLOW])
def test_damaged_newest_checkpoint_falls_back_with_warning(tmp_path, run, state, capfd, damage):
    save(tmp_path / "c", state, [1, 2], {1: 0.5, 2: 0.6})
    damage(find_largest_file(tmp_path / "c" / "2"))
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        result, seconds, examples = checkpoints.restore(run.state)
        assert seconds == {"steps": 1.0} and examples == 8
        assert mentions(capfd.readouterr().err, "WARNING", "step 2", "Step 1")
        for step in (3, 4, 5):
            checkpoints.save(step, result)
        checkpoints.wait()
        assert checkpoints.steps == [1, 2, 4, 5]  # the best, and the damaged one, which is neither counted nor deleted
    assert_equal_trees(result, state)
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        checkpoints.save(2, result)  # its step can be saved again
        checkpoints.wait()
        assert files.find_corruption(tmp_path / "c" / "2") is None


def test_all_damaged_checkpoints_raise_and_stay_in_place(tmp_path, run, state):
    save(tmp_path / "c", state, [1, 2])
    for step in ("1", "2"):
        truncate(find_largest_file(tmp_path / "c" / step))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with refuses(tmp_path / "c", "step 1", "step 2", "--workdir", error=CheckpointError):
            checkpoints.restore(run.state)
        assert checkpoints.steps == [1, 2]


def test_shape_mismatch_names_the_parameter(tmp_path, run, state, tiny, meshes):
    save(tmp_path / "c", state, [1])
    tiny.model.update(mlp_dim=21)
    other = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
    with (
        Checkpoints(tmp_path / "c") as checkpoints,
        refuses("ema.0.blocks.layers.mlp.up.kernel", "(3, 12, 20)", "(3, 12, 21)", error=CheckpointError),
    ):
        checkpoints.restore(other.state)


def test_failed_background_save_is_reported_once(tmp_path, state, monkeypatch):
    """The next poll, the next save or the final wait raises the error, whichever comes first."""
    save(tmp_path / "c", state, [1])

    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(files, "write_checksums", fail)
    with Checkpoints(tmp_path / "c", score=TOP1) as checkpoints:
        for step, report in ((2, checkpoints.poll), (3, checkpoints.wait)):
            checkpoints.save(step, state)
            concurrent.futures.wait([checkpoints._pending])
            with refuses(tmp_path / "c", "No space left", error=CheckpointError):
                report()
            checkpoints.poll()
            checkpoints.wait()
