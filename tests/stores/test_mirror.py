"""Mirror of a run in an object store: order of uploads, kills between any two of them, retention, and restarts."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from fake_stores import URL, FailingFiles, Killed, check_readable, record, save, use_memory
from messages import mentions, refuses

from leanformer import stores
from leanformer.errors import WorkdirError
from leanformer.stores import Store, StoreError, retry
from leanformer.stores.downloads import NEWEST, downloaded
from leanformer.stores.layout import complete_steps, download_step
from leanformer.stores.mirror import Mirror


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    use_memory(monkeypatch)


def open_mirror(folder, **failure):
    """Return a mirror that has downloaded the store, whose further changes may fail."""
    mirror = Mirror(Store(URL), folder, lambda: None)
    mirror.download()
    mirror.store.fs = FailingFiles(mirror.store.fs, **failure)
    return mirror


def train(folder, upload):
    """Do what a run of two newest checkpoints does to its folder, with an upload after each change."""
    save(folder, 10)
    upload()
    record(folder, 12)
    upload()
    save(folder, 20)
    (folder / "plots").mkdir()
    (folder / "plots" / "loss.png").write_bytes(b"plot")
    upload()
    save(folder, 30)
    shutil.rmtree(folder / "checkpoints" / "10")  # retention
    upload()
    (folder / "checkpoints_diverged").mkdir()  # training goes back to step 20
    (folder / "checkpoints" / "30").rename(folder / "checkpoints_diverged" / "30")
    record(folder, 20)
    upload()
    save(folder, 30, "another state")
    (folder / "checkpoints" / "30" / "score.json").write_text("{}")
    upload()
    (folder / "plots" / "loss.png").unlink()
    save(folder, 40)
    shutil.rmtree(folder / "checkpoints" / "20")
    upload()


def test_order_of_uploads(tmp_path):
    mirror = open_mirror(tmp_path / "run")
    train(tmp_path / "run", lambda: mirror.upload(small=True))
    log = [line.replace("/bucket/run/", "") for line in mirror.store.fs.log]
    assert log[:4] == [
        "+metrics.jsonl",
        "+checkpoints/10/_METADATA",
        "+checkpoints/10/d/array",
        "+checkpoints/10/files.json",
    ]
    assert log.index("+checkpoints/20/files.json") < log.index("+checkpoints/30/files.json")
    assert log.index("+checkpoints/30/files.json") < log.index("-checkpoints/10/files.json")
    assert log.index("-checkpoints/10/files.json") < log.index("-checkpoints/10/d/array")
    assert log.index("+checkpoints_diverged/30/files.json") < log.index("-checkpoints/30/files.json")
    names = mirror.store.sizes()
    assert complete_steps(names) == [30, 40] and "plots/loss.png" not in names
    assert mirror.store.read("checkpoints_diverged/30/d/array") == b"state 30"
    assert mirror.store.read("checkpoints/30/d/array") == b"another state 30" and "checkpoints/30/score.json" in names
    before = mirror.store.fs.changes
    mirror.upload(small=True)
    assert mirror.store.fs.changes == before  # nothing is uploaded twice


def count_changes(tmp_path):
    mirror = open_mirror(tmp_path / "counted")
    train(tmp_path / "counted", lambda: mirror.upload(small=True))
    Store(URL).fs.rm("/bucket", recursive=True)
    return mirror.store.fs.changes


def test_kill_between_any_two_uploads_leaves_a_readable_store(tmp_path):
    number = count_changes(tmp_path)
    assert number > 30
    for after in range(number):
        folder = tmp_path / f"first{after}" / "run"
        mirror = open_mirror(folder, error=Killed(), after=after)
        with pytest.raises(Killed):
            train(folder, lambda mirror=mirror: mirror.upload(small=True))
        remote = complete_steps(mirror.store.sizes())
        local = [int(path.name) for path in (folder / "checkpoints").iterdir()]
        if remote:
            with downloaded(URL, NEWEST, upload=False) as copy:
                check_readable(copy, remote[-1:])
            other = open_mirror(tmp_path / f"other{after}" / "run").folder  # a new machine, which only reads
            check_readable(other, remote)
            assert sorted(int(path.name) for path in (other / "checkpoints").iterdir()) == remote
            if after % 3 == 0:  # a machine that has not written since the other one did
                open_mirror(folder)
                check_readable(folder, remote)
                asides = [*folder.parent.glob("run.aside-*")]
                assert bool(asides) == (max(local) > remote[-1])
        Store(URL).fs.rm("/bucket", recursive=True)
        del mirror


def read_arrays(folder):
    return {path.parts[-3]: path.read_bytes() for path in (folder / "checkpoints").rglob("array")}


def test_restart_on_the_same_machine_keeps_what_was_not_uploaded(tmp_path):
    number = count_changes(tmp_path)
    for after in range(number):
        folder = tmp_path / f"run{after}" / "run"
        mirror = open_mirror(folder, error=Killed(), after=after)
        with pytest.raises(Killed):
            train(folder, lambda mirror=mirror: mirror.upload(small=True))
        before = read_arrays(folder)
        steps = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
        again = open_mirror(folder)
        again.upload(small=True)
        assert read_arrays(folder).items() >= before.items()
        check_readable(folder, steps)
        remote = complete_steps(again.store.sizes())
        assert remote[-1:] == steps[-1:] and {*steps} <= {*remote}
        Store(URL).fs.rm("/bucket", recursive=True)


def test_restart_keeps_a_step_that_was_trained_again(tmp_path):
    folder = tmp_path / "run"
    mirror = open_mirror(folder)
    save(folder, 10)
    mirror.upload(small=True)
    (folder / "checkpoints_diverged").mkdir()
    (folder / "checkpoints" / "10").rename(folder / "checkpoints_diverged" / "10")
    mirror = open_mirror(folder)
    assert read_arrays(folder) == {}  # it is not downloaded again
    save(folder, 10, "another state")
    mirror = open_mirror(folder)
    mirror.upload(small=True)
    assert read_arrays(folder) == {"10": b"another state 10"}
    assert mirror.store.read("checkpoints/10/d/array") == b"another state 10"
    assert mirror.store.read("checkpoints_diverged/10/d/array") == b"state 10"


def test_older_checkpoints_are_uploaded_first(tmp_path):
    """Otherwise a run could resume from a store that has its newest checkpoint, but not yet its best."""
    mirror = open_mirror(tmp_path / "run")
    for step in (30, 10, 20):
        save(tmp_path / "run", step)
    mirror.upload(small=False)
    lists = [line for line in mirror.store.fs.log if line.endswith("files.json")]
    assert [line.split("/")[-2] for line in lists] == ["10", "20", "30"]


def test_incomplete_checkpoints_do_not_exist(tmp_path):
    mirror = open_mirror(tmp_path / "first")
    save(tmp_path / "first", 10)
    mirror.upload(small=True)
    mirror.store.write("checkpoints/20/d/array", b"half")
    with downloaded(URL, upload=False) as copy:
        assert [path.name for path in (copy / "checkpoints").iterdir()] == ["10"]
    unfinished = tmp_path / "first" / "checkpoints" / "30.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    other = open_mirror(tmp_path / "first")
    assert not unfinished.exists() and "checkpoints/20/d/array" not in other.store.sizes()


def test_nothing_is_deleted_while_a_checkpoint_is_being_saved(tmp_path):
    """With checkpoint.keep=1 the older checkpoint is deleted before the checksums of the newer one are written."""
    folder = tmp_path / "run"
    mirror = open_mirror(folder)
    save(folder, 10)
    mirror.upload(small=True)
    shutil.rmtree(folder / "checkpoints" / "10")
    mirror.upload(small=True)
    (folder / "checkpoints" / "20").mkdir()
    mirror.upload(small=True)
    assert complete_steps(mirror.store.sizes()) == [10]
    shutil.rmtree(folder / "checkpoints")
    save(folder, 20)
    mirror.upload(small=True)
    assert complete_steps(mirror.store.sizes()) == [20]


def test_checkpoint_that_is_deleted_during_its_upload_is_uploaded_whole(tmp_path):
    folder = tmp_path / "run"
    mirror = open_mirror(folder)
    save(folder, 10)
    upload = mirror.store.upload

    def upload_slowly(items):
        shutil.rmtree(folder / "checkpoints" / "10", ignore_errors=True)
        upload(items)

    mirror.store.upload = upload_slowly
    mirror._send_step(10)
    with downloaded(URL, upload=False) as copy:
        record(copy, 10)
        check_readable(copy, [10])


def test_checkpoint_that_cannot_be_copied_is_an_error(tmp_path, monkeypatch):
    """On a full disk that has no hard links; a checkpoint that is being deleted is none."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "run"
    mirror = open_mirror(folder)
    save(folder, 10)
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copy2", fail)
    with refuses(folder / "checkpoints" / "10", "No space left", error=StoreError):
        mirror.upload(small=True)

    def delete(source, _):
        Path(source).unlink()
        raise FileNotFoundError(source)

    monkeypatch.setattr(shutil, "copy2", delete)
    mirror._send_step(10)
    assert complete_steps(mirror.store.sizes()) == []


