"""Weights in several files with an index."""

import json

import numpy as np
import pytest
from messages import refuses
from safetensors.numpy import save_file

from leanformer import pretrained
from leanformer.errors import WeightsError


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def arrays(tmp_path, rng):
    """Return the arrays of an index and its two files."""
    arrays = {name: rng.standard_normal(size).astype(np.float32) for name, size in (("a", 7), ("b", 13), ("c", 3))}
    places = {"a": FIRST, "b": SECOND, "c": SECOND}
    for file in (FIRST, SECOND):
        save_file({name: arrays[name] for name, place in places.items() if place == file}, tmp_path / file)
    write_index(tmp_path, places)
    return arrays


def write_index(folder, places):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def test_several_files_are_read(arrays, tmp_path):
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        result = pretrained.read(path)
        assert result.keys() == arrays.keys()
        for name, value in arrays.items():
            np.testing.assert_array_equal(result[name], value, err_msg=name)


def test_missing_file_of_an_index_is_named(arrays, tmp_path):
    index = write_index(tmp_path, {"a": "other.safetensors"})
    with refuses(tmp_path / "other.safetensors", error=WeightsError):
        pretrained.read(index)
