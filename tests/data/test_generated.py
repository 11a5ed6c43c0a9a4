"""Locally generated datasets: written once, atomically, and never over other files."""

import json

import pytest
from messages import refuses

from leanformer.data import generated
from leanformer.errors import DataError


RECIPE = {"seed": 3, "size": 31}


def fill(folder):
    (folder / "numbers.txt").write_text("1 2 3")
    return {"count": 3}


def make_dataset(folder, fill=fill, **changes):
    return generated.make(folder, "Lists", 1, RECIPE | changes, fill)


def test_dataset_is_generated_once_with_a_record(tmp_path):
    folder = make_dataset(tmp_path / "set")
    record = json.loads((folder / "lists.json").read_text())
    assert (record["version"], record["recipe"], record["count"], len(record["sha256"])) == (1, RECIPE, 3, 1)
    assert make_dataset(folder, lambda folder: pytest.fail("made again")) == folder
    with refuses(folder, "seed=3", 4, "size=31", 5, error=DataError):
        make_dataset(folder, seed=4, size=5)
    (folder / "lists.json").write_text(json.dumps(record | {"version": 2}))
    with refuses(folder, 2, 1, error=DataError):
        generated.read(folder, "Lists", 1, {})


def test_changed_or_missing_file_is_refused(tmp_path):
    folder = make_dataset(tmp_path / "set")
    path, record = folder / "numbers.txt", generated.read(folder, "Lists", 1, RECIPE)
    generated.check_file(path, record)
    path.write_text("1 2 4")
    with refuses(path, error=DataError):
        generated.check_file(path, record)
    path.unlink()
    with refuses(path, error=DataError):
        generated.check_file(path, record)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_generation_leaves_no_dataset(tmp_path, stop):
    def fill_then_stop(folder):
        fill(folder)
        assert [path.name[:6] for path in tmp_path.iterdir()] == [".half."]
        raise stop

    with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else DataError):
        make_dataset(tmp_path / "half", fill_then_stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".half.killed00").mkdir()  # left by a killed run
    assert make_dataset(tmp_path / "half").is_dir()


def test_dataset_generated_by_another_process_is_used(tmp_path):
    folder = make_dataset(tmp_path / "set", lambda folder: make_dataset(tmp_path / "set") and fill(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["set"] and generated.read(folder, "Lists", 1, RECIPE)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"version": 1}', '{"version": 1, "recipe": 3, "sha256": {}}'])
def test_unrelated_folder_is_refused_and_unchanged(tmp_path, text):
    (tmp_path / "thesis.tex").write_text("years of work")
    if text is not None:
        (tmp_path / "lists.json").write_text(text)
    names = sorted(path.name for path in tmp_path.iterdir())
    for use in (make_dataset, lambda folder: generated.read(folder, "Lists", 1, {})):
        with refuses(tmp_path, "lists.json", error=DataError):
            use(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with refuses(tmp_path / "thesis.tex" / "set", error=DataError):  # a folder inside a file
        make_dataset(tmp_path / "thesis.tex" / "set")
