"""Atomic writes: the order of syncs and renames, the state after a failed write; checksums of a folder."""

import json
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from messages import mentions

from leanformer import pretrained
from leanformer.data.source import make_dataset
from leanformer.runtime import files
from leanformer.tasks import Score
from leanformer.training import run_files
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture
def calls(monkeypatch):
    """Record every sync and rename, in order."""
    result, fsync, replace = [], os.fsync, os.replace

    def record_sync(handle):
        result.append(("sync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def record_rename(old, new, **_):
        result.append(("name", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr(os, "rename", record_rename)
    return result


def begin_records(folder):
    with run_files.Recorder(folder, start=0, total=1) as record:
        record.begin()


def list_writers(folder, tiny):
    yield "a.json", lambda: files.write_json(folder / "a.json", {"a": [1, 2]})
    yield "b.json", lambda: run_files.write_json(folder / "b.json", {})
    yield "config.json", lambda: run_files.write_config(folder, tiny)
    yield "metrics.jsonl", lambda: begin_records(folder)
    yield "c.safetensors", lambda: pretrained.write(folder / "c.safetensors", {"x": np.ones(3)})


def test_writers_sync_the_file_then_rename_then_sync_the_folder(tmp_path, tiny, calls):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, write in list_writers(folder, tiny):
        calls.clear()
        write()
        (_, draft), *rest = [call for call in calls if "tfevents" not in call[1]]  # those are appended to
        assert re.fullmatch(rf"{name}\.\w+\.part", draft) and rest == [("name", name), ("sync", "run")]
        assert (folder / name).is_file()
    assert not list(folder.glob("*.part"))
    assert json.loads((folder / "a.json").read_text()) == {"a": [1, 2]}


def test_generated_dataset_is_synced_before_its_rename(tmp_path, calls):
    make_dataset(tmp_path / "set", {}, lambda folder: (folder / "x").write_text("1") and {})
    index = calls.index(("name", "set"))
    assert {("sync", "x"), ("sync", "recipe.json")} < set(calls[:index]) and calls[index + 1 :] == [
        ("sync", tmp_path.name)
    ]


def test_checkpoint_is_synced_before_its_manifest(tmp_path, calls):
    with Checkpoints(tmp_path / "c", 2, score=Score("top1")) as checkpoints:
        checkpoints.save(3, {"x": np.arange(7.0)})
        checkpoints.wait()
        calls_of_save = list(calls)
    folder = tmp_path / "c" / "3"
    manifest = json.loads((folder / "files.json").read_text())
    index = calls_of_save.index(("name", "files.json"))
    assert {("sync", Path(name).name) for name in manifest} | {("sync", "3"), ("sync", "c")} < set(
        calls_of_save[:index]
    )
    assert len(manifest) > 3 and calls[-2:] == [("name", "files.json"), ("sync", "3")]
    assert calls[-3][0] == "sync" and calls[-3][1].startswith("files.json.")


def test_writers_at_the_same_time_and_files_beside_them(tmp_path):
    (tmp_path / "x.part").write_text("of the user")
    (tmp_path / "x").write_text("old")
    with files.atomic_write(tmp_path / "x") as slow:
        slow.write_text("half")
        files.write_text(tmp_path / "x", "whole")
        assert (tmp_path / "x").read_text() == "whole"
        slow.write_text("half and half")
    assert (tmp_path / "x").read_text() == "half and half"
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.part"}


def test_failed_write_keeps_the_old_file_and_no_draft(tmp_path):
    files.write_text(tmp_path / "x", "old")
    with pytest.raises(RuntimeError, match="disk"), files.atomic_write(tmp_path / "x") as draft:
        draft.write_text("ne")
        raise RuntimeError("disk full")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


BLOCK = 2**22  # bytes per read


@pytest.fixture
def folder(tmp_path, rng):
    """Return a folder with files of several blocks, of one byte and of zero bytes, one of them in a subfolder."""
    (tmp_path / "state" / "d").mkdir(parents=True)
    for name, size in (("large", 2 * BLOCK + 77), ("d/small", 1), ("empty", 0)):
        (tmp_path / "state" / name).write_bytes(rng.bytes(size))
    files.write_checksums(tmp_path / "state")
    return tmp_path / "state"


def test_manifest_has_sizes_and_checksums(folder):
    manifest = json.loads((folder / files.MANIFEST).read_text())
    contents = {name: (folder / name).read_bytes() for name in ("large", "d/small", "empty")}
    assert manifest == {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
    assert files.find_corruption(folder) is None


@pytest.mark.parametrize("offset", [0, BLOCK - 1, BLOCK, -1])
def test_one_flipped_bit_is_detected(folder, offset):
    content = bytearray((folder / "large").read_bytes())
    content[offset] ^= 1
    (folder / "large").write_bytes(content)
    assert mentions(files.find_corruption(folder), "large")


def test_wrong_sizes_and_missing_files_are_detected(folder):
    (folder / "d" / "small").write_bytes(b"")
    assert mentions(files.find_corruption(folder), "d/small", 1, 0)
    (folder / "d" / "small").unlink()
    assert mentions(files.find_corruption(folder), "d/small", 1)
    (folder / files.MANIFEST).write_text("{")
    assert files.find_corruption(folder)
    (folder / files.MANIFEST).unlink()
    assert files.find_corruption(folder) is None  # a save that was killed before its manifest was written


def test_sync_failure_is_an_error_unless_sync_is_unsupported(tmp_path, monkeypatch):
    def make_sync_fail(number):
        def fsync(handle):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    make_sync_fail(22)
    files.write_text(tmp_path / "x", "new")
    make_sync_fail(28)
    with pytest.raises(OSError, match=os.strerror(28)):
        files.write_text(tmp_path / "x", "newer")
    assert (tmp_path / "x").read_text() == "new"
