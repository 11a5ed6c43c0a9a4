"""Class names: the same number in every split and when a run resumes; mismatches are refused, never renumbered."""

import json
import shutil

import numpy as np
import pytest
from commands import CONFIGS, run_in_process
from messages import mentions, refuses

from leanformer import config, prepare, tasks
from leanformer.data import Source
from leanformer.data.images import open_images
from leanformer.data.images.sources import Idx
from leanformer.errors import ConfigError, DataError, WorkdirError
from leanformer.sweeps.grid import SweepRun
from leanformer.tasks import artifacts
from leanformer.train import train
from leanformer.training import run_files
from tests.data.test_source import make_png, write_idx


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
    source, held_out = tasks.open_data(tasks.build(c).data, c, classes)
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


def test_idx_data_take_names_from_the_classes_file(tmp_path):
    for stem, array in (("images-idx3", np.zeros((4, 5, 5), np.uint8)), ("labels-idx1", np.arange(4, dtype=np.uint8))):
        write_idx(tmp_path / f"train-{stem}-ubyte", array)
    assert Idx(tmp_path, "train").classes is None
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\ne\n")
    source = Idx(tmp_path, "train")
    assert source.classes == ["a", "b", "c", "d", "e"] and source.num_classes == 5
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    with refuses(tmp_path, "label 3", "3 classes", error=DataError):
        Idx(tmp_path, "train")


def test_classes_in_another_order_are_refused():
    shape = {"image_size": 28, "channels": 1, "num_classes": 10}
    names = open_images("bundled:fashion_mnist", "t10k", **shape).classes
    assert names[9] == "Ankle boot" and open_images("bundled:fashion_mnist", "t10k", **shape, classes=list(names))
    with refuses("10 (T-shirt", "10 (Ankle boot", error=DataError):
        open_images("bundled:fashion_mnist", "t10k", **shape, classes=names[::-1])


def test_prepare_check_reports_class_names(small_config):
    result = prepare.check(small_config)
    assert result["train"]["classes"] == result["val"]["classes"] == "3 (ape, bee, cat)"
    assert set(result["val"]["labels seen"]) == {"bee"} and set(result["train"]["labels seen"]) == {"ape", "bee", "cat"}


def test_run_saves_and_enforces_its_classes(small_config, pictures, tmp_path, capfd):
    """The number of classes is that of the training split."""
    workdir, small_config.model.num_classes = tmp_path / "run", 0
    assert artifacts.load_classes(workdir) is None
    assert train(small_config, workdir) == 0
    assert "  3 (ape, bee, cat)\n" in capfd.readouterr().out
    assert artifacts.load_classes(workdir) == ("ape", "bee", "cat")
    assert artifacts.load_config(workdir).model.num_classes == 3

    shutil.rmtree(pictures / "train" / "ape")  # bee must not become 0
    small_config.model.num_classes, small_config.total_steps = 3, 3
    assert train(small_config, workdir) == 0
    assert artifacts.load_classes(workdir) == ("ape", "bee", "cat")
    assert list_labels(open_splits(small_config, artifacts.load_classes(workdir))[1]) == [1] * 4

    write_images(pictures, train=["aal"])
    small_config.total_steps = 4
    with refuses("1 (aal)", "3 (ape, bee, cat)", error=DataError):
        train(small_config, workdir)
    assert artifacts.load_config(workdir).total_steps == 3


class SourceWithClasses(Source):
    classes = ("a", "b")


def test_run_without_saved_classes_warns(small_config, tmp_path, capfd):
    artifacts.warn_missing_classes(tmp_path, ["a", "b"])  # no run at all
    run_files.write_config(tmp_path, small_config)
    artifacts.warn_missing_classes(tmp_path, None)  # data without names
    assert capfd.readouterr().err == ""
    artifacts.warn_missing_classes(tmp_path, ["a", "b"])
    assert mentions(capfd.readouterr().err, tmp_path, "classes.json", "a, b")
    artifacts.save(tmp_path, SourceWithClasses())
    artifacts.warn_missing_classes(tmp_path, ["a", "b"])
    assert capfd.readouterr().err == ""
    (tmp_path / "data.json").unlink()  # a run of an older version
    for broken in ("[1, 2]", '{"a": 0}', '["a"'):
        (tmp_path / "classes.json").write_text(broken)
        with refuses(tmp_path / "classes.json"):
            artifacts.load_classes(tmp_path)
    (tmp_path / "classes.json").write_text(json.dumps(["x", "y"]))
    assert artifacts.load_classes(tmp_path) == ("x", "y")


