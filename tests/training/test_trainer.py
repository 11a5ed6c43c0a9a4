"""Opening a run: traces before the first step, and what a resume with another config does to data and schedule."""

import functools
import itertools

import numpy as np
import pytest
from messages import refuses
from small_runs import make_initial_state, make_small_config

from leanformer import data, models
from leanformer.errors import WorkdirError
from leanformer.runtime.timing import Timer
from leanformer.tasks import Score
from leanformer.train import train
from leanformer.training import loop, run_files, train_setup
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.trainer import open_run_data, open_trainer


@pytest.fixture
def config(tmp_path):
    """Config of a run on endless data, in which the index of an example is its position."""
    return make_small_config("points", tmp_path)


def open_run(config, workdir, meshes):
    """Return a context manager of (trainer, state)."""
    task, source, held_out = open_run_data(config, workdir)
    setup = train_setup.set_up_training(config, examples=data.size(source), mesh=meshes(1, 1), task=task)
    return open_trainer(setup, source, held_out, workdir, Timer())


def save_run(config, workdir, meshes, step):
    """Write the files of a run that was killed after its checkpoint of `step`."""
    setup = train_setup.set_up_training(config, examples=None, mesh=meshes(1, 1))
    state = make_initial_state(setup)
    state.__dict__["step"] = state.step + step
    run_files.begin(workdir, config, {"train": None}, 0)
    (workdir / "metrics.jsonl").touch()
    with Checkpoints(workdir / "checkpoints", score=Score("ema_loss", higher=False)) as checkpoints:
        checkpoints.save(step, state, examples=step * config.batch_size)


def change(config, **values):
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(values)
    return changed


def test_the_model_is_traced_twice_before_the_first_step(tmp_path, monkeypatch, one_device):
    """Once to build it, and once in the training step."""
    config = make_small_config("images", tmp_path)
    traces = []
    model = models.find_class(config.model.name)
    for name in ("__init__", "__call__"):
        original = getattr(model, name)

        def counted(self, *args, original=original, name=name, **options):
            traces.append(name)
            return original(self, *args, **options)

        monkeypatch.setattr(model, name, functools.wraps(original)(counted))

    def stop(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(loop, "train", stop)
    with pytest.raises(InterruptedError):
        train(config, tmp_path / "run")
    assert traces == ["__init__", "__call__"]


def test_another_batch_size_continues_with_the_next_example(config, tmp_path, meshes):
    save_run(config, tmp_path / "run", meshes, 3)  # 24 examples
    for size, total in ((8, 8), (4, 9), (12, 5)):
        with open_run(change(config, batch_size=size, total_steps=total), tmp_path / "run", meshes) as (trainer, state):
            batches = [batch["index"] for batch in trainer.batches()]
            assert int(state.step) == trainer.first_step == 3 and len(batches) == total - 3
            np.testing.assert_array_equal(np.concatenate(batches), 24 + np.arange(size * (total - 3)))
            assert trainer.examples_seen(total) == 24 + size * (total - 3)
    with refuses("batch_size=16", 24), open_run(change(config, batch_size=16), tmp_path / "run", meshes):
        pass


def test_another_batch_size_needs_a_length_in_steps(tmp_path, meshes):
    save_run(config := make_small_config("images", tmp_path), tmp_path / "run", meshes, 3)
    config = change(config, batch_size=4, total_steps=0, total_epochs=1.0)
    with refuses("batch_size=4", "epochs"), open_run(config, tmp_path / "run", meshes):
        pass


def test_a_finished_run_without_checkpoints_is_not_overwritten(config, tmp_path, meshes):
    (tmp_path / "summary.json").write_text("{}")
    with refuses("without checkpoints", error=WorkdirError), open_run(config, tmp_path, meshes):
        pass


def test_nothing_is_written_before_the_first_record(config, tmp_path, meshes):
    with open_run(config, tmp_path / "run", meshes) as (trainer, _):
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
        assert [*itertools.islice(trainer.batches(), 1)]
