"""Files whole or not at all: in which order things reach the disk, and what a failure leaves."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from leanformer import pretrained
from leanformer.data import generated
from leanformer.runtime import files
from leanformer.tasks.scores import Score
from leanformer.training import metrics_log, run_files
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture
def calls(monkeypatch):
    """What was synced, and what took its name, in order."""
    result, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        result.append(("sync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def renamed(old, new, **_):
        result.append(("name", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "rename", renamed)
    return result


def writers(folder, tiny):
    yield "a.json", lambda: files.write_json(folder / "a.json", {"a": [1, 2]})
    yield "b.json", lambda: run_files.write_json(folder / "b.json", {})
    yield "config.json", lambda: run_files.write_config(folder, tiny)
    yield "metrics.jsonl", lambda: metrics_log.Recorder(folder, start=0, total=1).__exit__()
    yield "c.safetensors", lambda: pretrained.write(folder / "c.safetensors", {"x": np.ones(3)})


def test_every_writer_syncs_the_file_then_names_it_then_syncs_the_folder(tmp_path, tiny, calls):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, write in writers(folder, tiny):
        calls.clear()
        write()
        of_ours = [call for call in calls if "tfevents" not in call[1]]  # those are the library's, appended to
        assert of_ours == [("sync", f"{name}.part"), ("name", name), ("sync", "run")]
        assert (folder / name).is_file()
    assert not list(folder.glob("*.part"))
    assert json.loads((folder / "a.json").read_text()) == {"a": [1, 2]}


def test_a_made_set_is_on_disk_before_it_has_its_name(tmp_path, calls):
    generated.make(tmp_path / "set", "Lists", 1, {}, lambda folder: (folder / "x").write_text("1") and {})
    at = calls.index(("name", "set"))
    assert {("sync", "x"), ("sync", "lists.json")} < set(calls[:at]) and calls[at + 1 :] == [("sync", tmp_path.name)]


def test_a_checkpoint_is_on_disk_before_its_list_of_files_is(tmp_path, calls):
    with Checkpoints(tmp_path / "c", 2, score=Score("top1")) as saved:
        saved.save(3, {"x": np.arange(7.0)})
        saved.wait()
        calls_of_save = list(calls)
        saved.report(3, 0.5)
    folder = tmp_path / "c" / "3"
    listed = json.loads((folder / "files.json").read_text())
    at = calls_of_save.index(("name", "files.json"))
    assert {("sync", Path(name).name) for name in listed} | {("sync", "3"), ("sync", "c")} < set(calls_of_save[:at])
    assert len(listed) > 3 and calls[-3:] == [("sync", "score.json.part"), ("name", "score.json"), ("sync", "3")]


def test_a_writing_that_fails_leaves_the_old_file_and_no_draft(tmp_path):
    files.write_text(tmp_path / "x", "old")
    with pytest.raises(RuntimeError, match="disk"), files.atomic_write(tmp_path / "x") as draft:
        draft.write_text("ne")
        raise RuntimeError("disk full")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


def test_folders_of_a_file_that_was_asked_for_are_made(tmp_path):
    with files.atomic_user_write(str(tmp_path / "a" / "b" / "x")) as draft:
        draft.write_text("new")
    assert (tmp_path / "a" / "b" / "x").read_text() == "new"


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path):
    """Vectors of texts would not be those of the lines that other programs count."""
    (tmp_path / "t").write_bytes("a\u2028b\x0cc\r\n\nlast".encode())
    assert files.lines(str(tmp_path / "t"), "--texts") == ["a\u2028b\x0cc", "", "last"]


def test_what_cannot_be_synced_is_an_error_but_for_folders_without_a_sync(tmp_path, monkeypatch):
    def fails(number):
        def fsync(handle):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fails(22)
    files.write_text(tmp_path / "x", "new")
    fails(28)
    with pytest.raises(OSError, match=os.strerror(28)):
        files.write_text(tmp_path / "x", "newer")
    assert (tmp_path / "x").read_text() == "new"