@pytest.mark.parametrize(("lasts", "attempts"), [(1.0, 2), (14.0, 2), (300.0, 2)])
def test_time_of_an_attempt_is_no_time_of_failures(monkeypatch, lasts, attempts):
    """A long download that fails once is repeated; one that only fails ends after the patience."""
    clock, calls = [0.0], []

    def attempt(fails):
        calls.append(clock[0])
        clock[0] += lasts
        if len(calls) <= fails:
            raise StoreError("503")
        return "done"

    monkeypatch.setattr(stores.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stores.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert retry(lambda: attempt(1), 15.0) == "done" and len(calls) == attempts
    if lasts < 15:
        calls.clear()
        with refuses("503", error=StoreError):
            retry(lambda: attempt(1000), 15.0)
        assert len(calls) > 1 and clock[0] < 90


def test_store_replaces_a_local_folder_that_is_behind(tmp_path, capsys):
    first, second = tmp_path / "1" / "run", tmp_path / "2" / "run"
    mirror = open_mirror(first)
    save(first, 10)
    (first / "old.txt").write_text("old")
    mirror.upload(small=True)
    other = open_mirror(second)
    (second / "old.txt").unlink()
    save(second, 20)
    other.upload(small=True)
    mirror = open_mirror(first)
    check_readable(first, [10, 20])
    assert not (first / "old.txt").exists()
    # This machine gets ahead without uploading, while the other one writes too: nothing of either is lost.
    save(first, 40)
    other = open_mirror(second)
    save(second, 30)
    other.upload(small=True)
    open_mirror(first)
    check_readable(first, [10, 20, 30])
    check_readable(first.with_name("run.aside-1"), [10, 20, 40])
    assert mentions(capsys.readouterr().err, 40, first.with_name("run.aside-1"))


def test_damaged_local_checkpoints_are_downloaded_again(tmp_path):
    mirror = open_mirror(tmp_path / "run")
    save(tmp_path / "run", 10)
    mirror.upload(small=True)
    array = tmp_path / "run" / "checkpoints" / "10" / "d" / "array"
    array.write_text("other")
    open_mirror(tmp_path / "run")
    assert array.read_text() == "state 10"


def test_older_checkpoint_is_read_if_the_newest_is_damaged(tmp_path):
    mirror = open_mirror(tmp_path / "run")
    for step in (10, 20, 30):
        save(tmp_path / "run", step)
    mirror.upload(small=True)
    mirror.store.write("checkpoints/30/d/array", b"damaged")
    with downloaded(URL, upload=False) as copy:
        assert {path.name for path in (copy / "checkpoints").iterdir()} == {"20", "30"}
        check_readable(copy, [20])


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "a//b", "/etc/outside", "a\\b", "."])
def test_names_that_leave_the_folder_are_refused(name, tmp_path):
    store = Store(URL)
    store.fs.store[f"/bucket/run/{name}"] = None
    store.fs.find = lambda *_, **__: {f"/bucket/run/{name}": {"size": 1}}
    with refuses(URL, error=WorkdirError):
        Mirror(store, tmp_path / "staging" / "run", lambda: None).download()
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["staging"])


