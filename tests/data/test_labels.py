"""Class names: the same number in every split and when a run resumes; mismatches are refused, never renumbered."""

import shutil

import pytest
from commands import CONFIGS
from messages import refuses

from leanformer import config, prepare, tasks
from leanformer.data.images import sources
from leanformer.errors import ConfigError, DataError
from leanformer.sweeps.runs import SweepRun
from leanformer.train import train
from leanformer.training import run_files
from tests.data.test_source import make_png


def write_images(root, **splits):
    """Write `<root>/<split>/<class>/0.png` to `3.png` and return the root."""
    for folder in (root / split / label for split, classes in splits.items() for label in classes):
        folder.mkdir(parents=True)
        for i in range(4):
            (folder / f"{i}.png").write_bytes(make_png(10 * i))
    return root


@pytest.fixture
def pictures(tmp_path):
    """Write three classes to train on, and one of them, neither the first nor the last, to evaluate on."""
    return write_images(tmp_path / "pictures", train=["ape", "bee", "cat"], val=["bee"])


@pytest.fixture
def small_config(plain, pictures, one_device):
    plain.data.update(name=f"folder:{pictures}", eval_split="val")
    plain.model.num_classes = 3
    plain.update(batch_size=8, total_steps=2)
    plain.eval.update(every=0, batch_size=8)
    plain.probe.every = 0
    return plain


def test_single_class_is_refused(small_config, tmp_path):
    write_images(tmp_path / "one", train=["ape"], val=["ape"])
    small_config.data.name, small_config.model.num_classes = f"folder:{tmp_path / 'one'}", 1
    for call in (lambda: prepare.check(small_config), lambda: train(small_config, tmp_path / "run")):
        with refuses(f"folder:{tmp_path / 'one'}", "1 (ape)", 2, error=DataError):
            call()


def list_labels(source):
    return [source[i]["label"] for i in range(len(source))]


def open_splits(c, classes=None):
    source, held_out = tasks.open_data(tasks.build_task(c).data, c, classes)
    return source, held_out[""]


def test_evaluation_uses_training_numbers(small_config, pictures):
    source, held_out = open_splits(small_config)
    assert list(source.classes) == list(held_out.classes) == ["ape", "bee", "cat"]
    assert list_labels(held_out) == [1] * 4  # 0 if the split numbered its classes itself
    write_images(pictures, val=["dog", "eel"])
    with refuses("val", "2 (dog, eel)", "3 (ape, bee, cat)", error=DataError):
        open_splits(small_config)


def test_classes_file_sets_the_order(small_config, pictures):
    (pictures / "classes.txt").write_text("cat\nbee\n\nape\nyak\n")
    small_config.model.num_classes = 4
    source, held_out = open_splits(small_config)
    tasks.check_names(small_config, source)
    assert (list_labels(source)[0], list_labels(source)[-1], list_labels(held_out)[0]) == (2, 0, 1)
    (pictures / "classes.txt").write_text("cat\nbee\ncat\n")
    with refuses("classes.txt", "1 (cat)", error=DataError):
        open_splits(small_config)


def test_more_outputs_than_classes_are_refused_in_a_new_run(small_config, tmp_path):
    small_config.model.num_classes = 5
    with refuses("3 (ape, bee, cat)", "model.num_classes=5", "--config.model.num_classes=3", error=DataError):
        train(small_config, tmp_path / "run")
    with refuses("model.num_classes=5", "classes.txt", error=DataError):
        prepare.check(small_config)
    assert not (tmp_path / "run").exists()


def test_unknown_class_of_a_text_split_is_refused(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\none\tcat\ntwo\tdog\nsix\teel\n")
    (tmp_path / "test.tsv").write_text("text\tlabel\nten\tyak\n")
    c = config.sequences()
    c.data.update(name=f"text:{tmp_path}", train_split="train", eval_split="test")
    c.model.update(vocabulary=257, num_classes=3)
    with refuses("test.tsv", "1 (yak)", "3 (cat, dog, eel)", error=DataError):
        open_splits(c)


def test_prepare_check_reports_class_names(small_config):
    result = prepare.check(small_config)
    assert result["train"]["classes"] == result["val"]["classes"] == "3 (ape, bee, cat)"
    assert set(result["val"]["labels seen"]) == {"bee"} and set(result["train"]["labels seen"]) == {"ape", "bee", "cat"}


@pytest.mark.slow
def test_run_saves_and_enforces_its_classes(small_config, pictures, tmp_path, capfd):
    """The training split has the number of classes."""
    workdir, small_config.model.num_classes = tmp_path / "run", 0
    assert run_files.load_classes(workdir) is None
    assert train(small_config, workdir) == 0
    assert "  3 (ape, bee, cat)\n" in capfd.readouterr().out
    assert run_files.load_classes(workdir) == ("ape", "bee", "cat")
    assert run_files.load_config(workdir).model.num_classes == 3

    shutil.rmtree(pictures / "train" / "ape")  # bee must not become 0
    small_config.model.num_classes, small_config.total_steps = 3, 3
    assert train(small_config, workdir) == 0
    assert run_files.load_classes(workdir) == ("ape", "bee", "cat")
    assert list_labels(open_splits(small_config, run_files.load_classes(workdir))[1]) == [1] * 4

    write_images(pictures, train=["aal"])
    small_config.total_steps = 4
    with refuses("1 (aal)", "3 (ape, bee, cat)", error=DataError):
        train(small_config, workdir)
    assert run_files.load_config(workdir).total_steps == 3


def test_zero_num_classes_is_filled_from_the_training_split(pictures, tmp_path, monkeypatch):
    c = config.base()
    c.model.num_classes = 0
    c.data.update(name=f"folder:{pictures}", eval_split="val")
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_scan_folders", lambda *_: pytest.fail("all files are listed twice"))
        tasks.resolve(c)
    assert c.model.num_classes == 3
    config.check(c)
    (pictures / "train" / "dog").mkdir()
    (pictures / "train" / "dog" / "0.png").write_bytes(make_png(0))
    tasks.resolve(c)
    assert c.model.num_classes == 3  # only 0 is replaced
    run = SweepRun(tmp_path / "run", (f"--config={CONFIGS / 'own_images.py'}", f"--config.data.name=folder:{pictures}"))
    assert run.config.model.num_classes == 4

    c.model.num_classes, c.data.name = 0, "synthetic"
    with refuses("model.num_classes=0", "synthetic", error=ConfigError):
        tasks.resolve(c)