def test_zero_num_classes_is_filled_from_the_training_split(pictures, tmp_path):
    c = config.base()
    c.model.num_classes = 0
    with refuses("model.num_classes=0"):
        config.check(c)
    c.data.update(name=f"folder:{pictures}", eval_split="val")
    tasks.fill_num_classes(c)
    assert c.model.num_classes == 3
    config.check(c)
    (pictures / "train" / "dog").mkdir()
    (pictures / "train" / "dog" / "0.png").write_bytes(make_png(0))
    tasks.fill_num_classes(c)
    assert c.model.num_classes == 3  # only 0 is replaced
    run = SweepRun(tmp_path / "run", (f"--config={CONFIGS / 'own_images.py'}", f"--config.data.name=folder:{pictures}"))
    assert run.config.model.num_classes == 4

    c.model.num_classes, c.data.name = 0, "synthetic"
    with refuses("model.num_classes=0", "synthetic", error=ConfigError):
        tasks.fill_num_classes(c)
    c.data.name = "folder:/nowhere"
    with refuses("/nowhere", error=DataError):
        tasks.fill_num_classes(c)


@pytest.mark.parametrize("edit", [["bee", "ape", "cat"], ["ape", "bee"], ["ape", "bee", "car"]])
def test_edited_classes_are_refused(small_config, pictures, tmp_path, edit):
    artifacts.save(tmp_path, open_splits(small_config)[0])
    assert artifacts.load_classes(tmp_path) == ("ape", "bee", "cat")
    (tmp_path / "classes.json").write_text(json.dumps(edit))
    with refuses(tmp_path / "classes.json", tmp_path / "data.json", error=WorkdirError):
        artifacts.load_classes(tmp_path)
    (tmp_path / "data.json").unlink()  # edited on purpose
    assert artifacts.load_classes(tmp_path) == tuple(edit)
    (tmp_path / "data.json").write_text("[]")
    with refuses(tmp_path / "data.json", error=WorkdirError):
        artifacts.load_classes(tmp_path)


@pytest.mark.slow  # test_fingerprints compares data without runs
def test_resumed_run_warns_of_changed_data(small_config, pictures, tmp_path, capfd):
    workdir, small_config.checkpoint.every = tmp_path / "run", 0
    assert train(small_config, workdir) == 0
    assert capfd.readouterr().err == ""
    (pictures / "train" / "ape" / "0.png").unlink()
    small_config.total_steps = 3
    assert train(small_config, workdir) == 0
    err = capfd.readouterr().err
    assert mentions(err, "WARNING", "train", workdir, "12 -> 11 examples", "names") and not mentions(err, "val")
    small_config.total_steps = 4  # once
    assert train(small_config, workdir) == 0
    assert "12 -> 11" not in capfd.readouterr().err


def test_evaluation_ignores_new_classes_of_the_training_split(small_config, pictures, tmp_path, capfd):
    """It reads the evaluation split alone, records into a writable folder, and only warns if there is none."""
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert train(small_config, workdir) == 0
    write_images(pictures, train=["aal"])
    (workdir / "evaluation.json").mkdir()  # not writable, also for root
    status, text, err = run_in_process(["", "", "leanformer.evaluate", f"--workdir={workdir}"])
    assert status == 0 and "loss" in text and mentions(err, "WARNING", workdir, "--out=DIR")
    status, _, err = run_in_process(["", "", "leanformer.evaluate", f"--workdir={workdir}", f"--out={out}"])
    assert (status, err) == (0, "") and json.loads((out / "evaluation.json").read_text())["accuracy"].keys() == {
        *("ape", "bee", "cat")
    }
    assert (out / "confusion.csv").is_file() and (out / "plots" / "confusion.png").is_file()


@pytest.mark.parametrize("command", ["check", "train"])
def test_files_in_both_splits_are_warned_of(small_config, pictures, tmp_path, capfd, command):
    for split in ("train", "val"):
        lines = [f"train/{label}/{i}.png" for label in ("ape", "bee", "cat") for i in range(3 + (split == "train"))]
        (pictures / f"{split}.txt").write_text("\n".join(lines))
    if command == "check":
        prepare.check(small_config)
    else:
        train(small_config, tmp_path / "run", dry_run=True)
    assert mentions(capfd.readouterr().err, "WARNING", f"folder:{pictures}", 9, "val", "train/ape/0.png")


def test_evaluation_on_the_training_split_is_warned_of(small_config, pictures, capfd):
    small_config.data.eval_split = "train"
    prepare.check(small_config)
    assert mentions(capfd.readouterr().err, "WARNING", f"folder:{pictures}", "train")


@pytest.mark.parametrize("content", ['{"splits": {"train": 5}}', '{"sha256": []}', '{"splits": [1]}', "[]"])
def test_malformed_records_of_data_are_refused(tmp_path, content):
    (tmp_path / "data.json").write_text(content)
    with refuses(tmp_path / "data.json", error=WorkdirError):
        artifacts.warn_changed_data(tmp_path, {"train": {"examples": 3}})