def test_markers_of_folders_are_no_files():
    store = Store(URL)
    store.fs.find = lambda *_, **__: {"/bucket/run/": {"size": 0}, "/bucket/run/plots/": {"size": 0}}
    assert store.sizes() == {}


def test_urls_are_checked(monkeypatch):
    for url in ("gs://bucket", "gs://bucket/", "gs://b/../c", "gs://b/run*", "gs://b/a b", "hf://user/model"):
        with refuses(url):
            stores.check_url(url, url)
    monkeypatch.setattr(stores.importlib.util, "find_spec", lambda _: None)
    for url, package, extra in (("gs://b/run", "gcsfs", "'.[gcs]'"), ("s3://b/run", "s3fs", "'.[s3]'")):
        with refuses(f"--workdir={url}", package, extra):
            stores.check_url(url, f"--workdir={url}")


def test_download_of_a_step_ends_with_its_checksums(tmp_path):
    mirror = open_mirror(tmp_path / "run")
    save(tmp_path / "run", 10)
    mirror.upload(small=True)
    names = mirror.store.sizes()
    mirror.store.delete(["checkpoints/10/d/array"])
    with refuses(URL, error=stores.StoreError):
        download_step(mirror.store, names, 10, tmp_path / "copy")
    assert not (tmp_path / "copy" / "checkpoints" / "10" / "files.json").exists()
