"""Files in, classes by name out: from a run that the commands themselves have made."""

import csv
import io
import json

import numpy as np
import pytest
from commands import inside
from PIL import Image

import leanformer
from leanformer import predict
from leanformer.tasks import labels
from leanformer.training import experiment, report
from leanformer.training.checkpoint import Checkpoints


CLASSES = ("ant", "bee", "cat, small", "dog", "elk")


@pytest.fixture
def workdir(tmp_path, tiny, meshes):
    folder = tmp_path / "run"
    report.write_config(folder, tiny)
    labels.write(folder, CLASSES)
    with Checkpoints(folder / "checkpoints") as saved:
        saved.save(6, experiment.build(tiny, examples=64, mesh=meshes(1, 1)).initial_state())
    return folder


@pytest.fixture
def pictures(tmp_path, rng):
    """Two pictures in a folder and one in a folder in it, and what is none."""
    folder = tmp_path / "in"
    (folder / "more").mkdir(parents=True)
    for name in ("b.png", "a.jpg", "more/ü.PNG"):
        Image.fromarray(rng.integers(0, 256, (21, 30, 3), dtype=np.uint8)).save(folder / name)
    (folder / "._a.jpg").write_bytes(b"resource fork")
    (folder / "notes.txt").write_text("no picture")
    return folder


def ask(workdir, *words):
    return inside(["", "", "leanformer.predict", f"--workdir={workdir}", *words])


def test_json_of_a_folder(workdir, pictures):
    status, out, err = ask(workdir, "--top=2", pictures)
    lines = [json.loads(line) for line in out.splitlines()]
    wanted = [pictures / "a.jpg", pictures / "b.png", pictures / "more" / "ü.PNG"]
    assert (status, err) == (0, "") and [line["file"] for line in lines] == list(map(str, wanted))
    expected = leanformer.load(workdir).probabilities([path.read_bytes() for path in wanted])
    for line, scores in zip(lines, expected, strict=True):
        best = np.argsort(-scores)[:2]
        assert [found["class"] for found in line["classes"]] == [CLASSES[i] for i in best]
        np.testing.assert_allclose([found["probability"] for found in line["classes"]], scores[best], atol=2e-6)


def test_csv_to_a_file(workdir, pictures, tmp_path):
    status, out, _ = ask(workdir, "--format=csv", f"--out={tmp_path / 'out.csv'}", pictures / "b.png")
    assert status == 0 and "1 of 1 files, step 6" in out
    head, *rows = csv.reader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert head == ["file", "class", "probability"] and {row[1] for row in rows} == set(CLASSES)
    assert sum(float(row[2]) for row in rows) == pytest.approx(1, abs=1e-5)


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_done(workdir, pictures):
    (pictures / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    status, out, err = ask(workdir, pictures)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 2 and sum("classes" in line for line in lines) == 3
    assert f"Cannot be read: {pictures / 'broken.jpg'}" in err and "error" in lines[2]


def test_a_file_named_twice_is_answered_twice(workdir, pictures):
    path = next(pictures.glob("*.png"), None) or sorted(pictures.iterdir())[0]
    _, out, _ = ask(workdir, path, path)
    first, second = out.splitlines()
    assert first == second and json.loads(first)["file"] == str(path)


def test_more_files_than_a_batch(workdir, pictures, monkeypatch):
    monkeypatch.setattr(predict, "BATCH", 2)
    _, few, _ = ask(workdir, pictures)
    monkeypatch.undo()
    _, all_at_once, _ = ask(workdir, pictures)
    assert [json.loads(line)["file"] for line in few.splitlines()] == [
        json.loads(line)["file"] for line in all_at_once.splitlines()
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "takes files or folders, and flags as --name=value; found nothing"),
        (("nowhere.png",), "nowhere.png is not there. Give files, or folders"),
        (("--top=0", "x.png"), "--top=0 must be at least 1"),
        (("--best", "x.png"), "was evaluated during training; leave out --best"),
    ],
)
def test_what_cannot_be(workdir, words, message):
    status, out, err = ask(workdir, *words)
    assert (status, out) == (2, "") and message in err


def test_a_folder_without_pictures(workdir, tmp_path):
    (tmp_path / "empty").mkdir()
    status, _, err = ask(workdir, tmp_path / "empty")
    assert status == 2 and "holds no file with one of .jpg" in err
