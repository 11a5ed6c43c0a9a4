"""Sets that are made here: written once, whole or not at all, and never over something else."""

import json

import pytest
from messages import refuses

from leanformer.data import generated
from leanformer.errors import DataError


RECIPE = {"seed": 3, "size": 31}


def fill(folder):
    (folder / "numbers.txt").write_text("1 2 3")
    return {"count": 3}


def make(folder, fill=fill, **changes):
    return generated.make(folder, "Lists", 1, RECIPE | changes, fill)


def test_a_set_is_made_once_with_a_record(tmp_path):
    folder = make(tmp_path / "set")
    record = json.loads((folder / "lists.json").read_text())
    assert (record["version"], record["recipe"], record["count"], len(record["sha256"])) == (1, RECIPE, 3, 1)
    assert make(folder, lambda folder: pytest.fail("made again")) == folder
    with refuses(folder, "seed=3", 4, "size=31", 5, error=DataError):
        make(folder, seed=4, size=5)
    (folder / "lists.json").write_text(json.dumps(record | {"version": 2}))
    with refuses(folder, 2, 1, error=DataError):
        generated.read(folder, "Lists", 1, {})


def test_a_file_is_checked(tmp_path):
    folder = make(tmp_path / "set")
    path, record = folder / "numbers.txt", generated.read(folder, "Lists", 1, RECIPE)
    generated.check_file(path, record)
    path.write_text("1 2 4")
    with refuses(path, error=DataError):
        generated.check_file(path, record)
    path.unlink()
    with refuses(path, error=DataError):
        generated.check_file(path, record)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_set_is_no_set(tmp_path, stop):
    def interrupted(folder):
        fill(folder)
        assert [path.name[:6] for path in tmp_path.iterdir()] == [".half."]
        raise stop

    with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else DataError):
        make(tmp_path / "half", interrupted)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".half.killed00").mkdir()  # what a killed run leaves
    assert make(tmp_path / "half").is_dir()


def test_a_set_that_another_process_made_meanwhile_is_used(tmp_path):
    folder = make(tmp_path / "set", lambda folder: make(tmp_path / "set") and fill(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["set"] and generated.read(folder, "Lists", 1, RECIPE)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"version": 1}', '{"version": 1, "recipe": 3, "sha256": {}}'])
def test_a_folder_of_something_else_is_left_alone(tmp_path, text):
    (tmp_path / "thesis.tex").write_text("years of work")
    if text is not None:
        (tmp_path / "lists.json").write_text(text)
    names = sorted(path.name for path in tmp_path.iterdir())
    for use in (make, lambda folder: generated.read(folder, "Lists", 1, {})):
        with refuses(tmp_path, "lists.json", error=DataError):
            use(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses(tmp_path / "file" / "set", error=DataError):
        make(tmp_path / "file" / "set")
