"""Generated datasets appear when they are complete, and are used for their own recipe only."""

import json

import numpy as np
import pytest
from messages import refuses

from leanformer.data.source import RECORD, make_dataset, read_record
from leanformer.errors import DataError


RECIPE = {"seed": 1}


def fill(folder):
    np.save(folder / "numbers.npy", np.arange(5))
    return {"count": 5}


def test_dataset_is_generated_once_with_a_record(tmp_path):
    folder = make_dataset(tmp_path / "a" / "set", RECIPE, fill)
    assert read_record(folder, RECIPE) == {"recipe": RECIPE, "count": 5}
    assert make_dataset(folder, RECIPE, lambda _: pytest.fail("written again")) == folder
    assert {path.name for path in folder.iterdir()} == {"numbers.npy", RECORD}
    with refuses("seed=1", "(configured 2)", error=DataError):
        make_dataset(folder, {"seed": 2}, fill)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_generation_leaves_no_dataset(tmp_path, stop):
    def broken(folder):
        fill(folder)
        raise stop

    with pytest.raises((KeyboardInterrupt, OSError)):
        make_dataset(tmp_path / "set", RECIPE, broken)
    assert not list(tmp_path.iterdir())


def test_dataset_generated_by_another_process_is_used(tmp_path):
    def late(folder):
        make_dataset(tmp_path / "set", RECIPE, fill)
        return {}

    assert read_record(make_dataset(tmp_path / "set", RECIPE, late), RECIPE)["count"] == 5


def test_unrelated_folder_is_refused_and_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(tmp_path, RECORD, error=DataError):
        make_dataset(tmp_path, RECIPE, fill)
    (tmp_path / RECORD).write_text(json.dumps({"recipe": RECIPE})[:-4])  # torn
    with refuses(tmp_path, error=DataError):
        make_dataset(tmp_path, RECIPE, fill)
    assert len(list(tmp_path.iterdir())) == 2
