"""Weights in several files, and indexes that may not lead outside their folder."""

import json

import numpy as np
import pytest
from messages import refuses
from safetensors.numpy import load_file, save, save_file

from leanformer import pretrained
from leanformer.errors import WeightsError
from leanformer.pretrained import storage


@pytest.fixture
def arrays(rng):
    """Return arrays of 28, 52, 404, 44 and 12 bytes."""
    sizes = {"a.weight": 7, "a.bias": 13, "b.weight": 101, "b.bias": 11, "c": 3}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def check_equal(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)


def test_shards_are_written_and_read(arrays, tmp_path):
    index = pretrained.write_sharded(tmp_path / "model", arrays, 90)
    assert index == tmp_path / "model.safetensors.index.json"
    content, files = json.loads(index.read_text()), sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    shards = [load_file(path) for path in files]
    assert [sorted(part) for part in shards] == [["a.bias", "a.weight"], ["b.weight"], ["b.bias", "c"]]
    assert content["metadata"] == {"total_size": 4 * (7 + 13 + 101 + 11 + 3)}
    assert content["weight_map"] == {name: path.name for path, part in zip(files, shards, strict=True) for name in part}
    for path in (index, tmp_path):
        check_equal(pretrained.read(path), arrays)
    assert storage.split_into_shards(arrays, 80) == [["a.weight", "a.bias"], ["b.weight"], ["b.bias", "c"]]
    assert [len(names) for names in storage.split_into_shards(arrays, 79)] == [1, 1, 1, 2]
    assert storage.split_into_shards(arrays, 541) == [[*arrays]]


def test_interrupted_write_leaves_no_index(arrays, tmp_path, monkeypatch):
    pretrained.write_sharded(tmp_path / "model", arrays, 90)
    write, written = pretrained.write, []

    def fail_after_first(path, *rest):
        if written:
            raise OSError("power cut")
        written.append(write(path, *rest))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="power cut"):
        patch.setattr(storage, "write", fail_after_first)
        pretrained.write_sharded(tmp_path / "model", {name: 2 * value for name, value in arrays.items()}, 90)
    with refuses(tmp_path, "model-00001-of-00003.safetensors", error=WeightsError):
        pretrained.read(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/secret.safetensors", ".hidden.safetensors", "x.bin", 3]
    + ["..\\secret.safetensors", "C:secret.safetensors", "s\0.safetensors", ["m.safetensors"]],
)
def test_index_outside_its_folder_is_refused(name, arrays, tmp_path, monkeypatch):
    folder = tmp_path / "inner"
    index = pretrained.write_sharded(folder / "model", arrays, 90)
    save_file(arrays, tmp_path / "secret.safetensors")
    content = json.loads(index.read_text())
    content["weight_map"]["c"] = name
    index.write_text(json.dumps(content))
    monkeypatch.setattr(storage, "_read_file", lambda path: pytest.fail(f"{path} was opened"))
    with refuses(index, repr(name), "c", error=WeightsError):
        pretrained.read(index)


def test_damaged_indexes_and_shards_are_refused(arrays, tmp_path):
    index = pretrained.write_sharded(tmp_path / "model", arrays, 90)
    content = json.loads(index.read_text())
    second = tmp_path / "model-00002-of-00003.safetensors"
    for broken, parts in (
        ("{", (index, "weight_map")),
        ("[]", (index, "weight_map")),
        ('{"weight_map": []}', (index, "weight_map")),
        ('{"weight_map": {}}', (index,)),
        (json.dumps(content | {"weight_map": content["weight_map"] | {"d": second.name}}), (second, 1, "(d)")),
        (
            json.dumps({"weight_map": {n: f for n, f in content["weight_map"].items() if n != "c"}}),
            (tmp_path / "model-00003-of-00003.safetensors", 1, "(c)"),
        ),
    ):
        index.write_text(broken)
        with refuses(*parts, error=WeightsError):
            pretrained.read(index)
    index.write_text(json.dumps(content))
    data = second.read_bytes()
    second.write_bytes(data[:-9])
    with refuses(second, len(data) - 9, error=WeightsError):
        pretrained.read(index)
    second.unlink()
    with refuses(index, second.name, error=WeightsError):
        pretrained.read(tmp_path)
    second.write_bytes(data)
    save_file(arrays, tmp_path / "model.safetensors")
    with refuses(tmp_path, index.name, "model.safetensors", error=WeightsError):
        pretrained.read(tmp_path)
    with refuses(tmp_path.parent / tmp_path.name / "..", error=WeightsError):
        pretrained.read(tmp_path.parent / tmp_path.name / "..")


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x4B50])
def test_header_length_that_starts_like_a_pickle_is_read(length, arrays, tmp_path):
    path = tmp_path / "x.safetensors"
    header = len(save(arrays, {"about": ""})) - 4 * (7 + 13 + 101 + 11 + 3) - 8
    save_file(arrays, path, {"about": "x" * (length - header)})
    assert path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"PK")
    check_equal(pretrained.read(path), arrays)


def test_shard_sizes_are_parsed():
    sizes = {"5GB": 5 * 10**9, "1.5MB": 1_500_000, "2KiB": 2048, "1MiB": 2**20}
    assert {text: storage.parse_size(text) for text in sizes} == sizes
    for text in ("5", "0GB", "-1GB", "5 GB", "GB", "5gb", "0.0001KB"):
        with refuses(f"--max_shard_size={text}", "5GB"):
            storage.parse_size(text)
