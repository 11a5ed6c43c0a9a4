"""Weights in several files, and indexes that may not lead outside their folder."""

import json

import numpy as np
import pytest
from commands import run_in_process
from messages import mentions, refuses
from safetensors.numpy import load_file, save, save_file

from leanformer import pretrained
from leanformer.errors import WeightsError
from leanformer.pretrained import sharded, storage
from tests.cli.test_convert import load_tensors, make_command


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
    assert sharded.split_into_shards(arrays, 80) == [["a.weight", "a.bias"], ["b.weight"], ["b.bias", "c"]]
    assert [len(names) for names in sharded.split_into_shards(arrays, 79)] == [1, 1, 1, 2]
    assert sharded.split_into_shards(arrays, 541) == [[*arrays]]


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
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", ".hidden.safetensors", "x.bin", 3]
    + ["..\\secret.safetensors", "C:secret.safetensors", "", "s\0.safetensors", None, ["m.safetensors"]],
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


def test_convert_command_writes_and_reads_shards(tmp_path):
    theirs, parts, back = (tmp_path / name for name in ("theirs", "parts", "back"))
    save_file(load_tensors(), theirs)
    status, out, err = run_in_process(
        [*make_command(), "--from=timm", "--to=timm", f"--weights={theirs}", f"--out={parts}", "--max_shard_size=20KB"]
    )
    assert (status, err) == (0, "") and mentions(out, parts / "model.safetensors.index.json", "vit", "timm")
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 1
    status, _, err = run_in_process(
        [*make_command(), "--from=timm", "--to=timm", f"--weights={parts}", f"--out={back}"]
    )
    assert (status, err) == (0, "")
    check_equal(load_file(back / "model.safetensors"), load_tensors())
    for text in ("5", "0GB", "-1GB", "5 GB", "GB", "5gb"):
        status, _, err = run_in_process(
            [*make_command(), f"--weights={theirs}", f"--out={back}", f"--max_shard_size={text}"]
        )
        assert status == 2 and mentions(err, f"--max_shard_size={text}", "5GB"), err


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x4B50])
def test_header_length_that_starts_like_a_pickle_is_read(length, arrays, tmp_path):
    path = tmp_path / "x.safetensors"
    header = len(save(arrays, {"about": ""})) - 4 * (7 + 13 + 101 + 11 + 3) - 8
    save_file(arrays, path, {"about": "x" * (length - header)})
    assert path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"PK")
    check_equal(pretrained.read(path), arrays)


def test_shard_sizes_are_parsed():
    assert [sharded.parse_size(text) for text in ("5GB", "1.5MB", "2KiB", "1MiB")] == [
        5 * 10**9,
        1_500_000,
        2048,
        2**20,
    ]
    with refuses("--max_shard_size=0.0001KB"):
        sharded.parse_size("0.0001KB")
