"""The `predict` command: files in, class names out."""

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from commands import check_refused, run_in_process
from messages import mentions
from PIL import Image
from small_runs import write_run

import leanformer
from leanformer.training import inference, run_files
from leanformer.training.inference import LoadedModel


CLASSES = ("ant", "bee", "cat, small", "dog", "elk")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, make_tiny, meshes):
    """The folder of a run with class names and a checkpoint of step 6."""
    folder = tmp_path_factory.mktemp("predict") / "run"
    write_run(folder, make_tiny(), meshes(1, 1), 6)
    run_files.save_classes_and_tokenizer(folder, SimpleNamespace(classes=CLASSES))
    return folder


@pytest.fixture
def images(tmp_path, rng):
    """Return a folder with two images, one image in a subfolder, and two files that are no images."""
    folder = tmp_path / "in"
    (folder / "more").mkdir(parents=True)
    for name in ("b.png", "a.jpg", "more/ü.PNG"):
        Image.fromarray(rng.integers(0, 256, (21, 30, 3), dtype=np.uint8)).save(folder / name)
    (folder / "._a.jpg").write_bytes(b"resource fork")
    (folder / "notes.txt").write_text("no picture")
    return folder


def make_words(workdir, *more):
    return ["", "", "leanformer.predict", f"--workdir={workdir}", *more]


def test_json_output_for_a_folder_and_a_repeated_file(workdir, images, monkeypatch):
    sizes, make_batch = [], LoadedModel._batch
    monkeypatch.setattr(inference, "BATCH", 2)
    monkeypatch.setattr(LoadedModel, "_batch", lambda model, rows: sizes.append(len(rows)) or make_batch(model, rows))
    status, out, err = run_in_process(make_words(workdir, "--top=2", images, images / "b.png"))
    lines = [json.loads(line) for line in out.splitlines()]
    files = [images / "a.jpg", images / "b.png", images / "more" / "ü.PNG", images / "b.png"]
    assert (status, err, sizes) == (0, "", [2, 2])
    assert [line["file"] for line in lines] == list(map(str, files))
    assert lines[1] == lines[3]
    expected = leanformer.load(workdir).probabilities([path.read_bytes() for path in files])
    # Half a unit of the sixth decimal, and float32 rounding in another batch: some 50 sums of probabilities below 1.
    tolerance = 0.5e-6 + 50 * float(np.finfo(np.float32).eps)
    for line, scores in zip(lines, expected, strict=True):
        reported = {answer["class"]: answer["probability"] for answer in line["classes"]}
        assert len(reported) == 2 and [*reported.values()] == sorted(reported.values(), reverse=True)
        for name, probability in reported.items():
            assert probability == pytest.approx(scores[CLASSES.index(name)], abs=tolerance)
        others = [score for name, score in zip(CLASSES, scores, strict=True) if name not in reported]
        assert max(map(float, others)) <= min(reported.values()) + tolerance


def test_csv_output_to_a_file(workdir, images, tmp_path):
    status, out, _ = run_in_process(
        make_words(workdir, "--format=csv", f"--out={tmp_path / 'out.csv'}", images / "b.png")
    )
    assert status == 0 and mentions(out, tmp_path / "out.csv", 1, 6)
    head, *rows = csv.reader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert head == ["file", "class", "probability"] and {row[1] for row in rows} == set(CLASSES)
    assert sum(float(row[2]) for row in rows) == pytest.approx(1, abs=1e-5)


def test_unreadable_file_does_not_stop_the_others(workdir, images):
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    status, out, err = run_in_process(make_words(workdir, images))
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 2 and sum("classes" in line for line in lines) == 3
    assert mentions(err, images / "broken.jpg") and "error" in lines[2]


def test_output_that_would_overwrite_an_input_is_refused(workdir, images):
    before = (images / "b.png").read_bytes()
    for words in ((images / "b.png",), (images,)):
        check_refused(make_words(workdir, f"--out={images / 'b.png'}", *words), f"--out={images / 'b.png'}")
    assert (images / "b.png").read_bytes() == before
    check_refused(make_words(workdir, f"--out={images}", images / "b.png"), f"--out={images}")
